#include "kernels/detection_loss.h"

#include "bench/kernels/cases.h"
#include "bench/scene.h"

namespace detr::bench {
namespace {

constexpr std::int64_t kClasses = 80, kQueries = 300;

/// What all layers of a step share, on the device.
struct Truth {
  kernels::TrueBoxes boxes;
  Tensor normalizer;                                            ///< (1) wide
  Tensor denoising_match, denoising_groups, denoising_normalizer;
  data::Targets targets;                                        ///< on the host

  Truth(Inputs& in, std::int64_t n) {
    const Scene scene = make_scene(n, 0, 7);
    targets = scene.targets;
    const auto scalar = [&](double value) { return in.upload(host_tensor<float>({1}, std::vector<float>{static_cast<float>(value)})); };
    boxes = {in.upload(targets.labels), in.upload(targets.boxes)};
    const auto total = static_cast<double>(std::max<std::int64_t>(targets.total, 1));
    normalizer = scalar(total);
    denoising_normalizer = scalar(total * static_cast<double>(std::max<std::int64_t>(scene.denoising.groups, 1)));
    denoising_match = in.upload(scene.denoising.match);
    denoising_groups = in.upload(scene.denoising.group);
  }
};

/// One layer's predictions, their sets and results.
struct Layer {
  Tensor logits, boxes, terms, dterms, dlogits, dboxes;
  std::vector<kernels::PredictionSet> sets;

  Layer(Inputs& in, const Truth& truth, std::int64_t n, bool denoising) {
    const std::int64_t slots = denoising ? truth.denoising_match.dim(1) : 0, queries = slots + kQueries;
    logits = in.normal({n, queries, kClasses});
    boxes = in.upload(in.host_boxes({n, queries, 4}));
    Tensor match = host_zeros({n, kQueries}, DType::i64);
    for (std::int64_t i = 0; i < n; ++i) {
      std::int64_t* row = match.data<std::int64_t>() + i * kQueries;
      std::fill(row, row + kQueries, -1);
      // 37 and 300 have no common divisor: distinct queries, spread like those of a real matching.
      for (std::int64_t g = 0; g < truth.targets.counts.data<std::int64_t>()[i]; ++g) row[(37 * g + 11 * i) % kQueries] = g;
    }
    sets.push_back({slots, in.upload(match), Tensor(), truth.normalizer});
    if (denoising) sets.push_back({0, truth.denoising_match, truth.denoising_groups, truth.denoising_normalizer});
    const Shape shape{std::ssize(sets), 3};
    terms = in.wide_empty(shape);
    dterms = in.upload(in.host_normal(shape, 1, 0));
    dlogits = in.empty(logits.shape());
    dboxes = in.wide_empty(boxes.shape());
  }
};

Work make(Inputs& in, std::int64_t n, std::int64_t decoder_layers, bool encoder_layer, bool forward, bool backward) {
  const Truth truth(in, n);
  std::vector<Layer> layers;
  for (std::int64_t l = 0; l < decoder_layers; ++l) layers.emplace_back(in, truth, n, true);
  if (encoder_layer) layers.emplace_back(in, truth, n, false);
  Work work;
  for (const Layer& layer : layers) {
    if (forward) work.outputs.push_back(layer.terms);
    if (backward) work.outputs.insert(work.outputs.end(), {layer.dlogits, layer.dboxes});
  }
  work.run = [layers, boxes = truth.boxes, forward, backward](const Stream& stream) mutable {
    for (Layer& layer : layers) {
      if (forward) kernels::detection_loss_forward(stream, layer.logits, layer.boxes, layer.sets, boxes, {}, layer.terms);
      if (backward) kernels::detection_loss_backward(stream, layer.dterms, layer.logits, layer.boxes, layer.sets, boxes, {}, &layer.dlogits, &layer.dboxes);
    }
  };
  return work;
}

}  // namespace

std::vector<Case> detection_loss_cases() {
  struct Setup {
    const char *op, *variant;
    std::int64_t layers;
    bool encoder, forward, backward;
  };
  constexpr std::int64_t kImages = 64, kSlots = 200;
  std::vector<Case> cases;
  for (const Setup& s : {Setup{"detection_loss_forward", "layer", 1, false, true, false}, {"detection_loss_backward", "layer", 1, false, false, true},
                         {"detection_loss", "layer", 1, false, true, true},
                         {"detection_loss", "all", 6, true, true, true}}) {
    const std::int64_t predictions = s.layers * (kSlots + kQueries) + (s.encoder ? kQueries : 0);
    Case c{.op = s.op, .variant = s.variant, .shape = {{"N", kImages}, {"Q", predictions}, {"K", kClasses}}};
    c.size = kImages;
    c.small_size = 2;
    c.cost = (s.backward ? 1 : 0.5) * detection_loss(kImages, predictions, kClasses, 2);   // forward alone only reads
    c.make = [s](Inputs& in, std::int64_t n) { return make(in, n, s.layers, s.encoder, s.forward, s.backward); };
    cases.push_back(c);
  }
  return cases;
}

}  // namespace detr::bench

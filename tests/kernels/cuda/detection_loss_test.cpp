#include "kernels/detection_loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention.h"
#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;
using kernels::DetectionLossOptions;
using kernels::PredictionSet;
using kernels::TrueBoxes;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Results {
  Tensor terms, dlogits, dboxes;   // host, f64; a gradient that was not wanted is undefined
};

/// A layer on the host in f64, with sets that are added one by one.
struct Layer {
  Tensor logits, boxes;
  std::vector<PredictionSet> sets;
  TrueBoxes truth;
  DetectionLossOptions options;

  Layer(std::int64_t images, std::int64_t tokens, std::int64_t classes, std::int64_t capacity)
      : logits(random({images, tokens, classes}, DType::f64, 1)),
        boxes(random({images, tokens, 4}, DType::f64, 2)),
        truth{host_zeros({images, capacity}, DType::i64), random({images, capacity, 4}, DType::f64, 3)} {
    for (double& x : logits.span<double>()) x = 5 * x - 1;
    for (const Tensor* sides : {&boxes, &truth.boxes}) {
      for (double& x : sides->span<double>()) {
        x = 0.5 + 0.4 * x;
        if (x > 0.4) x = std::round(x * 8) / 8;   // many sides are equal
      }
    }
    for (std::int64_t i = 0; i < truth.labels.numel(); ++i) truth.labels.data<std::int64_t>()[i] = (i * 5 + 1) % classes;
  }

  /// Queries [begin, begin + queries) with about two matches in three; every `padding`-th slot is padding (0: no groups).
  Layer& add_set(std::int64_t begin, std::int64_t queries, std::int64_t padding = 0) {
    const std::int64_t images = logits.dim(0), capacity = truth.labels.dim(1);
    PredictionSet set{begin, host_zeros({images, queries}, DType::i64), {}, host_tensor<double>({1}, {4.5 + static_cast<double>(begin)})};
    for (std::int64_t i = 0; i < images * queries; ++i) {
      set.match.data<std::int64_t>()[i] = capacity > 0 && i % 3 ? (i + begin) % capacity : -1;
    }
    if (padding > 0) {
      set.groups = host_zeros({queries}, DType::i64);
      for (std::int64_t q = 0; q < queries; ++q) set.groups.data<std::int64_t>()[q] = q % padding ? 0 : kernels::kPaddingSlot;
    }
    sets.push_back(set);
    return *this;
  }
  Tensor dterms() const { return random({std::ssize(sets), 3}, DType::f64, 4); }

  /// The oracle's results for logits of a dtype.
  Results expected(DType dtype) const {
    const Stream stream = Stream::cpu(2);
    const Tensor x = rounded(logits, dtype), b = rounded(boxes, DType::f32);
    const TrueBoxes t{truth.labels, rounded(truth.boxes, DType::f32)};
    Results out{poisoned({std::ssize(sets), 3}, DType::f64), poisoned(logits.shape(), DType::f64), poisoned(boxes.shape(), DType::f64)};
    kernels::detection_loss_forward(stream, x, b, sets, t, options, out.terms);
    kernels::detection_loss_backward(stream, rounded(dterms(), DType::f32), x, b, sets, t, options, &out.dlogits, &out.dboxes);
    return out;
  }
  Results on_device(DType dtype, bool want_logits = true, bool want_boxes = true) const {
    const Tensor x = on_gpu(logits, dtype), b = on_gpu(boxes, DType::f32);
    const TrueBoxes t{on_gpu(truth.labels, DType::i64), on_gpu(truth.boxes, DType::f32)};
    std::vector<PredictionSet> moved;
    for (const PredictionSet& set : sets) {
      moved.push_back({set.begin, on_gpu(set.match, DType::i64), set.groups.defined() ? on_gpu(set.groups, DType::i64) : Tensor(),
                       on_gpu(set.normalizer, DType::f32)});
    }
    Guarded terms({std::ssize(sets), 3}, DType::f32), dlogits(logits.shape(), dtype), dboxes(boxes.shape(), DType::f32);
    kernels::detection_loss_forward(gpu(), x, b, moved, t, options, terms.tensor);
    kernels::detection_loss_backward(gpu(), on_gpu(dterms(), DType::f32), x, b, moved, t, options, want_logits ? &dlogits.tensor : nullptr,
                                     want_boxes ? &dboxes.tensor : nullptr);
    return {terms.values(), want_logits ? dlogits.values() : Tensor(), want_boxes ? dboxes.values() : Tensor()};
  }
};

/// Terms: some ten operations on each element and sums over the classes in f32, which errs by up to 64 roundings. dlogits: ten
/// operations, where probability - IoU may cancel to a tenth of the largest, and the rounding to bf16, whose 8 bits err by up to 2^-8.
/// dboxes are formed in f64 and added up over at most 8 sets in f32.
void expect_results(const Results& got, const Results& wanted, DType dtype) {
  expect_near(got.terms, wanted.terms, 64 * roundoff(DType::f32));
  expect_near(got.dlogits, wanted.dlogits, 128 * roundoff(DType::f32) + (dtype == DType::bf16 ? 1.0 / 256 : 0), 0.1);
  expect_near(got.dboxes, wanted.dboxes, 8 * roundoff(DType::f32));
}

void expect_agreement(const Layer& layer) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    INFO(name_of(dtype) << " " << layer.logits.shape() << ", " << layer.sets.size() << " sets");
    const Results got = layer.on_device(dtype);
    expect_results(got, layer.expected(dtype), dtype);
    const Results again = layer.on_device(dtype), logits_only = layer.on_device(dtype, true, false), boxes_only = layer.on_device(dtype, false, true);
    expect_same_bits(again.terms, got.terms);
    expect_same_bits(again.dlogits, got.dlogits);
    expect_same_bits(again.dboxes, got.dboxes);
    expect_same_bits(logits_only.dlogits, got.dlogits);
    expect_same_bits(boxes_only.dboxes, got.dboxes);
    layer.on_device(dtype, false, false);
  }
}

}  // namespace

TEST_CASE("detection_loss: CUDA agrees with the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const std::int64_t tokens : {0, 1, 31, 33}) {
    for (const std::int64_t classes : {1, 3, 31, 33, 365}) expect_agreement(Layer(3, tokens, classes, 4).add_set(0, tokens));
  }
  expect_agreement(Layer(2, 500, 80, 20).add_set(200, 300).add_set(0, 200, 5));   // a step
  expect_agreement(Layer(2, 33, 3, 0).add_set(0, 33));                            // no boxes
  expect_agreement(Layer(0, 33, 3, 2).add_set(0, 33));
}

TEST_CASE("detection_loss: on CUDA sets leave queries out, meet, are empty, or are none", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  expect_agreement(Layer(2, 70, 3, 5));
  expect_agreement(Layer(2, 70, 3, 5).add_set(3, 0).add_set(40, 20).add_set(5, 0));
  Layer eight(2, 70, 35, 5);
  for (std::int64_t s = 0; s < 8; ++s) eight.add_set(s * 5, 33, s % 2 * 4);
  expect_agreement(eight);
  eight.add_set(0, 1);
  expect_throws<InvalidArgument>([&] { eight.on_device(DType::f32); }, "at most 8 prediction sets");
}

TEST_CASE("detection_loss: on CUDA a general gamma and other weights", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  Layer layer = Layer(2, 33, 7, 5).add_set(0, 33);
  layer.options = {3, 2, 0.5, 0.4, 1.5};
  expect_agreement(layer);
}

TEST_CASE("detection_loss: on CUDA boxes without area and large logits give finite numbers", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const std::vector<std::vector<double>> strange = {{.5, .5, 0, 0},    {.5, .5, 0, .5},   {.5, .5, -.5, .5},        {.5, .5, -.5, -.5},
                                                    {.5, .5, 1e-40, 1}, {.9, .9, 0, 0},    {.3, .3, 1e-22, 1e-22}, {.125, .125, .125, .125}};
  const std::int64_t count = std::ssize(strange);
  Layer layer = Layer(1, count * count, 2, count).add_set(0, count * count);
  for (std::int64_t q = 0; q < count * count; ++q) {
    std::copy_n(strange[static_cast<std::size_t>(q / count)].data(), 4, layer.boxes.data<double>() + q * 4);
    layer.sets[0].match.data<std::int64_t>()[q] = q % count;
  }
  for (std::int64_t g = 0; g < count; ++g) std::copy_n(strange[static_cast<std::size_t>(g)].data(), 4, layer.truth.boxes.data<double>() + g * 4);
  for (std::int64_t i = 0; i < 8; ++i) layer.logits.data<double>()[i] = i % 2 ? 1e4 : -1e4;
  const Results got = layer.on_device(DType::f32);
  expect_results(got, layer.expected(DType::f32), DType::f32);
  for (const Tensor& tensor : {got.terms, got.dlogits, got.dboxes}) {
    CHECK(std::ranges::all_of(values_of(tensor), [](double x) { return std::isfinite(x); }));
  }
}

TEST_CASE("detection_loss: on CUDA padding is not looked at, and what points outside is no match", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  Layer layer = Layer(2, 40, 3, 5).add_set(4, 36, 3), spoiled = layer, clean = layer;
  // Tensors are handles: a layer that is changed needs its own.
  const auto own = [](Tensor& tensor) {
    const Tensor from = tensor;
    tensor = host_zeros(from.shape(), from.dtype());
    Stream::cpu(1).copy(from, tensor);
  };
  for (Layer* changed : {&spoiled, &clean}) {
    for (Tensor* tensor : {&changed->logits, &changed->boxes, &changed->truth.labels, &changed->sets[0].match}) own(*tensor);
  }
  std::int64_t* match = spoiled.sets[0].match.data<std::int64_t>();
  for (std::int64_t n = 0; n < 2; ++n) {
    for (std::int64_t q = 0; q < 36; q += 3) {
      match[n * 36 + q] = 1234567890123;
      std::fill_n(spoiled.logits.data<double>() + (n * 40 + 4 + q) * 3, 3, kNan);
      std::fill_n(spoiled.boxes.data<double>() + (n * 40 + 4 + q) * 4, 4, kNan);
    }
  }
  match[1] = 5;
  match[2] = -2;
  for (std::int64_t q = 1; q < 3; ++q) clean.sets[0].match.data<std::int64_t>()[q] = -1;
  spoiled.truth.labels.data<std::int64_t>()[5 + 2] = 3;
  spoiled.truth.labels.data<std::int64_t>()[5 + 3] = -1;
  for (std::int64_t q = 36; q < 72; ++q) {
    std::int64_t& m = clean.sets[0].match.data<std::int64_t>()[q];
    if (m == 2 || m == 3) m = -1;
  }
  const Results got = spoiled.on_device(DType::f32), wanted = clean.on_device(DType::f32);
  expect_same_bits(got.terms, wanted.terms);
  expect_same_bits(got.dlogits, wanted.dlogits);
  expect_same_bits(got.dboxes, wanted.dboxes);

  Layer nan = Layer(1, 3, 2, 1).add_set(0, 3);
  nan.boxes.data<double>()[5] = kNan;   // query 1, which is matched
  for (const double term : values_of(nan.on_device(DType::bf16).terms)) CHECK(std::isnan(term));
}

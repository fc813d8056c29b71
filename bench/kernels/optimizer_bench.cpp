#include "kernels/optimizer.h"

#include "bench/kernels/cases.h"
#include "kernels/activation.h"
#include "kernels/pointwise.h"

namespace detr::bench {
namespace {

constexpr double kMaxNorm = 0.1, kDecay = 0.9999, kRamp = 2000;
// Elements of a segment, over and over: biases and weights as a model has them, 86,000 on average.
constexpr std::int64_t kSegmentSizes[] = {256, 2560, 65536, 16384, 345264};

std::int64_t elements_of(std::int64_t segments) {
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < segments; ++i) sum += kSegmentSizes[static_cast<std::size_t>(i) % std::size(kSegmentSizes)];
  return sum;
}

/// Flat buffers of `segments` parameters, all used.
struct State {
  kernels::Segments segments;
  Tensor grads, weights, exp_avg, exp_avg_sq, ema, shadow, norms, scalars;

  State(Inputs& in, std::int64_t count) {
    const auto n = static_cast<std::size_t>(count);
    std::vector<std::int64_t> begin, sizes;
    std::int64_t total = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      begin.push_back(total);
      sizes.push_back(kSegmentSizes[static_cast<std::size_t>(i) % std::size(kSegmentSizes)]);
      total += sizes.back();
    }
    const Shape shape{count}, flat{total};
    segments.begin = in.upload(host_tensor(shape, begin));
    segments.count = in.upload(host_tensor(shape, sizes));
    segments.lr = in.upload(host_tensor(shape, std::vector<double>(n, 1e-4)));
    segments.weight_decay = in.upload(host_tensor(shape, std::vector<double>(n, 1e-4)));
    segments.steps = in.upload(host_tensor(shape, std::vector<std::int64_t>(n, 1000)));
    segments.used = in.upload(host_tensor(shape, std::vector<double>(n, 1.0)));
    grads = in.wide_normal(flat, 1.0 / 1024);
    weights = in.wide_normal(flat, 1.0 / 32);
    ema = in.wide_normal(flat, 1.0 / 32);
    exp_avg = in.wide_normal(flat, 1.0 / 1024);
    // Second moments are positive, of about the square of the gradients.
    const Tensor positive = in.wide_empty(flat);
    Tensor y = positive;
    kernels::activation_forward(in.stream(), in.wide_normal(flat), kernels::Activation::sigmoid, y);
    exp_avg_sq = in.wide_empty(flat);
    kernels::scale(in.stream(), positive, 1.0 / (1 << 20), exp_avg_sq);
    shadow = in.empty(flat);
    norms = in.stream().empty(shape, DType::f64);
    std::vector<double> values(kernels::kScalars, 1);   // apply, no clipping, the whole learning rate
    values[kernels::kEmaUpdates] = 1000;
    scalars = in.upload(host_tensor({kernels::kScalars}, values));
  }
};

enum class Part { norms, adamw, average, step };

Work make(Inputs& in, std::int64_t count, Part part) {
  State s(in, count);
  Work work;
  switch (part) {
    case Part::norms: work.outputs = {s.norms}; break;
    case Part::adamw: work.outputs = {s.weights, s.exp_avg, s.exp_avg_sq, s.segments.steps}; break;
    case Part::average: work.outputs = {s.ema, s.scalars}; break;
    case Part::step: work.outputs = {s.norms, s.weights, s.exp_avg, s.exp_avg_sq, s.ema, s.shadow, s.scalars, s.segments.steps}; break;
  }
  work.run = [s, part](const Stream& stream) mutable {
    const bool all = part == Part::step;
    if (all || part == Part::norms) kernels::squared_norms(stream, s.segments, s.grads, s.norms);
    if (all) kernels::finish_norm(stream, s.norms, kMaxNorm, s.scalars);
    if (all || part == Part::adamw) kernels::adamw(stream, s.segments, {}, s.scalars, s.grads, s.weights, s.exp_avg, s.exp_avg_sq);
    if (all || part == Part::average) kernels::update_ema(stream, kDecay, kRamp, s.scalars, s.weights, s.ema);
    if (all) kernels::cast(stream, s.weights, s.shadow);
  };
  return work;
}

}  // namespace

std::vector<Case> optimizer_cases() {
  struct Setup {
    const char* op;
    Part part;
    double bytes;   ///< a parameter
  };
  constexpr std::int64_t kSegments = 500;
  std::vector<Case> cases;
  for (const Setup& s : {Setup{"squared_norms", Part::norms, kNormBytes}, {"adamw", Part::adamw, kAdamwBytes}, {"update_ema", Part::average, kAverageBytes},
                         {"optimizer_step", Part::step, kOptimizerPassBytes + kNormBytes}}) {
    Case c{.op = s.op, .variant = "", .shape = {{"segments", kSegments}, {"elements", elements_of(kSegments)}}, .dtype = DType::f32};
    if (s.part == Part::step) c.dtype = DType::bf16;   // of the shadow
    c.size = kSegments;
    c.small_size = 10;
    c.cost = kernel_cost(0, s.bytes * static_cast<double>(elements_of(kSegments)));
    c.make = [part = s.part](Inputs& in, std::int64_t count) { return make(in, count, part); };
    cases.push_back(c);
  }
  return cases;
}

}  // namespace detr::bench

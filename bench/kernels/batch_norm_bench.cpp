#include "kernels/batch_norm.h"

#include <optional>

#include "bench/kernels/cases.h"

namespace detr::bench {
namespace {

using kernels::Activation;

constexpr double kEps = 1e-5, kMomentum = 0.1;

/// Which op, what follows the norm, and whether its statistics are the batch's.
struct Setup {
  const char *op, *variant;
  Activation activation;
  bool residual, batch_statistics, backward;
};

constexpr Setup kSetups[] = {
    {"batch_norm_forward", "silu", Activation::silu, false, true, false},
    {"batch_norm_forward", "silu+residual", Activation::silu, true, true, false},
    {"batch_norm_forward", "relu", Activation::relu, false, true, false},
    {"batch_norm_inference", "relu", Activation::relu, false, false, false},
    {"batch_norm_inference", "relu+residual", Activation::relu, true, false, false},
    {"batch_norm_backward", "silu", Activation::silu, false, true, true},
    {"batch_norm_backward", "silu+residual", Activation::silu, true, true, true},
    {"batch_norm_backward", "relu", Activation::relu, false, true, true},
    {"batch_norm_backward", "frozen relu+residual", Activation::relu, true, false, true},
};

Work make(Inputs& in, const Shape& shape, const Setup& s) {
  const Shape channels{shape.dim(-1)};
  const Tensor x = in.normal(shape), weight = in.upload(in.host_normal(channels, 1, 0.125)), bias = in.upload(in.host_normal(channels, 0, 0.125));
  std::optional<Tensor> residual;
  if (s.residual) residual = in.normal(shape);
  Tensor running_mean = in.upload(in.host_normal(channels, 0, 0.125)), running_var = in.upload(in.host_normal(channels, 1, 0.0625));
  Tensor y = in.empty(shape), mean = in.wide_empty(channels), rstd = in.wide_empty(channels);
  const auto forward = [=](const Stream& stream) mutable {
    const Tensor* skip = residual ? &*residual : nullptr;
    if (s.batch_statistics) kernels::batch_norm_forward(stream, x, weight, bias, skip, s.activation, kEps, kMomentum, running_mean, running_var, y, mean, rstd);
    else kernels::batch_norm_inference(stream, x, weight, bias, skip, s.activation, kEps, running_mean, running_var, y, mean, rstd);
  };
  if (!s.backward) return {forward, {y, mean, rstd, running_mean, running_var}};
  auto first = forward;
  first(in.stream());
  const Tensor dy = in.normal(shape);
  Tensor dx = in.empty(shape);
  // A frozen norm has no gradients of its own, and then its backward is not given the map.
  std::optional<Tensor> dresidual, dweight, dbias;
  if (s.residual) dresidual = in.empty(shape);
  if (s.batch_statistics) {
    dweight = in.wide_empty(channels);
    dbias = in.wide_empty(channels);
  }
  Work work;
  work.outputs = {dx};
  for (const auto& one : {dresidual, dweight, dbias}) {
    if (one) work.outputs.push_back(*one);
  }
  const Tensor read_x = s.batch_statistics ? x : Tensor(), read_y = s.activation == Activation::relu ? y : Tensor();
  if (s.activation != Activation::silu) residual.reset();
  work.run = [=](const Stream& stream) mutable {
    const auto pointer = [](auto& one) { return one ? &*one : nullptr; };
    kernels::batch_norm_backward(stream, dy, read_x, weight, bias, pointer(residual), read_y, mean, rstd, s.activation, s.batch_statistics, &dx, pointer(dweight), pointer(dbias), pointer(dresidual));
  };
  return work;
}

Cost cost_of(const Setup& s, std::int64_t elements) {
  if (!s.backward) return s.batch_statistics ? batch_norm_forward(elements, 2, s.residual) : batch_norm_inference(elements, 2, s.residual);
  const bool mask = s.activation == Activation::relu || s.residual;
  return batch_norm_backward(elements, 2, s.batch_statistics, mask ? 1 : 0, s.residual);
}

}  // namespace

std::vector<Case> batch_norm_cases() {
  std::vector<Case> cases;
  for (const Setup& s : kSetups) {
    for (const Shape& shape : {Shape{64, 320, 320, 32}, Shape{64, 160, 160, 64}, Shape{64, 80, 80, 256}, Shape{16, 20, 20, 256}}) {
      Case c{.op = s.op, .variant = s.variant, .shape = {{"N", shape[0]}, {"H", shape[1]}, {"W", shape[2]}, {"C", shape[3]}}};
      c.size = shape[0];
      c.cost = cost_of(s, shape.numel());
      c.make = [s, shape](Inputs& in, std::int64_t n) { return make(in, {n, shape[1], shape[2], shape[3]}, s); };
      cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace detr::bench

#include "kernels/conv2d_norm.h"

#include <cmath>
#include <optional>

#include "bench/kernels/cases.h"

namespace detr::bench {
namespace {

enum class Pass { forward, data_gradient, weight_gradient };

const char* name_of(Pass pass) { return pass == Pass::forward ? "conv2d_fprop" : pass == Pass::data_gradient ? "conv2d_dgrad" : "conv2d_wgrad"; }

/// About 1 / sqrt(inputs), a power of two.
double weight_sigma(std::int64_t inputs) { return 1 / std::exp2(std::round(std::log2(std::sqrt(static_cast<double>(inputs))))); }

Work make(Inputs& in, const ConvGeometry& g, std::int64_t n, Pass pass) {
  const kernels::Conv2dOptions options{g.stride, (g.kernel - 1) / 2};
  const Shape map{n, g.h, g.w, g.in}, filter{g.out, g.kernel, g.kernel, g.in}, output = kernels::conv2d_shape(map, filter, options);
  const Tensor x = in.normal(map), weight = in.normal(filter, weight_sigma(g.in * g.kernel * g.kernel));
  if (pass == Pass::forward) {
    Tensor y = in.empty(output);
    return {[=](const Stream& stream) mutable { kernels::conv2d_forward(stream, x, weight, options, y); }, {y}};
  }
  const Tensor dy = in.normal(output);
  Tensor gradient = pass == Pass::data_gradient ? in.empty(map) : in.wide_empty(filter);
  return {[=](const Stream& stream) mutable {
            kernels::conv2d_backward(stream, dy, x, weight, options, pass == Pass::data_gradient ? &gradient : nullptr, pass == Pass::weight_gradient ? &gradient : nullptr);
          },
          {gradient}};
}

/// With a folded norm, a ReLU and perhaps a residual: what R50's blocks run.
Work make_shift(Inputs& in, const ConvGeometry& g, std::int64_t n, bool with_residual) {
  const kernels::Conv2dOptions options{g.stride, (g.kernel - 1) / 2};
  const Shape filter{g.out, g.kernel, g.kernel, g.in};
  const Tensor x = in.normal({n, g.h, g.w, g.in}), weight = in.normal(filter, weight_sigma(g.in * g.kernel * g.kernel)), shift = in.upload(in.host_normal({g.out}, 0, 0.125));
  const Shape output = kernels::conv2d_shape(x.shape(), filter, options);
  std::optional<Tensor> residual;
  if (with_residual) residual = in.normal(output);
  Tensor y = in.empty(output);
  return {[=](const Stream& stream) mutable { kernels::conv2d_shift_forward(stream, x, weight, shift, residual ? &*residual : nullptr, kernels::Activation::relu, options, y); }, {y}};
}

Cost cost_of(const ConvGeometry& g, Pass pass) {
  switch (pass) {
    case Pass::forward: return conv_forward(g, 2);
    case Pass::data_gradient: return conv_data_gradient(g, 2);
    case Pass::weight_gradient: return conv_weight_gradient(g, 2);
  }
  return {};
}

Case conv_case(const char* variant, ConvGeometry g, std::int64_t n, Pass pass) {
  g.n = n;
  Case c{.op = name_of(pass), .variant = variant, .shape = {{"N", n}, {"H", g.h}, {"Ci", g.in}, {"Co", g.out}, {"k", g.kernel}, {"s", g.stride}}};
  c.size = n;
  c.cost = cost_of(g, pass);
  c.make = [g, pass](Inputs& in, std::int64_t images) { return make(in, g, images, pass); };
  return c;
}

}  // namespace

std::vector<Case> conv2d_cases() {
  struct Layer {
    const char* where;
    ConvGeometry g;
  };
  // One of each kind: a stem convolution, the stages of R50 (those with 64 and 128 channels are R18's too), the encoder's.
  const Layer layers[] = {{"stem", {1, 320, 320, 32, 64, 3, 1}},    {"stage1", {1, 160, 160, 64, 64, 3, 1}},  {"stage1", {1, 160, 160, 64, 256, 1, 1}},   {"stage2", {1, 80, 80, 128, 128, 3, 1}},
                          {"stage3", {1, 40, 40, 256, 256, 3, 1}}, {"stage4", {1, 20, 20, 512, 512, 3, 1}}, {"downsample", {1, 80, 80, 256, 256, 3, 2}}};
  std::vector<Case> cases;
  for (const std::int64_t n : {16, 64}) {
    cases.push_back(conv_case("pictures", {1, 640, 640, 3, 32, 3, 2}, n, Pass::forward));
    for (const Layer& layer : layers) {
      for (const Pass pass : {Pass::forward, Pass::data_gradient, Pass::weight_gradient}) cases.push_back(conv_case(layer.where, layer.g, n, pass));
    }
    for (const bool residual : {false, true}) {
      const ConvGeometry g = residual ? ConvGeometry{n, 160, 160, 64, 256, 1, 1} : ConvGeometry{n, 40, 40, 256, 256, 3, 1};
      Case c = conv_case(residual ? "relu+residual" : "relu", g, n, Pass::forward);
      c.op = "conv2d_shift_forward";
      c.cost = conv_forward(g, 2, residual ? 1 : 0);
      c.make = [g, residual](Inputs& in, std::int64_t images) { return make_shift(in, g, images, residual); };
      cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace detr::bench

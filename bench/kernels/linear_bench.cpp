#include "kernels/linear.h"

#include "bench/kernels/cases.h"

namespace detr::bench {
namespace {

/// Weights keep the size of what goes through them: sigma is about 1 / sqrt(in).
double weight_sigma(std::int64_t in) { return in >= 1024 ? 1.0 / 32 : 1.0 / 16; }

Work make(Inputs& in, const Shape& shape, std::int64_t out, bool backward) {
  const std::int64_t width = shape.dim(-1);
  const Tensor x = in.normal(shape), weight = in.normal({out, width}, weight_sigma(width)), bias = in.normal({out}, 0.125);
  const Shape output = kernels::linear_shape(shape, weight.shape());
  if (!backward) {
    Tensor y = in.empty(output);
    return {[=](const Stream& stream) mutable { kernels::linear_forward(stream, x, weight, &bias, y); }, {y}};
  }
  const Tensor dy = in.normal(output);
  Tensor dx = in.empty(shape), dweight = in.wide_empty(weight.shape()), dbias = in.wide_empty({out});
  return {[=](const Stream& stream) mutable { kernels::linear_backward(stream, dy, x, weight, &dx, &dweight, &dbias); }, {dx, dweight, dbias}};
}

}  // namespace

std::vector<Case> linear_cases() {
  struct Size {
    std::int64_t n, tokens, in, out;
  };
  std::vector<Case> cases;
  for (const Size& s : {Size{64, 8400, 256, 256}, {64, 8400, 256, 1536}, {64, 500, 256, 256}, {64, 500, 256, 288}, {64, 500, 256, 1024},
                        {64, 500, 1024, 256}, {16, 500, 256, 256}, {16, 500, 256, 1024}}) {
    for (const bool backward : {false, true}) {
      Case c{.op = backward ? "linear_backward" : "linear_forward", .variant = "", .shape = {{"N", s.n}, {"T", s.tokens}, {"Ci", s.in}, {"Co", s.out}}};
      c.size = s.n;
      c.cost = (backward ? 2.0 : 1.0) * linear_product(s.n * s.tokens, s.in, s.out, 2);
      c.make = [s, backward](Inputs& in, std::int64_t n) { return make(in, {n, s.tokens, s.in}, s.out, backward); };
      cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace detr::bench

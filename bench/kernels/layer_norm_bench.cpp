#include "kernels/layer_norm.h"

#include <optional>

#include "bench/kernels/cases.h"

namespace detr::bench {
namespace {

constexpr double kEps = 1e-5;

Work make_forward(Inputs& in, const Shape& shape, bool with_residual) {
  const Tensor x = in.normal(shape), weight = in.upload(in.host_normal({shape.dim(-1)}, 1, 0.125)), bias = in.upload(in.host_normal({shape.dim(-1)}, 0, 0.125));
  std::optional<Tensor> residual, sum;
  if (with_residual) {
    residual = in.normal(shape);
    sum = in.empty(shape);
  }
  Tensor y = in.empty(shape), mean = in.wide_empty({x.rows()}), rstd = in.wide_empty({x.rows()});
  Work work;
  work.outputs = {y, mean, rstd};
  if (sum) work.outputs.push_back(*sum);
  work.run = [=](const Stream& stream) mutable { kernels::layer_norm_forward(stream, x, residual ? &*residual : nullptr, weight, bias, kEps, sum ? &*sum : nullptr, y, mean, rstd); };
  return work;
}

Work make_backward(Inputs& in, const Shape& shape) {
  const Shape width{shape.dim(-1)};
  const Tensor sum = in.normal(shape), dy = in.normal(shape), weight = in.upload(in.host_normal(width, 1, 0.125)), bias = in.upload(in.host_normal(width, 0, 0.125));
  Tensor y = in.empty(shape), mean = in.wide_empty({sum.rows()}), rstd = in.wide_empty({sum.rows()});
  kernels::layer_norm_forward(in.stream(), sum, nullptr, weight, bias, kEps, nullptr, y, mean, rstd);
  Tensor ds = in.empty(shape), dweight = in.wide_empty(width), dbias = in.wide_empty(width);
  return {[=](const Stream& stream) mutable { kernels::layer_norm_backward(stream, dy, sum, weight, mean, rstd, &ds, &dweight, &dbias); }, {ds, dweight, dbias}};
}

}  // namespace

std::vector<Case> layer_norm_cases() {
  std::vector<Case> cases;
  for (const auto& [n, tokens] : {std::pair{std::int64_t{16}, std::int64_t{500}}, {64, 500}, {64, 8400}}) {
    const bool residual = tokens == 500;   // the decoder's; the encoder output's has none
    const std::int64_t rows = n * tokens;
    for (const bool backward : {false, true}) {
      Case c{.op = backward ? "layer_norm_backward" : "layer_norm_forward", .variant = residual && !backward ? "residual" : "", .shape = {{"N", n}, {"T", tokens}, {"D", 256}}};
      c.size = n;
      c.cost = backward ? layer_norm_backward(rows, 256, 2) : layer_norm_forward(rows, 256, 2, residual);
      c.make = [tokens = tokens, residual, backward](Inputs& in, std::int64_t images) {
        const Shape shape{images, tokens, 256};
        return backward ? make_backward(in, shape) : make_forward(in, shape, residual);
      };
      cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace detr::bench

#include "kernels/pointwise.h"

#include "bench/kernels/cases.h"
#include "kernels/activation.h"

namespace detr::bench {
namespace {

constexpr std::int64_t kImages = 64;

Work make_pictures(Inputs& in, std::int64_t n) {
  const Tensor images = in.bytes({n, 640, 640, 3});
  Tensor y = in.empty(images.shape());
  return {[=](const Stream& stream) mutable { kernels::images_to_float(stream, images, y); }, {y}};
}

Work make_add(Inputs& in, const Shape& shape) {
  const Tensor a = in.normal(shape), b = in.normal(shape);
  Tensor y = in.empty(shape);
  return {[=](const Stream& stream) mutable { kernels::add_forward(stream, a, b, y); }, {y}};
}

Work make_activation(Inputs& in, const Shape& shape, kernels::Activation activation, bool backward) {
  const Tensor x = in.normal(shape), dy = in.normal(shape);
  Tensor y = in.empty(shape), dx = in.empty(shape);
  if (!backward) return {[=](const Stream& stream) mutable { kernels::activation_forward(stream, x, activation, y); }, {y}};
  kernels::activation_forward(in.stream(), x, activation, y);
  return {[=](const Stream& stream) mutable { kernels::activation_backward(stream, dy, x, y, activation, &dx); }, {dx}};
}

}  // namespace

std::vector<Case> pointwise_cases() {
  std::vector<Case> cases;
  Case pictures{.op = "images_to_float", .variant = "", .shape = {{"N", kImages}, {"H", 640}, {"W", 640}, {"C", 3}}};
  pictures.size = kImages;
  pictures.cost = passes_over(kImages * 640 * 640 * 3, 1, 1 + 2);
  pictures.make = make_pictures;
  cases.push_back(pictures);

  Case sum{.op = "add_forward", .variant = "", .shape = {{"N", kImages}, {"H", 80}, {"W", 80}, {"C", 256}}};
  sum.size = kImages;
  sum.cost = passes_over(kImages * 80 * 80 * 256, 3, 2);
  sum.make = [](Inputs& in, std::int64_t n) { return make_add(in, {n, 80, 80, 256}); };
  cases.push_back(sum);

  // The feed-forward layers of the decoder and of the encoder.
  for (const auto& [name, activation, tokens] : {std::tuple{"relu", kernels::Activation::relu, std::int64_t{500}}, {"gelu", kernels::Activation::gelu, std::int64_t{400}}}) {
    for (const bool backward : {false, true}) {
      Case c{.op = backward ? "activation_backward" : "activation_forward", .variant = name, .shape = {{"N", kImages}, {"T", tokens}, {"D", 1024}}};
      c.size = kImages;
      c.cost = passes_over(kImages * tokens * 1024, backward ? 3 : 2, 2);
      c.make = [activation = activation, tokens = tokens, backward](Inputs& in, std::int64_t n) { return make_activation(in, {n, tokens, 1024}, activation, backward); };
      cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace detr::bench

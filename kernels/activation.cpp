#include "kernels/activation.h"

#include "kernels/dispatch.h"

namespace detr::kernels {

void activation_forward(const Stream& stream, const Tensor& x, Activation activation, Tensor& y) {
  expect_like(x, "activation: y", y, x.shape());
  DETR_DISPATCH(x.device(), activation_forward, stream, x, activation, y);
}

void activation_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& y, Activation activation, Tensor* dx) {
  const bool reads_y = activation == Activation::relu || activation == Activation::sigmoid;
  const bool reads_x = activation == Activation::silu || activation == Activation::gelu;
  if (reads_y) expect_like(dy, "activation: y", y, dy.shape());
  if (reads_x) expect_like(dy, "activation: x", x, dy.shape());
  expect_like(dy, "activation: dx", dx, dy.shape());
  if (!dx) return;
  DETR_DISPATCH(dy.device(), activation_backward, stream, dy, x, y, activation, dx);
}

}  // namespace detr::kernels

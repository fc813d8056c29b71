#include "kernels/pool.h"

#include "kernels/dispatch.h"

namespace detr::kernels {
namespace {

/// (N, ceil(H / 2), ceil(W / 2), C)
Shape halved(const char* op, const Tensor& x) {
  DETR_CHECK(x.rank() == 4, op, ": x must be (N, H, W, C), got ", x);
  return {x.dim(0), (x.dim(1) + 1) / 2, (x.dim(2) + 1) / 2, x.dim(3)};
}

/// (N, 2 H, 2 W, C)
Shape doubled(const char* op, const Tensor& x) {
  DETR_CHECK(x.rank() == 4, op, ": x must be (N, H, W, C), got ", x);
  return {x.dim(0), 2 * x.dim(1), 2 * x.dim(2), x.dim(3)};
}

}  // namespace

void max_pool_forward(const Stream& stream, const Tensor& x, Tensor& y) {
  expect_like(x, "max_pool: y", y, halved("max_pool", x));
  DETR_DISPATCH(x.device(), max_pool_forward, stream, x, y);
}

void max_pool_backward(const Stream& stream, const Tensor& dy, const Tensor& x, Tensor* dx) {
  expect_like(x, "max_pool: dy", dy, halved("max_pool", x));
  expect_like(x, "max_pool: dx", dx, x.shape());
  if (!dx) return;
  DETR_DISPATCH(x.device(), max_pool_backward, stream, dy, x, dx);
}

void avg_pool_forward(const Stream& stream, const Tensor& x, Tensor& y) {
  expect_like(x, "avg_pool: y", y, halved("avg_pool", x));
  DETR_DISPATCH(x.device(), avg_pool_forward, stream, x, y);
}

void avg_pool_backward(const Stream& stream, const Tensor& dy, Tensor* dx) {
  if (!dx) return;
  expect_like(*dx, "avg_pool: dy", dy, halved("avg_pool", *dx));
  DETR_DISPATCH(dy.device(), avg_pool_backward, stream, dy, dx);
}

void upsample_forward(const Stream& stream, const Tensor& x, Tensor& y) {
  expect_like(x, "upsample: y", y, doubled("upsample", x));
  DETR_DISPATCH(x.device(), upsample_forward, stream, x, y);
}

void upsample_backward(const Stream& stream, const Tensor& dy, Tensor* dx) {
  if (!dx) return;
  expect_like(*dx, "upsample: dy", dy, doubled("upsample", *dx));
  DETR_DISPATCH(dy.device(), upsample_backward, stream, dy, dx);
}

}  // namespace detr::kernels

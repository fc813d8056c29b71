#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// Max pooling, 3 x 3, stride 2, padding 1 (the stem's). x (N, H, W, C), y (N, ceil(H / 2), ceil(W / 2), C) out, like x.
/// A NaN in a window wins, as does the first of equal maxima (or of several NaNs) in row-major order.
/// All six take the dtypes of Note [Element types], add in f32 on CUDA (in x's dtype on the CPU) and in a fixed order, round once, are fit
/// for capture, and throw InvalidArgument if a shape, dtype or device disagrees.
void max_pool_forward(const Stream& stream, const Tensor& x, Tensor& y);
/// dx: the gradient of a window goes to its first maximum. Overwritten; null is not wanted. Scratch: a byte for each element of dy.
void max_pool_backward(const Stream& stream, const Tensor& dy, const Tensor& x, Tensor* dx);

/// Average pooling, 2 x 2, stride 2, no padding, ceil mode: a partial window is divided by its real elements.
/// x (N, H, W, C), y (N, ceil(H / 2), ceil(W / 2), C) out.
void avg_pool_forward(const Stream& stream, const Tensor& x, Tensor& y);
void avg_pool_backward(const Stream& stream, const Tensor& dy, Tensor* dx);

/// Nearest upsampling by two: y[n, i, j] = x[n, i / 2, j / 2]. x (N, H, W, C), y (N, 2 H, 2 W, C) out.
void upsample_forward(const Stream& stream, const Tensor& x, Tensor& y);
void upsample_backward(const Stream& stream, const Tensor& dy, Tensor* dx);

namespace cpu {
extern decltype(kernels::max_pool_forward) max_pool_forward;
extern decltype(kernels::max_pool_backward) max_pool_backward;
extern decltype(kernels::avg_pool_forward) avg_pool_forward;
extern decltype(kernels::avg_pool_backward) avg_pool_backward;
extern decltype(kernels::upsample_forward) upsample_forward;
extern decltype(kernels::upsample_backward) upsample_backward;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::max_pool_forward) max_pool_forward;
extern decltype(kernels::max_pool_backward) max_pool_backward;
extern decltype(kernels::avg_pool_forward) avg_pool_forward;
extern decltype(kernels::avg_pool_backward) avg_pool_backward;
extern decltype(kernels::upsample_forward) upsample_forward;
extern decltype(kernels::upsample_backward) upsample_backward;
}  // namespace cuda
}  // namespace detr::kernels

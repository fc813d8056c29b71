#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// Geometry of a 2-d convolution: dilation 1, groups 1, the same stride and zero padding in both directions.
struct Conv2dOptions {
  std::int64_t stride = 1;
  std::int64_t padding = 0;
};

/// Shape of the output: (N, floor((H + 2 p - kh) / s) + 1, floor((W + 2 p - kw) / s) + 1, O).
/// Throws InvalidArgument if a rank or the channels disagree, the kernel is empty or larger than the padded map, the stride is
/// not positive or the padding negative.
Shape conv2d_shape(const Shape& x, const Shape& weight, const Conv2dOptions& options);

/// Cross-correlation without bias, channels last.
///
/// x       (N, H, W, I)      f32 or f64, on CUDA f32 or bf16 (Note [Element types] in kernels/dispatch.h)
/// weight  (O, kh, kw, I)    dtype of x
/// y       (N, H', W', O)    out, shape conv2d_shape(...)
///
/// On the CPU by im2col in blocks of output pixels and Eigen products; a 1 x 1 convolution of stride 1 needs no im2col. Same
/// bits for any number of threads. On CUDA by cuDNN's deterministic engines, sums in f32 without TF32. Throws InvalidArgument if a shape, dtype or device disagrees.
void conv2d_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Conv2dOptions& options, Tensor& y);

/// Backward of the above, for any subset of wanted gradients; null is neither computed nor written.
/// dx (N, H, W, I), dweight (O, kh, kw, I), wide: overwritten; dx is added to what is there if `add_dx`.
/// `relu_x`: x is what a ReLU gave, and dx, with all that it is added to, becomes the gradient of what the ReLU took: 0 where x <= 0.
///
/// dx is a convolution of dy with the flipped weight, one for each residue of the pixel modulo the stride; dweight is a sum over
/// fixed chunks of output pixels, added in order. On CUDA a bf16 convolution's dweight is rounded to bf16 once, unless its kernel is 1 x 1.
void conv2d_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Conv2dOptions& options,
                     Tensor* dx, Tensor* dweight, bool add_dx = false, bool relu_x = false);

namespace cpu {
extern decltype(kernels::conv2d_forward) conv2d_forward;
extern decltype(kernels::conv2d_backward) conv2d_backward;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::conv2d_forward) conv2d_forward;
extern decltype(kernels::conv2d_backward) conv2d_backward;
}  // namespace cuda
}  // namespace detr::kernels

#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// identity, ReLU, SiLU (x sigmoid(x)), GELU (exact, by erf), logistic sigmoid.
enum class Activation { none, relu, silu, gelu, sigmoid };

/// y = act(x), element by element. x any shape (Note [Element types]); y out, like x. ReLU has derivative 0 at 0. Sigmoid is exact
/// at +-infinity; NaN goes through all of them. Throws InvalidArgument if shapes, dtypes or devices disagree.
/// On CUDA exponentials and divisions of bf16 are the hardware's, whose error is far below that of the rounding. Fit for capture.
void activation_forward(const Stream& stream, const Tensor& x, Activation activation, Tensor& y);

/// dx = dy act'(x), overwritten. `x` and `y` are the forward's input and output; sigmoid and ReLU read y alone, SiLU and GELU
/// x alone, and the tensor that is not read may be undefined.
void activation_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& y, Activation activation, Tensor* dx);

namespace cpu {
extern decltype(kernels::activation_forward) activation_forward;
extern decltype(kernels::activation_backward) activation_backward;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::activation_forward) activation_forward;
extern decltype(kernels::activation_backward) activation_backward;
}  // namespace cuda
}  // namespace detr::kernels

#pragma once
#include "runtime/stream.h"

namespace detr::kernels::cuda {

/// The same rows with more or fewer channels: y[r, c] = x[r, c], or 0 for c beyond x's channels. x (..., C), y (..., D) of equal rows,
/// both bf16 or both f32.
void copy_channels(const Stream& stream, const Tensor& x, Tensor& y);

}  // namespace detr::kernels::cuda

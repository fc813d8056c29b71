#pragma once
#include "runtime/stream.h"

namespace detr::kernels::cuda {

/// The same rows with more or fewer channels: y[r, c] = x[r, c], or 0 for c beyond x's channels. x (..., C), y (..., D) of equal rows,
/// both bf16 or both f32.
void copy_channels(const Stream& stream, const Tensor& x, Tensor& y);

// Note [Channels in eights]
// cuDNN's bf16 engines want channels in multiples of 8, and some passes have no other. Where a layer has others (the pictures' 3),
// its tensors are copied with channels of zeros beside them, which add nothing to any sum, and results are cut.

inline std::int64_t in_eights(std::int64_t channels) { return (channels + 7) / 8 * 8; }

/// Whether a convolution of x with weight needs no copies.
inline bool channels_fit(const Tensor& x, const Tensor& weight) {
  return x.dtype() != DType::bf16 || (weight.dim(0) % 8 == 0 && weight.dim(3) % 8 == 0);
}

inline Shape with_channels(const Shape& shape, std::int64_t channels) { return {shape[0], shape[1], shape[2], channels}; }

/// x (N, H, W, C) with `channels` channels: itself if it has them, else a copy.
Tensor widened(const Stream& stream, const Tensor& x, std::int64_t channels);

/// A weight (O, kh, kw, I) with both numbers of channels in eights: itself or a copy.
Tensor widened_weight(const Stream& stream, const Tensor& weight);

}  // namespace detr::kernels::cuda

#pragma once
#include <array>
#include <vector>

#include "runtime/stream.h"

namespace detr::kernels {

/// bilinear: align_corners false, zeros outside. discrete: the single cell at trunc(loc * size + 0.5), both coordinates
/// clamped to [0, h - 1] (the reference's rule, right for square maps only). Where that leaves a map taller than wide, and the
/// reference fails, x is clamped to w - 1.
enum class Sampling { bilinear, discrete };

/// Geometry of multi-scale deformable attention.
struct DeformableOptions {
  std::int64_t heads = 8;
  std::vector<std::array<std::int64_t, 2>> levels;   ///< (h, w) of each level; the value's tokens lie level after level, row-major
  std::vector<std::int64_t> points;                  ///< sampling points of each level, P in all; levels consecutive
  double offset_scale = 0.5;
  Sampling sampling = Sampling::bilinear;
};

/// Multi-scale deformable attention as RT-DETRv2 has it, from raw offsets and raw weights:
///   loc[a, k]  = (cx, cy) + offset[a, k] * (w, h) * offset_scale / n(k)      n(k): points of slot k's level
///   out[a]     = sum over k of softmax(logits[a, :])[k] * sample(value[a] of level(k), loc[a, k])
/// Bilinear samples at u = loc_x w_l - 0.5, t = loc_y h_l - 0.5; each corner outside the map counts as zero.
///
/// value      (N, S, A d)     see Note [Element types]; S = sum of h w; head a owns channels [a d, (a + 1) d)
/// offsets    (N, Q, A P 2)   dtype of value; laid out [a][k][x, y], in units of the box
/// logits     (N, Q, A P)     dtype of value; laid out [a][k]; softmax over all P slots jointly
/// reference  (N, Q, 4)       wide; boxes (cx, cy, w, h) in fractions of the map; the same for each level
/// out        (N, Q, A d)     out, dtype of value
///
/// Weights, locations and sums are in the wide dtype, in a fixed order: same bits on every run. A location that is not finite samples
/// zero. CUDA takes at most 8 levels, 512 slots and maps of 32767 cells a side, is fast where d is 32 and tensors start at multiples
/// of 16 bytes, and takes a corner outside as 0 times the nearest cell, which differs from zero only where that is not finite.
/// Throws InvalidArgument if a shape, dtype or device disagrees. Fit for capture.
/// Zhu et al. 2020, "Deformable DETR", arXiv:2010.04159, eq. 3; Lv et al. 2024, "RT-DETRv2", arXiv:2407.17140.
void deformable_attention_forward(const Stream& stream, const Tensor& value, const Tensor& offsets, const Tensor& logits,
                                  const Tensor& reference, const DeformableOptions& options, Tensor& out);

/// Backward of the above, for any subset of wanted gradients; null is neither computed nor written, others, of the dtype of what they
/// are gradients of, are overwritten. Sums into dvalue in a fixed order and the wide dtype, and rounds once. With discrete sampling
/// doffsets is zero. On CUDA dvalue takes scratch of 16 bytes a sample (N Q A P of them), twice that beyond 4096 samples of a level.
void deformable_attention_backward(const Stream& stream, const Tensor& dout, const Tensor& value, const Tensor& offsets,
                                   const Tensor& logits, const Tensor& reference, const DeformableOptions& options, Tensor* dvalue,
                                   Tensor* doffsets, Tensor* dlogits);

namespace cpu {
extern decltype(kernels::deformable_attention_forward) deformable_attention_forward;
extern decltype(kernels::deformable_attention_backward) deformable_attention_backward;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::deformable_attention_forward) deformable_attention_forward;
extern decltype(kernels::deformable_attention_backward) deformable_attention_backward;
}  // namespace cuda
}  // namespace detr::kernels

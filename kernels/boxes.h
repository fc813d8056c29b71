#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// Clamp of the inverse sigmoid: logit_eps(x) = ln(max(c, eps) / max(1 - c, eps)), c = clip(x, 0, 1).
inline constexpr double kInverseSigmoidEps = 1e-5;

/// One step of iterative box refinement: box = sigmoid(delta + logit_eps(reference)).
/// delta, reference (..., 4) of one dtype (Note [Element types]; boxes of a bf16 model are wide, so f32 here); box (..., 4) out, like delta.
/// A NaN stays one. On CUDA the clamps compare in f32, with eps rounded to f32. Both are fit for capture.
void refine_boxes_forward(const Stream& stream, const Tensor& delta, const Tensor& reference, Tensor& box);

/// ddelta = dbox box (1 - box);  dreference = ddelta (1[x >= eps] / x + 1[1 - x >= eps] / (1 - x)) for x in [0, 1], else 0.
/// Null is not wanted; others are overwritten.
void refine_boxes_backward(const Stream& stream, const Tensor& dbox, const Tensor& box, const Tensor& reference, Tensor* ddelta,
                           Tensor* dreference);

namespace cpu {
extern decltype(kernels::refine_boxes_forward) refine_boxes_forward;
extern decltype(kernels::refine_boxes_backward) refine_boxes_backward;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::refine_boxes_forward) refine_boxes_forward;
extern decltype(kernels::refine_boxes_backward) refine_boxes_backward;
}  // namespace cuda
}  // namespace detr::kernels

#pragma once
#include <span>
#include <vector>

#include "runtime/stream.h"

namespace detr::kernels {

/// Weights of the three terms and the varifocal loss's constants.
struct DetectionLossOptions {
  double vfl_weight = 1, bbox_weight = 5, giou_weight = 2;
  double alpha = 0.75, gamma = 2;
};

/// One set of predictions inside the tensors of a layer: queries [begin, begin + Q) with their matching.
struct PredictionSet {
  std::int64_t begin = 0;
  Tensor match;        ///< (N, Q) i64: true box of each query, -1 for none
  Tensor groups;       ///< (Q) i64 or undefined: queries with kPaddingSlot have weight 0 in every term
  Tensor normalizer;   ///< (1) wide: number of boxes to divide by, > 0
};

/// True boxes of a batch. labels (N, Gcap) i64 in [0, C); boxes (N, Gcap, 4) (cx, cy, w, h), wide.
struct TrueBoxes {
  Tensor labels, boxes;
};

/// Varifocal, L1 and GIoU loss of several prediction sets of one layer. For matched pairs let iou = IoU(pred, true) (a
/// constant), e = 1 for the matched class and 0 else, s = iou e, w = alpha sigmoid(x)^gamma (1 - e) + s (a constant):
///   vfl  = vfl_weight  sum over q, c of w (softplus(x) - s x) / normalizer
///   bbox = bbox_weight sum over pairs of sum |b - t| / normalizer          (on cx, cy, w, h)
///   giou = giou_weight sum over pairs of (1 - GIoU(b, t)) / normalizer
///
/// logits (N, T, C); boxes (N, T, 4) wide: see Note [Element types]
/// terms  (sets, 3) out, wide: [vfl, bbox, giou] of each set
///
/// Nothing asserts: boxes without area have IoU 0, and a zero enclosing area gives GIoU = IoU. Boxes are compared in f64.
/// Sums in double in a fixed order; on CUDA those over the classes of one query in f32. Fit for capture. CUDA takes at most 8 sets,
/// and there a label or match out of range counts as no match.
/// Throws InvalidArgument if a shape, dtype or device disagrees or (on the CPU) a label or match is out of range or a normalizer
/// is not positive.
/// Zhang et al. 2020, "VarifocalNet", arXiv:2008.13367, eq. 2; Rezatofighi et al. 2019, "GIoU", arXiv:1902.09630.
void detection_loss_forward(const Stream& stream, const Tensor& logits, const Tensor& boxes, std::span<const PredictionSet> sets,
                            const TrueBoxes& truth, const DetectionLossOptions& options, Tensor& terms);

/// Backward of the above for dterms (sets, 3), wide: dlogits (N, T, C) dtype of logits, dboxes (N, T, 4) wide; null is neither
/// computed nor written, others are overwritten (zero for queries in no set, the sum for queries in several). Conventions: |x| has
/// derivative 0 at 0; max and min of equal values share the gradient half and half; the clamp of the intersection at 0 passes
/// gradient at 0.
void detection_loss_backward(const Stream& stream, const Tensor& dterms, const Tensor& logits, const Tensor& boxes,
                             std::span<const PredictionSet> sets, const TrueBoxes& truth, const DetectionLossOptions& options,
                             Tensor* dlogits, Tensor* dboxes);

namespace cpu {
extern decltype(kernels::detection_loss_forward) detection_loss_forward;
extern decltype(kernels::detection_loss_backward) detection_loss_backward;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::detection_loss_forward) detection_loss_forward;
extern decltype(kernels::detection_loss_backward) detection_loss_backward;
}  // namespace cuda
}  // namespace detr::kernels

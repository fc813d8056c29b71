#include "autograd/detection.h"

#include "kernels/boxes.h"

namespace detr {

Variable refine_boxes(Context& ctx, const Variable& delta, const Variable& reference) {
  Tensor box = ctx.empty_like(delta.value());
  kernels::refine_boxes_forward(ctx.stream(), delta.value(), reference.value(), box);
  return ctx.record("refine_boxes", {delta, reference}, box,
                    [box, reference = reference.value()](Context& c, const Tensor& dbox, Wanted want) {
                      kernels::refine_boxes_backward(c.stream(), dbox, box, reference, want[0], want[1]);
                    });
}

Variable detection_loss(Context& ctx, const Variable& logits, const Variable& boxes, const std::vector<kernels::PredictionSet>& sets,
                        const kernels::TrueBoxes& truth, const kernels::DetectionLossOptions& options) {
  Tensor terms = ctx.empty({std::ssize(sets), 3}, boxes.value().dtype());
  kernels::detection_loss_forward(ctx.stream(), logits.value(), boxes.value(), sets, truth, options, terms);
  return ctx.record("detection_loss", {logits, boxes}, terms,
                    [logits = logits.value(), boxes = boxes.value(), sets, truth, options](Context& c, const Tensor& dterms, Wanted want) {
                      kernels::detection_loss_backward(c.stream(), dterms, logits, boxes, sets, truth, options, want[0], want[1]);
                    });
}

}  // namespace detr

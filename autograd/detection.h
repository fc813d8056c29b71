#pragma once
#include <vector>

#include "autograd/context.h"
#include "kernels/detection_loss.h"

namespace detr {

/// box = sigmoid(delta + logit_eps(reference)). Shapes: kernels/boxes.h.
Variable refine_boxes(Context& ctx, const Variable& delta, const Variable& reference);

/// Terms (sets, 3) of the losses of one layer. Shapes: kernels/detection_loss.h.
Variable detection_loss(Context& ctx, const Variable& logits, const Variable& boxes, const std::vector<kernels::PredictionSet>& sets,
                        const kernels::TrueBoxes& truth, const kernels::DetectionLossOptions& options);

}  // namespace detr

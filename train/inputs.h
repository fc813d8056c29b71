#pragma once
#include "data/batch.h"
#include "models/detr/criterion.h"
#include "models/detr/decoder.h"
#include "runtime/stream.h"

namespace detr::train {

/// A batch on the model's device and in its dtype.
struct StepInputs {
  Tensor images;                       ///< (N, h, w, 3) in [0, 1]
  models::DenoisingInputs denoising;
  models::TargetInputs targets;
};

/// Copies what a training step reads: pictures resized to the step's size, truth, denoising queries, and the normalisers
/// max(boxes, 1) and max(boxes, 1) G. `boxes` is the number of true boxes of the whole (global) batch.
StepInputs to_device(const Stream& stream, const data::Batch& batch, std::int64_t boxes, DType dtype);

/// The pictures alone, for evaluation.
Tensor pictures_to_device(const Stream& stream, const data::Batch& batch, DType dtype);

/// Truth and denoising queries alone (checks bring their own pictures).
void targets_to_device(const Stream& stream, const data::Targets& targets, const data::Denoising& denoising, std::int64_t boxes, DType dtype,
                       StepInputs& inputs);

}  // namespace detr::train

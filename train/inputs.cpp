#include "train/inputs.h"

#include <algorithm>

#include "kernels/pointwise.h"

namespace detr::train {
namespace {

Tensor converted(const Stream& stream, const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  Tensor y = stream.empty(x.shape(), dtype);
  kernels::cast(stream, x, y);
  return y;
}

Tensor scalar(const Stream& stream, double value, DType dtype) {
  Tensor y = stream.empty({1}, dtype);
  kernels::fill(stream, value, y);
  return y;
}

}  // namespace

Tensor pictures_to_device(const Stream& stream, const data::Batch& batch, DType dtype) {
  Tensor images = stream.empty({batch.images.dim(0), batch.size_h, batch.size_w, batch.images.dim(3)}, dtype);
  kernels::images_to_float(stream, batch.images, images);
  return images;
}

void targets_to_device(const Stream& stream, const data::Targets& targets, const data::Denoising& denoising, std::int64_t boxes, DType dtype,
                       StepInputs& inputs) {
  const double normalizer = static_cast<double>(std::max<std::int64_t>(boxes, 1));
  inputs.targets.labels = targets.labels;
  inputs.targets.boxes = converted(stream, targets.boxes, dtype);
  inputs.targets.counts = targets.counts;
  inputs.targets.num_boxes = scalar(stream, normalizer, dtype);
  if (denoising.groups == 0) return;
  inputs.denoising = {denoising.classes, converted(stream, denoising.boxes, dtype), denoising.group};
  inputs.targets.dn_match = denoising.match;
  inputs.targets.dn_num_boxes = scalar(stream, normalizer * static_cast<double>(denoising.groups), dtype);
}

StepInputs to_device(const Stream& stream, const data::Batch& batch, std::int64_t boxes, DType dtype) {
  StepInputs inputs;
  inputs.images = pictures_to_device(stream, batch, dtype);
  targets_to_device(stream, batch.targets, batch.denoising, boxes, dtype, inputs);
  return inputs;
}

}  // namespace detr::train

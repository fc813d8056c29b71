#include "train/inputs.h"

#include <algorithm>
#include <cstring>

#include "kernels/pointwise.h"
#include "runtime/error.h"

namespace detr::train {
namespace {

double normalizer(std::int64_t boxes) { return static_cast<double>(std::max<std::int64_t>(boxes, 1)); }

Tensor converted(const Stream& stream, const Tensor& x, DType dtype) {
  const Tensor there = stream.to_device(x);
  if (x.dtype() == dtype) return there;
  Tensor y = stream.empty(x.shape(), dtype);
  kernels::cast(stream, there, y);
  return y;
}

Tensor scalar(const Stream& stream, double value, DType dtype) {
  Tensor y = stream.empty({1}, dtype);
  kernels::fill(stream, value, y);
  return y;
}

}  // namespace

StepKey key_of(const data::Batch& batch) {
  const auto dims = batch.images.shape().dims();
  return {std::vector<std::int64_t>(dims.begin(), dims.end()), batch.size_h, batch.size_w, batch.targets.labels.dim(1),
          batch.denoising.groups > 0 ? batch.denoising.classes.dim(1) : 0};
}

data::Batch part_of(const data::Batch& batch, std::int64_t index, std::int64_t parts) {
  const std::int64_t pictures = batch.images.dim(0), count = pictures / parts, begin = index * count;
  DETR_CHECK(count * parts == pictures, "step: ", pictures, " pictures do not make ", parts, " equal micro-batches");
  const auto rows = [&](const Tensor& x) { return x.defined() ? x.slice(begin, begin + count) : x; };
  const auto some = [&](const std::vector<std::int64_t>& x) { return x.empty() ? x : std::vector<std::int64_t>(x.begin() + begin, x.begin() + begin + count); };
  data::Batch part = batch;
  part.images = rows(batch.images);
  part.targets.labels = rows(batch.targets.labels);
  part.targets.boxes = rows(batch.targets.boxes);
  part.targets.counts = rows(batch.targets.counts);
  part.denoising.classes = rows(batch.denoising.classes);
  part.denoising.boxes = rows(batch.denoising.boxes);
  part.denoising.match = rows(batch.denoising.match);
  part.image_ids = some(batch.image_ids);
  part.orig_width = some(batch.orig_width);
  part.orig_height = some(batch.orig_height);
  return part;
}

StepInputs empty_inputs(const Stream& stream, const StepKey& key, DType dtype) {
  const std::int64_t n = key.pictures.at(0);
  StepInputs inputs;
  inputs.pictures = stream.empty(Shape(key.pictures), DType::u8);
  inputs.targets.labels = stream.empty({n, key.box_slots}, DType::i64);
  inputs.targets.boxes = stream.empty({n, key.box_slots, 4}, dtype);
  inputs.targets.counts = stream.empty({n}, DType::i64);
  inputs.targets.num_boxes = stream.empty({1}, dtype);
  if (key.denoising_slots == 0) return inputs;
  inputs.denoising.classes = stream.empty({n, key.denoising_slots}, DType::i64);
  inputs.denoising.boxes = stream.empty({n, key.denoising_slots, 4}, dtype);
  inputs.denoising.groups = stream.empty({key.denoising_slots}, DType::i64);
  inputs.targets.dn_match = stream.empty({n, key.denoising_slots}, DType::i64);
  inputs.targets.dn_num_boxes = stream.empty({1}, dtype);
  return inputs;
}

void Upload::enqueue(const Tensor& values, Tensor& to) {
  if (stream_.device().is_cpu()) return stream_.copy(values, to);
  if (next_ == copies_.size()) copies_.emplace_back();
  Copy& copy = copies_[next_++];
  if (!copy.staged.defined() || copy.staged.shape() != values.shape() || copy.staged.dtype() != values.dtype()) {
    copy.pinned = stream_.empty_host(values.shape(), values.dtype());
    copy.staged = stream_.empty_like(values);
    stream_.wait();   // what the memory was used for before is done, also for the other queue
  }
  if (values.bytes()) std::memcpy(copy.pinned.raw(), values.raw(), static_cast<std::size_t>(values.bytes()));
  beside_.copy(copy.pinned, copy.staged);
  copy.to = to;
}

void Upload::enqueue(const data::Batch& batch, std::int64_t boxes, StepInputs& inputs) {
  const auto one = [&](double value) {
    return inputs.targets.num_boxes.dtype() == DType::f64 ? host_tensor<double>({1}, {value}) : host_tensor<float>({1}, {static_cast<float>(value)});
  };
  enqueue(batch.images, inputs.pictures);
  enqueue(batch.targets.labels, inputs.targets.labels);
  enqueue(batch.targets.boxes, inputs.targets.boxes);
  enqueue(batch.targets.counts, inputs.targets.counts);
  enqueue(one(normalizer(boxes)), inputs.targets.num_boxes);
  if (inputs.denoising.classes.defined()) {
    enqueue(batch.denoising.classes, inputs.denoising.classes);
    enqueue(batch.denoising.boxes, inputs.denoising.boxes);
    enqueue(batch.denoising.group, inputs.denoising.groups);
    enqueue(batch.denoising.match, inputs.targets.dn_match);
    enqueue(one(normalizer(boxes) * static_cast<double>(batch.denoising.groups)), inputs.targets.dn_num_boxes);
  }
  if (stream_.device().is_cpu()) return;
  stream_.wait_for(beside_.record());
  for (; issued_ < next_; ++issued_) stream_.copy(copies_[issued_].staged, copies_[issued_].to);
  copied_ = stream_.record();
}

void Upload::wait() {
  copied_.wait();
  next_ = issued_ = 0;
}

Tensor resized_pictures(const Stream& stream, const Tensor& pictures, std::int64_t height, std::int64_t width, DType dtype) {
  Tensor images = stream.empty({pictures.dim(0), height, width, pictures.dim(3)}, dtype);
  kernels::images_to_float(stream, pictures, images);
  return images;
}

Tensor pictures_to_device(const Stream& stream, const data::Batch& batch, DType dtype) {
  return resized_pictures(stream, stream.to_device(batch.images), batch.size_h, batch.size_w, dtype);
}

void targets_to_device(const Stream& stream, const data::Targets& targets, const data::Denoising& denoising, std::int64_t boxes, DType dtype,
                       StepInputs& inputs) {
  inputs.targets.labels = stream.to_device(targets.labels);
  inputs.targets.boxes = converted(stream, targets.boxes, dtype);
  inputs.targets.counts = stream.to_device(targets.counts);
  inputs.targets.num_boxes = scalar(stream, normalizer(boxes), dtype);
  if (denoising.groups > 0) {
    inputs.denoising = {stream.to_device(denoising.classes), converted(stream, denoising.boxes, dtype), stream.to_device(denoising.group)};
    inputs.targets.dn_match = stream.to_device(denoising.match);
    inputs.targets.dn_num_boxes = scalar(stream, normalizer(boxes) * static_cast<double>(denoising.groups), dtype);
  }
  stream.wait();   // the host's tensors may go
}

}  // namespace detr::train

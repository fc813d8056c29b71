#pragma once
#include "data/batch.h"
#include "models/detr/criterion.h"
#include "models/detr/decoder.h"
#include "runtime/stream.h"

namespace detr::train {

/// What a training step reads, on the model's device.
struct StepInputs {
  Tensor pictures;                     ///< (N, H, W, 3) u8, before the resize to the step's size
  models::DenoisingInputs denoising;
  models::TargetInputs targets;
};

/// All that the shapes of a step's tensors follow from. Batches with equal keys run the same kernels on the same addresses.
struct StepKey {
  std::vector<std::int64_t> pictures;   ///< shape
  std::int64_t height = 0, width = 0;   ///< of the step
  std::int64_t box_slots = 0, denoising_slots = 0;   ///< Gcap, Qcap; 0 slots where nothing is denoised
  std::int64_t micro_batch = 0;         ///< which part of a step's batch
  auto operator<=>(const StepKey&) const = default;
};
StepKey key_of(const data::Batch& batch);

/// Part `index` of `parts` equal ones of a batch, without a copy. The number of pictures must be a multiple of `parts`.
data::Batch part_of(const data::Batch& batch, std::int64_t index, std::int64_t parts);

/// Inputs of undefined contents for batches with this key; boxes and normalisers of dtype f32, or f64 in checks.
StepInputs empty_inputs(const Stream& stream, const StepKey& key, DType dtype = DType::f32);

/// Brings batches to the device while the step before runs: by page-locked memory and a queue of its own into memory of the device
/// that is kept for this, and from there, in the stream's order, to the inputs. On the CPU the copies are made at once.
class Upload {
 public:
  explicit Upload(const Stream& stream) : stream_(stream.lasting()), beside_(stream.beside()) {}
  /// Pictures, truth, denoising queries, and the normalisers max(boxes, 1) and max(boxes, 1) G. `boxes` is the number of true boxes
  /// of the whole (global) batch.
  void enqueue(const data::Batch& batch, std::int64_t boxes, StepInputs& inputs);
  /// One more tensor, before those of the batch.
  void enqueue(const Tensor& values, Tensor& to);
  /// Before the next step: waits until the copies of the last one are made.
  void wait();

 private:
  struct Copy {
    Tensor pinned, staged, to;
  };
  Stream stream_, beside_;
  std::vector<Copy> copies_;   // the first next_ of them are this step's
  std::size_t next_ = 0, issued_ = 0;
  Event copied_;
};

/// Pictures in the compute dtype: (N, H, W, 3) u8 -> (N, h, w, 3) in [0, 1].
Tensor resized_pictures(const Stream& stream, const Tensor& pictures, std::int64_t height, std::int64_t width, DType dtype);

/// The pictures of a batch alone, for evaluation.
Tensor pictures_to_device(const Stream& stream, const data::Batch& batch, DType dtype);

/// Truth and denoising queries alone (checks bring their own pictures), in f32 or f64.
void targets_to_device(const Stream& stream, const data::Targets& targets, const data::Denoising& denoising, std::int64_t boxes, DType dtype,
                       StepInputs& inputs);

}  // namespace detr::train

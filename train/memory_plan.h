#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/loader.h"
#include "models/detr/rtdetr.h"
#include "train/inputs.h"
#include "train/optimizer.h"
#include "train/step.h"

namespace detr::train {

/// All that a run's memory on its device follows from.
struct MemoryRequest {
  /// A new model at each call, frozen as in the run: a plan leaves addresses without memory in it.
  std::function<std::unique_ptr<models::RtDetr>()> make_model;
  OptimizerConfig optimizer;
  DType compute = DType::f32;
  StepOptions step;                       ///< with graphs a second step of a key is captured beside what the first has left in the cache
  Device device = Device::cuda(0);        ///< need not be there
  std::vector<StepKey> keys;              ///< of all batches that the run can meet, of one number of pictures; at least one
  std::vector<std::int64_t> evaluation;   ///< shape of an evaluation's pictures, (N, H, W, 3); empty: nothing is evaluated
};

/// Keys of all micro-batches that a rank's training loader with these options can make of images with at most `most_boxes` boxes, where
/// a step has `micro_batches`.
std::vector<StepKey> keys_of(const data::LoaderOptions& options, std::int64_t most_boxes, std::int64_t micro_batches = 1);

/// The order of a step's collectives: that of a step of the last key, which reaches what any step reaches.
CollectivePlan plan_collectives(const MemoryRequest& request);

/// What a run needs on its device, in bytes.
struct MemoryPlan {
  std::int64_t state = 0;         ///< weights, gradients, moments, moving average, shadow, and the optimiser's tables
  std::int64_t inputs = 0;        ///< pictures, targets and reports, the model's tables, and room for batches on their way (these at most)
  std::int64_t activations = 0;   ///< what steps and evaluations make and drop, at its most
  std::int64_t unused = 0;        ///< parts of the segments that the device's memory is taken in
  std::int64_t allowance = 0;     ///< see kScratchBytes
  std::int64_t reserve = 0;       ///< what the run gives to Step::reserve(): the activations and their share of the allowance
  StepKey largest;                ///< the key that needs the most
  std::int64_t total() const { return state + inputs + activations + unused + allowance; }
};

/// The plan does not see inside kernels, nor what libraries take for themselves. It allows for that
/// - for a step's queue and for its side branch, the scratch of a convolution, which has at most 1 GiB (kConvWorkspaceLimit of
///   kernels/cuda/conv2d_plans.h), and the 32 MiB that matrix products keep;
/// - a share of the activations: scratch that grows with them (records of deformable attention's samples, the map of max pooling's
///   places, pictures widened to 8 channels, partial sums), gaps between blocks, and captured graphs.
/// Both together also hold what CUDA loads when code is first used.
inline constexpr std::int64_t kScratchBytes = 2 * ((std::int64_t{1} << 30) + (std::int64_t{32} << 20));
inline constexpr double kScratchShare = 0.05;

/// Walks through the steps of a run on a planning stream: the bytes are those that the run's own allocators will take, where it
/// calls Step::reserve(). No memory of the device is touched. Throws what a step would throw for unfit shapes.
MemoryPlan plan_memory(const MemoryRequest& request);

/// The most pictures of a micro-batch whose plan fits into free_bytes, at most those of the request's keys; 0 if not even one does.
std::int64_t largest_batch(const MemoryRequest& request, std::int64_t free_bytes);

/// Throws OutOfMemory if the request's plan is larger than free_bytes; names both, the largest step and a batch size that fits.
void expect_fit(const MemoryRequest& request, const MemoryPlan& plan, std::int64_t free_bytes);

/// The plan in one line.
std::string describe(const MemoryPlan& plan, std::int64_t free_bytes);

}  // namespace detr::train

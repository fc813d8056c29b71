#pragma once
#include <cstdint>
#include <vector>

#include "runtime/tensor.h"

namespace detr::data {

/// Ground truth of a batch, padded to Gcap boxes an image. Boxes are (cx, cy, w, h) in fractions of the picture.
struct Targets {
  Tensor labels;   ///< (N, Gcap) i64; padding is 0
  Tensor boxes;    ///< (N, Gcap, 4) f32 (f64 in the checks); padding is 0
  Tensor counts;   ///< (N) i64, real boxes of each image, <= Gcap
  std::int64_t total = 0;    ///< sum of counts
  std::int64_t largest = 0;  ///< M, largest of counts
};

/// Denoising queries of a batch, padded to Qcap slots. A slot beyond the real ones (group -2) takes part in nothing.
struct Denoising {
  std::int64_t groups = 0;   ///< G of the reference; 0: no denoising, and every tensor has Qcap = 0
  Tensor classes;  ///< (N, Qcap) i64, row of the class embedding; the number of classes is the padding row
  Tensor boxes;    ///< (N, Qcap, 4) like Targets::boxes; noised boxes (cx, cy, w, h), already within [1e-5, 1 - 1e-5]
  Tensor group;    ///< (Qcap) i64, group g >= 0 of each slot, -2 for padding
  Tensor match;    ///< (N, Qcap) i64, index of the true box that a positive slot must find, -1 for all others
};

/// What ranks tell each other about a step: sums over the ranks, and the most boxes in one image.
struct StepCounts {
  std::int64_t images = 0, boxes = 0, largest = 0;
  std::int64_t stops = 0;   ///< ranks that wish to stop before this step
  std::int64_t bad = 0;     ///< pictures that could not be read so far, each counted once
};

/// What one training or evaluation step reads.
struct Batch {
  Tensor images;   ///< (N, H, W, 3) u8, the pictures before the multi-scale resize
  std::int64_t size_h = 0, size_w = 0;   ///< what the step trains at: images are resized to it (nearest), then / 255
  Targets targets;
  Denoising denoising;
  StepCounts agreed;       ///< of all ranks' batches of this step
  std::vector<std::int64_t> image_ids;                 ///< (N)
  std::vector<std::int64_t> orig_width, orig_height;   ///< (N) pixels of the shown pictures
};

}  // namespace detr::data

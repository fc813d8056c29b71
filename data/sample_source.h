#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "data/augment.h"
#include "data/coco.h"
#include "data/denoising.h"
#include "data/image.h"
#include "runtime/random.h"

namespace detr::data {

/// A sample ready for a batch.
struct LoadedSample {
  Image picture;                  ///< after the transforms
  ImageTargets targets;
  std::int64_t image_id = 0;
  std::int64_t orig_width = 0, orig_height = 0;   ///< pixels of the shown picture before the transforms
  std::string draws;              ///< filled only where asked for
};

/// Reads and transforms one image at a time. Thread-safe; what load() returns is a pure function of its arguments and the file.
class SampleSource {
 public:
  struct Options {
    std::vector<TransformOp> transforms;
    TransformPolicy policy;
    Exif exif = Exif::automatic;
    DecodeLimits limits;
    std::size_t cache_bytes = 0;
    bool log_draws = false;
  };

  SampleSource(std::shared_ptr<const CocoData> coco, std::filesystem::path folder, Options options);

  /// `image`: index into coco->images. Boxes are clipped to the decoded picture; what has no area is left out, before and after
  /// the transforms. Throws DataError where the picture cannot be read.
  LoadedSample load(std::int64_t image, std::int64_t epoch, RandomKey key);

  double decode_s() const { return static_cast<double>(decode_ns_) * 1e-9; }
  double transform_s() const { return static_cast<double>(transform_ns_) * 1e-9; }

 private:
  std::shared_ptr<const Image> picture(std::int64_t image);

  std::shared_ptr<const CocoData> coco_;
  std::filesystem::path folder_;
  Options options_;
  std::mutex mutex_;
  std::unordered_map<std::int64_t, std::shared_ptr<const Image>> cache_;
  std::size_t cached_bytes_ = 0;
  std::atomic<std::int64_t> decode_ns_ = 0, transform_ns_ = 0;
};

}  // namespace detr::data

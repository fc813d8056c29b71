#pragma once
#include <filesystem>

#include "data/coco.h"
#include "data/image.h"
#include "runtime/thread_pool.h"

namespace detr::data {

/// What the start of a run does with images whose file is missing, empty, no image or outside the folder.
enum class Unusable {
  refuse,   ///< DataError: --bad-images auto and stop
  drop,     ///< leave them out, with a finding: --bad-images skip
  keep      ///< leave them in, with a finding; the evaluation counts such an image as one without detections
};

struct PrepareOptions {
  Exif exif = Exif::automatic;
  DecodeLimits limits;
  Unusable unusable = Unusable::refuse;
};

/// The check at the start of a run: reads the header of every picture, gives every image the size that it is shown with (the
/// picture's size wins over the json's) and clips the boxes again. Findings are those of `report_pictures`, boxes that do not
/// fit the real size, corner-boxes, and images-left-out or images-unreadable (warnings) where `unusable` allows these.
/// Throws DataError where pictures cannot be used (first ten, count, what to do) unless `unusable` says otherwise, where the
/// json has another scale than the pictures, and where no image is left. On an exception `data` is unchanged.
void prepare_for_training(CocoData& data, const std::filesystem::path& folder, const PrepareOptions& options, ThreadPool& pool,
                          Findings& findings);

}  // namespace detr::data

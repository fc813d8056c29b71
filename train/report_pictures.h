#pragma once
#include <filesystem>
#include <span>
#include <vector>

#include "data/coco.h"
#include "data/coco_eval.h"
#include "data/image.h"
#include "train/html_report.h"

namespace detr::train {

struct PictureChoice {
  double score = 0.3;             ///< lowest score of a prediction that is drawn
  std::size_t count = kMaxReportPictures;
  data::Exif exif = data::Exif::automatic;
  data::DecodeLimits limits;
};

/// Pictures of a split with truth and predictions drawn, their longer side at most 480 px (small ones are enlarged) and no JPEG over
/// kMaxPictureBytes (quality and, at last, size give way). Taken evenly from the images with boxes, in order of id, then from those
/// without, so the same ones after every epoch. A picture that cannot be read is passed over for the next. Of the predictions the best
/// are drawn, at most twice as many as there are true boxes and five, or 100; detections of unknown images or categories are not.
std::vector<ReportPicture> draw_report_pictures(const data::CocoData& coco, const std::filesystem::path& folder, std::span<const data::Detection> detections,
                                                const PictureChoice& choice);

}  // namespace detr::train

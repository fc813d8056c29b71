#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "data/coco_eval.h"

/// Inside of `evaluate`: matching and accumulation for one category, and the confusion matrix.
namespace detr::data::detail {

constexpr int kAreas = 4;        ///< all, small, medium, large
constexpr int kIouSteps = 10;    ///< IoU 0.5, 0.55, ..., 0.95

/// What became of one detection. Bit t of a mask is IoU step t; masks are per area range.
struct Scored {
  double score = 0;
  std::int64_t detection = 0;    ///< index into the detections
  std::int64_t image = 0;        ///< index into CocoData::images
  std::int64_t truth = -1;       ///< annotation index taken at IoU 0.5 in area range "all", or -1
  std::int32_t rank = 0;         ///< place among the detections of its image and category, by falling score
  std::array<std::uint16_t, kAreas> matched{}, ignored{};
};

/// One category. Numbers are -1 where no true box counts.
struct CategoryScore {
  std::vector<Scored> scored;    ///< by falling score; equal scores by image, then rank
  std::array<std::int64_t, kAreas> boxes{};     ///< true boxes that count
  std::int64_t densest = 0;      ///< most of boxes[0] in one image
  std::array<double, kAreas> ap{}, ar{};
  double ap50 = -1, ap75 = -1, ar1 = -1, ar10 = -1;
  std::array<double, kRecallPoints> precision50{}, score50{};
};

/// Whether an annotation is ignored in an area range.
bool is_ignored(const Annotation& annotation, int area);

/// Intersection over union of two boxes (x, y, w, h); over the area of `detection` where the true box is a crowd.
/// The expressions of bbIou in the COCO API's maskApi.c, term by term.
double box_iou(const std::array<double, 4>& detection, const std::array<double, 4>& truth, bool crowd);

/// `boxes` and `dets` index annotations and detections of the category, both by image; dets by falling score within one.
/// `images` is the image index of every detection.
CategoryScore score_category(std::span<const Annotation> annotations, std::span<const std::int64_t> boxes,
                             std::span<const Detection> detections, std::span<const std::int64_t> images,
                             std::span<const std::int64_t> dets, int max_detections);

/// EvalResult::confusion. With one category for all (`use_categories` off) the matrix is 2 x 2.
std::vector<std::int64_t> confusion_matrix(std::span<const Annotation> annotations, std::int64_t image_count,
                                           std::span<const Detection> detections,
                                           const std::vector<CategoryScore>& categories, double lowest_score);

}  // namespace detr::data::detail

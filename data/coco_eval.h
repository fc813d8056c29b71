#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/coco.h"

namespace detr::data {

/// One box that a model found, with the ids of the annotation file. `box_xywh` is in pixels of the shown picture: left, top,
/// width, height.
struct Detection {
  std::int64_t image_id = 0, category_id = 0;
  std::array<double, 4> box_xywh{};
  double score = 0;
};

constexpr int kRecallPoints = 101;   ///< recall 0, 0.01, ..., 1

struct EvalOptions {
  int max_detections = 100;      ///< best detections that count, per image and category; other than 100 is non-standard
  int threads = 1;               ///< never changes a bit of the result
  bool use_categories = true;    ///< false: all categories are one (the COCO API's useCats = 0)
  std::optional<double> confusion_score;   ///< lowest score in the confusion matrix; unset: the score of the best F1
};

/// The result of one category. Numbers are -1 where there is no true box.
struct ClassResult {
  std::int64_t id = 0;           ///< category id of the file; -1 without categories
  std::string name;
  std::int64_t boxes = 0;        ///< true boxes, crowds left out
  double AP = -1, AP50 = -1, AP75 = -1, AR = -1;
  std::array<double, kRecallPoints> precision50{};   ///< interpolated precision at each recall, IoU 0.5; 0 where not reached
  std::array<double, kRecallPoints> score50{};       ///< score at which that recall is reached; 0 where not reached
};

/// Precision, recall and F1 at IoU 0.5 over all categories together, at the score with the best F1 (the highest such score).
/// -1 where there is no true box, 0 where no detection is right.
struct BestF1 {
  double conf = -1, p = -1, r = -1, f1 = -1;
};

/// The numbers of the COCO API for boxes. -1 means that there is no true box of that kind.
struct EvalResult {
  double AP = -1, AP50 = -1, AP75 = -1, AP_small = -1, AP_medium = -1, AP_large = -1;
  double AR1 = -1, AR10 = -1, AR100 = -1;    ///< AR100 is at max_detections
  double AR_small = -1, AR_medium = -1, AR_large = -1;

  std::vector<ClassResult> per_class;        ///< one per category, in ascending id
  /// ((classes + 1) squared, row-major) counts at IoU 0.5: row true, column predicted; the last row is background (false
  /// alarms), the last column missed boxes. The diagonal holds the matches of the metric; what these leave over is matched
  /// across categories, best score first. Crowds, and detections that fall into one, are left out.
  std::vector<std::int64_t> confusion;
  double confusion_score = 0;                ///< lowest score in `confusion`
  BestF1 best_f1;
  std::int64_t images = 0, dets = 0;         ///< images of the annotation file; detections given
  std::int64_t densest = 0;                  ///< most true boxes of one category in one image, crowds left out
  int max_detections = 100;

  /// The twelve numbers with their names, in the order of the COCO API.
  std::array<std::pair<std::string_view, double>, 12> stats() const;
};

/// Scores detections as the COCO API does (cocodataset/cocoapi, PythonAPI/pycocotools/cocoeval.py), to rounding:
/// IoU 0.5, 0.55, ..., 0.95; 101 recalls; detections by falling score, equal scores in input order, the best
/// `max_detections` of each image and category; each takes the free true box of largest IoU (the later of equal ones), true
/// boxes that count before those that are ignored. Ignored are crowds, whose IoU is intersection over detection and which
/// any number of detections may take, and boxes whose `area` is outside the area range; detections that took an ignored box,
/// or took none and have width x height outside the range, are neither right nor wrong. As in the API, an annotation whose
/// id is 0 is never found. Unlike there, annotations that share an id all count.
///
/// `truth` is read as written (box_xywh, area, crowd; trainable or not), its images in ascending id. The same bits for any
/// number of threads. Throws DataError for image or category ids that are not in `truth` and for boxes or scores that are
/// not finite; InvalidArgument for options below 1 and a truth that is out of order or not finite.
EvalResult evaluate(const CocoData& truth, std::span<const Detection> detections, const EvalOptions& options = {});

/// The twelve lines that the COCO API prints, without line ends.
std::vector<std::string> summary_lines(const EvalResult& result);

}  // namespace detr::data

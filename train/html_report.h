#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/coco.h"
#include "data/coco_eval.h"
#include "train/metric_table.h"

namespace detr::train {

constexpr std::size_t kMaxReportBytes = 5'000'000;
constexpr std::size_t kMaxReportPictures = 16;
constexpr std::size_t kMaxPictureBytes = 90'000;   ///< of one JPEG, so that two for each of 16 samples fit

/// A validation picture twice: with its true boxes and with the predicted ones.
struct ReportPicture {
  std::string name;                                 ///< of the file
  std::int64_t width = 0, height = 0;               ///< of the JPEGs, pixels
  std::size_t truths = 0, predictions = 0;          ///< boxes drawn
  std::vector<std::uint8_t> truth_jpeg, prediction_jpeg;
};

struct ReportSplit {
  std::string name;                                 ///< "train", "val"
  const data::CocoData* coco = nullptr;
};

/// All that a report is made from.
struct ReportData {
  std::string name;                                 ///< of the run
  std::vector<std::pair<std::string, std::string>> facts;   ///< about the run, for the summary
  MetricTable steps, epochs, log;                   ///< of steps.csv, metrics.csv, log.txt
  bool has_ema = true;                              ///< `evaluation` and the AP columns are of the moving average
  std::optional<data::EvalResult> evaluation, raw_evaluation;
  double best_ap = -2;                              ///< -2: none yet
  std::int64_t best_epoch = -1;
  std::vector<ReportSplit> splits;
  std::vector<ReportPicture> pictures;              ///< at most kMaxReportPictures are shown
  double picture_score = 0;                         ///< lowest score of the predictions drawn
  std::vector<std::string> warnings;
  std::string config_json;
};

/// The report of a run as one HTML page that opens offline: inline CSS and SVG, no script, nothing loaded from elsewhere, light and
/// dark, under kMaxReportBytes (pictures are left out from the end where they would not fit). All text is escaped. A part without
/// data says so. The same bytes for the same data.
std::string html_report(const ReportData& data);

}  // namespace detr::train

#pragma once
#include <filesystem>
#include <fstream>

#include "train/records.h"

namespace detr::train {

/// The metric files of an output folder, appended to: log.txt (one JSON line an epoch with the reference's keys train_lr, train_loss,
/// train_loss_*, test_coco_eval_bbox[12], epoch, n_parameters, then ours), metrics.csv (one row an epoch) and steps.csv (rows of steps).
/// After a resume rows of steps that are done again are dropped first.
class MetricLog {
 public:
  explicit MetricLog(const std::filesystem::path& folder);

  /// Writes a row of this step to steps.csv if `row`, and always for the first step.
  void step(const StepRecord& record, bool row);
  void epoch(const EpochRecord& record);

 private:
  std::filesystem::path folder_;
  std::ofstream steps_;
  bool first_step_ = true;
};

}  // namespace detr::train

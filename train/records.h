#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/coco_eval.h"

namespace detr::train {

using NamedValues = std::vector<std::pair<std::string, double>>;
/// The value of that name, 0 if there is none.
inline double term(const NamedValues& terms, const std::string& name) {
  const auto found = std::ranges::find(terms, name, &NamedValues::value_type::first);
  return found == terms.end() ? 0 : found->second;
}

/// What is told about one step.
struct StepRecord {
  std::int64_t step = 0;                ///< global, from 1
  std::int64_t epoch = 0, epoch_step = 0, steps_per_epoch = 0;   ///< epoch from 0; epoch_step from 1
  std::int64_t epochs = 0;
  double loss = 0;
  NamedValues terms;                    ///< all terms by the reference's names
  std::vector<double> group_lr;         ///< learning rate of each parameter group
  double grad_norm = 0;
  double images_per_s = 0;              ///< over the last steps
  double seconds = 0;                   ///< of this step, waiting for data included
  double data_wait_s = 0;
  double eta_s = 0;                     ///< to the end of the run
  std::int64_t skipped = 0;             ///< steps without an update so far
  bool applied = true;
  std::int64_t memory_bytes = 0, rss_bytes = 0;
};

/// What is told about one epoch.
struct EpochRecord {
  std::int64_t epoch = 0, step = 0;     ///< from 0; steps done
  double loss = 0;                      ///< mean over the epoch's steps
  NamedValues terms;                    ///< means
  std::vector<double> group_lr;         ///< at the end of the epoch
  double train_s = 0, eval_s = 0;
  double images_per_s = 0;
  double data_wait_share = 0;           ///< of train_s
  std::int64_t skipped = 0, parameters = 0;
  std::optional<data::EvalResult> evaluation;      ///< of the moving average (of the raw weights where there is none)
  std::optional<data::EvalResult> raw_evaluation;  ///< of the raw weights, at the end of a run with a moving average
  double best_ap = -2;
  std::int64_t best_epoch = -1;
};

/// Where a run reports to. Called from the training thread only.
class Reporter {
 public:
  virtual ~Reporter() = default;
  virtual void note(const std::string& line) = 0;
  virtual void warning(const std::string& line) = 0;
  virtual void step(const StepRecord& record) = 0;
  /// Progress of an evaluation: `done` of `total` images.
  virtual void evaluating(std::int64_t done, std::int64_t total) = 0;
  virtual void epoch(const EpochRecord& record) = 0;
  virtual void saved(const std::string& file, std::int64_t step) = 0;
};

}  // namespace detr::train

#pragma once
#include <string>
#include <vector>

#include "data/batch.h"
#include "models/detr/criterion.h"
#include "models/detr/rtdetr.h"
#include "train/optimizer.h"
#include "train/records.h"
#include "train/store.h"

namespace detr::train {

struct StepResult {
  double loss = 0;
  NamedValues terms;
  double grad_norm = 0;
  bool applied = true;
  std::string fault;   ///< where the first value that is not finite is, if the step was skipped
};

/// A whole training step: forward, matching, losses, backward, clipping, AdamW, moving average.
class Step {
 public:
  Step(models::RtDetr& model, ParameterStore& store, Optimizer& optimizer, const Stream& stream);

  /// A step whose loss or gradient is not finite changes nothing: no weights, moments, statistics or moving average.
  StepResult run(const data::Batch& batch, double lr_factor);

  /// After run(): parameters that the loss did not reach.
  const std::vector<std::string>& missing() const { return missing_; }

 private:
  std::string diagnose(const models::DecoderOutput& output, const models::CriterionOutput& loss) const;

  models::RtDetr& model_;
  ParameterStore& store_;
  Optimizer& optimizer_;
  models::Criterion criterion_;
  Stream stream_;
  Tape tape_;
  Tensor kept_buffers_;
  std::vector<std::string> missing_;
};

}  // namespace detr::train

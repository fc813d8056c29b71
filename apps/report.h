#pragma once
#include <filesystem>
#include <string>

#include "train/config.h"
#include "train/trainer.h"

namespace detr::apps {

/// Writes report.html and the eval/ folder of a run after each evaluation.
class RunReport {
 public:
  RunReport(std::filesystem::path folder, const train::Config& config, train::Trainer& trainer) : folder_(std::move(folder)), config_(config), trainer_(trainer) {}
  /// Does nothing for an epoch that was not evaluated.
  void write(const train::EpochRecord& record);

 private:
  std::filesystem::path folder_;
  const train::Config& config_;
  train::Trainer& trainer_;
};

}  // namespace detr::apps

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
  /// Does nothing for an epoch that was not evaluated. Never throws: a report is not worth a run; see last_error().
  void write(const train::EpochRecord& record);
  /// Why the last write() left something unwritten, in one line; empty where all is written.
  const std::string& last_error() const { return last_error_; }

 private:
  void write_report(const train::EpochRecord& record) const;

  std::filesystem::path folder_;
  const train::Config& config_;
  train::Trainer& trainer_;
  std::string last_error_;
};

}  // namespace detr::apps

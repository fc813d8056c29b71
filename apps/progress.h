#pragma once
#include <cstdio>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>

#include "apps/cli.h"
#include "train/metric_log.h"
#include "train/records.h"

namespace detr::apps {

/// Tells a run's progress: on stderr as a bar, lines or the reference's lines, in train.log as lines, in the metric files as
/// numbers. Every epoch is told; a step at each print_every and at least once a minute.
class Progress final : public train::Reporter {
 public:
  Progress(const std::filesystem::path& folder, const CommonOptions& common, std::int64_t print_every);

  /// For train.log alone: what stderr has seen before the folder was known.
  void log_only(const std::string& line);
  void note(const std::string& line) override;
  void warning(const std::string& line) override;
  void step(const train::StepRecord& record) override;
  void evaluating(std::int64_t done, std::int64_t total) override;
  void epoch(const train::EpochRecord& record) override;
  void saved(const std::string& file, std::int64_t step) override;
  /// Ends the bar's line.
  void finish();

  /// Called after the metric files have taken an epoch in.
  std::function<void(const train::EpochRecord&)> after_epoch;

 private:
  enum class Style { bar, lines, classic, quiet };
  /// A value of the reference's line: median of the last 20 steps, mean of the epoch.
  struct Smoothed {
    std::deque<double> last;
    double sum = 0;
    std::int64_t count = 0;
    void add(double value);
    std::string text() const;
  };
  std::string classic_text(const train::StepRecord& record) const;
  void line(const std::string& text);
  void draw(const std::string& text);

  Style style_;
  std::int64_t print_every_;
  std::ofstream log_;
  train::MetricLog metrics_;
  std::map<std::string, Smoothed> smoothed_;   ///< of the epoch in hand, for the classic style
  double last_draw_s_ = 0, last_line_s_ = 0;
  bool bar_shown_ = false;
};

}  // namespace detr::apps

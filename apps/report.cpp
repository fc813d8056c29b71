#include "apps/report.h"

#include <algorithm>
#include <fstream>

#include "apps/cli.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "train/evaluation_files.h"
#include "train/html_report.h"
#include "train/html_text.h"
#include "train/report_pictures.h"

namespace detr::apps {
namespace {

namespace fs = std::filesystem;

/// The warnings of train.log, with their times; those from before a resume are among them.
std::vector<std::string> warnings_of(const fs::path& log) {
  constexpr std::string_view kWord = " warning: ";
  std::vector<std::string> warnings;
  std::ifstream in(log);
  std::string line;
  while (std::getline(in, line)) {
    const std::size_t at = line.find(' ');   // behind the time
    if (at == std::string::npos || line.compare(at, kWord.size(), kWord) != 0) continue;
    warnings.push_back(line.substr(0, at) + "  " + line.substr(at + kWord.size()));
  }
  return warnings;
}

}  // namespace

void RunReport::write(const train::EpochRecord& record) {
  last_error_.clear();
  if (!record.evaluation) return;
  const auto attempt = [&](const char* what, const auto& part) {
    try {
      part();
    } catch (const std::exception& error) {   // of any kind: the run's weights are worth more than its report
      last_error_ += concat(last_error_.empty() ? "" : "; ", what, " of epoch ", record.epoch, " is not written: ", error.what());
    }
  };
  attempt("eval/", [&] {
    const bool ema = config_.resolve().optimizer.use_ema;
    train::write_evaluation_files(folder_ / "eval", {record.epoch, record.step, ema ? "ema" : "model"}, *record.evaluation, trainer_.detections());
  });
  attempt("report.html", [&] { write_report(record); });
}

void RunReport::write_report(const train::EpochRecord& record) const {
  const train::RunConfig run = config_.resolve();
  const train::SplitData &training = trainer_.training(), &validation = trainer_.validation();
  train::ReportData report;
  const std::string folder = fs::absolute(folder_).lexically_normal().filename().string();
  report.name = folder.empty() ? config_.name() : folder;
  report.steps = train::read_metric_csv(folder_ / "steps.csv");
  report.epochs = train::read_metric_csv(folder_ / "metrics.csv");
  report.log = train::read_metric_json_lines(folder_ / "log.txt");
  report.has_ema = run.optimizer.use_ema;
  report.evaluation = record.evaluation;
  report.raw_evaluation = record.raw_evaluation;
  report.best_ap = record.best_ap;
  report.best_epoch = record.best_epoch;
  report.splits = {{"train", training.coco.get()}, {"val", validation.coco.get()}};
  if (training.coco == validation.coco) report.splits.pop_back();   // --overfit evaluates on what it trains on
  report.warnings = warnings_of(folder_ / "train.log");
  report.config_json = config_.to_json();
  report.facts = {{"program", version_text()},
                  {"configuration", config_.name()},
                  {"training data", training.coco->file.string()},
                  {"validation data", validation.coco->file.string()},
                  {"classes", std::to_string(training.coco->categories.size())},
                  {"parameters", train::count_text(record.parameters)},
                  {"epochs", concat(record.epoch + 1, " of ", run.epochs, ", ", trainer_.steps_per_epoch(), " steps each")},
                  {"steps done", train::count_text(record.step)},
                  {"batch", concat(run.train.batch_size, " images")},
                  {"learning rate", train::short_text(run.optimizer.lr, 3)},
                  {"seed", std::to_string(run.seed)}};

  // The score that balances precision and recall, but neither so low that a picture is all boxes nor so high that it is bare.
  train::PictureChoice choice;
  choice.score = std::clamp(record.evaluation->best_f1.conf, 0.05, 0.6);
  choice.exif = run.exif;
  choice.limits = run.limits;
  report.picture_score = choice.score;
  report.pictures = train::draw_report_pictures(*validation.coco, validation.images, trainer_.detections(), choice);
  replace_file(folder_ / "report.html", train::html_report(report));
}

}  // namespace detr::apps

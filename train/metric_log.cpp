#include "train/metric_log.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "runtime/error.h"
#include "runtime/files.h"

namespace detr::train {
namespace {

using nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr const char* kStepHeader = "step,epoch,loss,vfl,bbox,giou,lr,grad_norm,img_per_s,data_wait_s,skipped,rss_bytes";
constexpr const char* kEpochHeader = "epoch,step,loss,AP,AP50,AP75,AP_small,AP_medium,AP_large,raw_AP,train_s,eval_s,img_per_s,data_wait_share,skipped";

ordered_json finite(double value) { return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr); }

std::string text_of(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}

/// Keeps the lines of a file for which `keep` holds; nothing happens if all do or there is no file.
template <class Keep>
void filter_lines(const fs::path& file, Keep&& keep) {
  if (!fs::exists(file)) return;
  std::istringstream in(text_of(file));
  std::string kept, line;
  bool dropped = false;
  while (std::getline(in, line)) {
    if (keep(line)) kept += line + '\n';
    else dropped = true;
  }
  if (dropped) replace_file(file, kept);
}

/// First number of a CSV row; -1 for the header.
std::int64_t first_number(const std::string& line) {
  try {
    return std::stoll(line);
  } catch (const std::exception&) {
    return -1;
  }
}

std::ofstream open_append(const fs::path& file, const std::string& header) {
  const bool fresh = !fs::exists(file) || fs::file_size(file) == 0;
  std::ofstream out(file, std::ios::app);
  if (!out) throw StorageError(file.string(), ": cannot be written");
  if (fresh && !header.empty()) out << header << '\n';
  return out;
}

}  // namespace

MetricLog::MetricLog(const fs::path& folder) : folder_(folder) {}

void MetricLog::step(const StepRecord& r, bool row) {
  if (first_step_) {
    // A resumed run does some steps again; their old rows go.
    filter_lines(folder_ / "steps.csv", [&](const std::string& line) { return first_number(line) < r.step; });
    filter_lines(folder_ / "metrics.csv", [&](const std::string& line) { return first_number(line) < r.epoch; });
    filter_lines(folder_ / "log.txt", [&](const std::string& line) {
      const ordered_json object = ordered_json::parse(line, nullptr, false);
      return object.is_object() && object.value("epoch", std::int64_t{0}) < r.epoch;
    });
    steps_ = open_append(folder_ / "steps.csv", kStepHeader);
    first_step_ = false;
    row = true;
  }
  if (!row) return;
  steps_ << r.step << ',' << r.epoch << ',' << r.loss << ',' << term(r.terms, "loss_vfl") << ',' << term(r.terms, "loss_bbox") << ',' << term(r.terms, "loss_giou") << ','
         << (r.group_lr.empty() ? 0 : r.group_lr.back()) << ',' << r.grad_norm << ',' << r.images_per_s << ',' << r.data_wait_s << ',' << r.skipped << ',' << r.rss_bytes << std::endl;
}

void MetricLog::epoch(const EpochRecord& r) {
  ordered_json line = ordered_json::object();
  line["train_lr"] = r.group_lr.empty() ? 0 : r.group_lr[0];
  line["train_loss"] = finite(r.loss);
  for (const auto& [name, value] : r.terms) line["train_" + name] = finite(value);
  if (r.evaluation) {
    line["test_coco_eval_bbox"] = ordered_json::array();
    for (const auto& [name, value] : r.evaluation->stats()) line["test_coco_eval_bbox"].push_back(value);
  }
  line["epoch"] = r.epoch;
  line["n_parameters"] = r.parameters;
  line["step"] = r.step;
  line["best_AP"] = r.best_ap;
  line["best_epoch"] = r.best_epoch;
  line["skipped"] = r.skipped;
  if (r.raw_evaluation) line["raw_AP"] = r.raw_evaluation->AP;
  line["train_s"] = r.train_s;
  line["eval_s"] = r.eval_s;
  line["img_per_s"] = r.images_per_s;
  line["data_wait_share"] = r.data_wait_share;
  open_append(folder_ / "log.txt", "") << line.dump() << std::endl;

  std::ofstream metrics = open_append(folder_ / "metrics.csv", kEpochHeader);
  metrics << r.epoch << ',' << r.step << ',' << r.loss;
  if (r.evaluation) metrics << ',' << r.evaluation->AP << ',' << r.evaluation->AP50 << ',' << r.evaluation->AP75 << ','
                              << r.evaluation->AP_small << ',' << r.evaluation->AP_medium << ',' << r.evaluation->AP_large;
  else metrics << ",,,,,,";
  metrics << ',';
  if (r.raw_evaluation) metrics << r.raw_evaluation->AP;
  metrics << ',' << r.train_s << ',' << r.eval_s << ',' << r.images_per_s << ',' << r.data_wait_share << ',' << r.skipped << std::endl;
}

}  // namespace detr::train

#include "train/evaluation_files.h"

#include <nlohmann/json.hpp>

#include "data/coco_results.h"
#include "data/text.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/text.h"

namespace detr::train {
namespace {

using nlohmann::ordered_json;
namespace fs = std::filesystem;

/// A name as a quoted CSV cell on one line.
std::string csv_name(const std::string& name) {
  std::string out = "\"";
  for (const char c : data::is_utf8(name) ? escape_control(name) : data::printable(name)) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + '"';
}

std::string csv_row(std::initializer_list<std::string> cells) {
  std::string row;
  for (const std::string& cell : cells) row += (row.empty() ? "" : ",") + cell;
  return row + '\n';
}

std::string latest_json(const EvaluatedState& state, const data::EvalResult& result) {
  ordered_json stats = ordered_json::object(), classes = ordered_json::array();
  for (const auto& [name, value] : result.stats()) stats[std::string(name)] = value;
  for (const data::ClassResult& c : result.per_class) {
    classes.push_back({{"id", c.id}, {"name", c.name}, {"boxes", c.boxes}, {"AP", c.AP}, {"AP50", c.AP50}, {"AP75", c.AP75}, {"AR", c.AR}});
  }
  const data::BestF1& best = result.best_f1;
  const ordered_json object = {{"epoch", state.epoch}, {"step", state.step}, {"weights", state.weights}, {"stats", stats}, {"per_class", classes}, {"confusion_score", result.confusion_score},
                               {"best_f1", {{"conf", best.conf}, {"p", best.p}, {"r", best.r}, {"f1", best.f1}}}, {"images", result.images}, {"dets", result.dets}};
  return object.dump(2, ' ', false, ordered_json::error_handler_t::replace) + '\n';
}

std::string per_class_csv(const data::EvalResult& result) {
  std::string text = "id,name,boxes,AP,AP50,AP75,AR\n";
  for (const data::ClassResult& c : result.per_class) {
    text += csv_row({std::to_string(c.id), csv_name(c.name), std::to_string(c.boxes), data::number_text(c.AP), data::number_text(c.AP50), data::number_text(c.AP75), data::number_text(c.AR)});
  }
  return text;
}

std::string confusion_csv(const data::EvalResult& result) {
  const std::size_t side = result.per_class.size() + 1;
  const auto name = [&](std::size_t k) { return k + 1 < side ? csv_name(result.per_class[k].name) : std::string("background"); };
  std::string text = "true\\predicted";
  for (std::size_t j = 0; j < side; ++j) text += ',' + name(j);
  text += '\n';
  for (std::size_t i = 0; i < side; ++i) {
    text += name(i);
    for (std::size_t j = 0; j < side; ++j) text += ',' + std::to_string(result.confusion.empty() ? 0 : result.confusion[i * side + j]);
    text += '\n';
  }
  return text;
}

std::string curves_csv(const data::EvalResult& result) {
  std::string text = "id,name,recall,precision,score\n";
  for (const data::ClassResult& c : result.per_class) {
    if (c.boxes == 0) continue;
    const std::string name = csv_name(c.name);
    for (std::size_t r = 0; r < c.precision50.size(); ++r) {
      const bool reached = c.precision50[r] > 0;
      text += csv_row({std::to_string(c.id), name, data::number_text(static_cast<double>(r) / (data::kRecallPoints - 1)), data::number_text(c.precision50[r]),
                       reached ? data::number_text(c.score50[r]) : ""});
    }
  }
  return text;
}

}  // namespace

void write_evaluation_files(const fs::path& folder, const EvaluatedState& state, const data::EvalResult& result, std::span<const data::Detection> detections) {
  make_folder(folder);
  data::write_detections(folder / "predictions.json", detections);
  replace_file(folder / "per_class.csv", per_class_csv(result));
  replace_file(folder / "confusion_matrix.csv", confusion_csv(result));
  replace_file(folder / "pr_curves.csv", curves_csv(result));
  replace_file(folder / "latest.json", latest_json(state, result));
}

}  // namespace detr::train

#include "train/html_report.h"

#include <algorithm>
#include <cmath>

#include "runtime/text.h"
#include "train/html_page.h"
#include "train/html_style.h"

namespace detr::train {
namespace {

constexpr std::size_t kMaxWarnings = 200;
constexpr double kGiB = 1024.0 * 1024 * 1024;

double last_of(const std::vector<double>& values) { return values.empty() ? NAN : values.back(); }

std::vector<double> scaled(std::vector<double> values, double factor) {
  for (double& value : values) value *= factor;
  return values;
}

std::vector<double> defined_values(std::vector<double> values) {
  for (double& value : values) value = defined(value);
  return values;
}

/// A chart over steps or epochs with its legend and its numbers, one table for all curves over the same x.
void add_curves(HtmlPage& page, const std::string& title, const std::string& about, LineChart chart, const std::string& style = "") {
  chart.title = title;
  std::vector<std::vector<const Curve*>> groups;
  for (const Curve& curve : chart.curves) {
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g[0]->x == curve.x; });
    if (group == groups.end()) groups.push_back({&curve});
    else group->push_back(&curve);
  }
  std::string tables;
  for (const std::vector<const Curve*>& group : groups) {
    std::vector<std::string> head = {chart.x_label};
    std::string caption = "Numbers";
    for (const Curve* curve : group) {
      if (groups.size() > 1) caption += (curve == group[0] ? ": " : "; ") + curve->name;
      head.push_back(curve->name);
    }
    tables += folded_table(caption, head, group[0]->x.size(), [&](std::size_t i) {
      std::vector<std::string> cells = {short_text(group[0]->x[i], 9)};
      for (const Curve* curve : group) cells.push_back(short_text(curve->y[i], 5));
      return cells;
    });
  }
  page.figure({title + ".", about, curve_legend(chart.curves), line_chart(chart), tables, style});
}

void add_summary(HtmlPage& page, const ReportData& data) {
  const auto card = [](const std::string& name, const std::string& value, const std::string& note) {
    return "<li><span>" + html_text(name) + "</span><b>" + html_text(value) + "</b><small>" + html_text(note) + "</small></li>\n";
  };
  const std::vector<double> epochs = data.epochs.column("epoch"), speed = data.epochs.column("img_per_s"), skipped = data.epochs.column("skipped");
  double seconds = 0;
  for (const char* part : {"train_s", "eval_s"}) {
    for (const double s : data.epochs.column(part)) seconds += std::isfinite(s) ? s : 0;
  }
  std::string cards = "<ul class=\"cards\">\n";
  if (data.evaluation) {
    cards += card("AP", fixed_text(defined(data.evaluation->AP), 3), data.has_ema ? "moving average, IoU 0.50:0.95" : "IoU 0.50:0.95");
    cards += card("AP50", fixed_text(defined(data.evaluation->AP50), 3), "IoU 0.5");
  }
  if (data.best_epoch >= 0) cards += card("best AP", fixed_text(defined(data.best_ap), 3), "epoch " + std::to_string(data.best_epoch));
  cards += card("loss", short_text(last_of(data.epochs.column("loss"))), "mean of the last epoch");
  cards += card("epochs", count_text(static_cast<std::int64_t>(data.epochs.rows())), "done; " + duration_text(seconds) + " in all");
  cards += card("speed", short_text(last_of(speed)), "images/s in the last epoch");
  cards += card("skipped", epochs.empty() ? "–" : fixed_text(last_of(skipped), 0), "steps without an update");
  page.add(cards + "</ul>\n");

  page.section("Summary");
  HtmlTable facts{{}, {}, 2}, stats{{"COCO metric", data.has_ema ? "moving average" : "weights"}, {}};
  for (const auto& [name, value] : data.facts) facts.rows.push_back({name, value});
  if (data.raw_evaluation) stats.head.push_back("raw weights");
  if (data.evaluation) {
    const auto values = data.evaluation->stats();
    for (std::size_t i = 0; i < values.size(); ++i) {
      stats.rows.push_back({std::string(values[i].first), fixed_text(defined(values[i].second), 4)});
      if (data.raw_evaluation) stats.rows.back().push_back(fixed_text(defined(data.raw_evaluation->stats()[i].second), 4));
    }
  }
  page.add("<div class=\"two\">\n" + html_table(facts) + (data.evaluation ? html_table(stats) : "") + "</div>\n");
}

/// Sums of the loss terms of log.txt by what they are computed from.
std::vector<Curve> loss_parts(const MetricTable& log) {
  std::vector<Curve> parts = {{"last layer", log.column("epoch"), {}}, {"earlier layers", {}, {}}, {"denoising", {}, {}}, {"encoder", {}, {}}};
  for (Curve& part : parts) {
    part.x = parts[0].x;
    part.y.assign(log.rows(), NAN);
  }
  for (std::size_t c = 0; c < log.names.size(); ++c) {
    const std::string& name = log.names[c];
    if (!name.starts_with("train_loss_")) continue;
    const auto has = [&](const char* word) { return name.find(word) != std::string::npos; };
    Curve& part = parts[has("_dn") ? 2 : has("_enc") ? 3 : has("_aux") ? 1 : 0];
    for (std::size_t i = 0; i < log.rows(); ++i) {
      const double value = log.columns[c][i];
      if (std::isfinite(value)) part.y[i] = std::isfinite(part.y[i]) ? part.y[i] + value : value;
    }
  }
  return parts;
}

void add_training(HtmlPage& page, const ReportData& data) {
  const MetricTable &steps = data.steps, &epochs = data.epochs, &log = data.log;
  const std::vector<double> step = steps.column("step"), epoch = epochs.column("epoch");
  const auto by_step = [&](const char* column, const char* name, double factor = 1) { return Curve{name, step, scaled(steps.column(column), factor)}; };
  const auto by_epoch = [&](const char* column, const char* name, double factor = 1) { return Curve{name, epoch, scaled(epochs.column(column), factor)}; };
  const auto chart = [](const char* x, const char* y, std::vector<Curve> curves) { return LineChart{.title = "", .x_label = x, .y_label = y, .curves = std::move(curves), .marks = {}}; };
  // Means of epochs stand at the last step of each, with the single steps pale behind them.
  const auto add_mean = [&](LineChart& to, const char* column, const MetricTable& means, const char* mean_column, const std::string& name) {
    const std::size_t look = to.curves.size() / 2;
    to.curves.push_back({name, means.column("step"), means.column(mean_column), false, look});
    to.curves.push_back({name + ", single steps", step, steps.column(column), true, look});
  };

  page.section("Loss");
  page.begin_figures();
  LineChart total = chart("step", "loss", {}), terms = total;
  total.y_may_be_log = total.wide = true;
  add_mean(total, "loss", epochs, "loss", "loss");
  add_curves(page, "Total loss", "Weighted sum of all terms: means of epochs, and single steps in pale.", total, "wide");
  add_mean(terms, "vfl", log, "train_loss_vfl", "class (vfl)");
  add_mean(terms, "bbox", log, "train_loss_bbox", "box (L1)");
  add_mean(terms, "giou", log, "train_loss_giou", "box (GIoU)");
  add_curves(page, "Loss terms", "Weighted, of the last decoder layer.", terms);
  add_curves(page, "Parts of the loss", "Terms summed by what they are computed from.", chart("epoch", "loss", loss_parts(log)));
  page.end_figures();

  const auto ap = [&](const char* column, const char* name) { return Curve{name, epoch, defined_values(epochs.column(column))}; };
  page.section("Average precision", data.has_ema ? "Of the moving average of the weights (EMA); the raw weights are scored at the end of the run." : "Of the raw weights.");
  page.begin_figures();
  LineChart by_iou = chart("epoch", "average precision", {ap("AP", "AP"), ap("AP50", "AP50"), ap("AP75", "AP75"), ap("raw_AP", "AP (raw weights)")});
  if (data.best_epoch >= 0) by_iou.marks.push_back({static_cast<double>(data.best_epoch), "best " + fixed_text(defined(data.best_ap), 3) + " at epoch " + std::to_string(data.best_epoch)});
  if (!data.has_ema) by_iou.curves.pop_back();
  add_curves(page, "AP by epoch", "COCO metric, validation split.", by_iou);
  add_curves(page, "AP by size of the boxes", "Area below 32² px, up to 96² px, above.",
             chart("epoch", "average precision", {ap("AP_small", "small"), ap("AP_medium", "medium"), ap("AP_large", "large")}));
  page.end_figures();

  page.section("Learning rate");
  page.begin_figures();
  add_curves(page, "Learning rate", "Of the last parameter group.", chart("step", "learning rate", {by_step("lr", "learning rate")}));
  LineChart norm = chart("step", "gradient norm", {by_step("grad_norm", "gradient norm")});
  norm.y_may_be_log = true;
  add_curves(page, "Gradient norm", "Before clipping.", norm);
  page.end_figures();

  page.section("Speed");
  page.begin_figures();
  LineChart speed = chart("step", "images/s", {});
  add_mean(speed, "img_per_s", epochs, "img_per_s", "images/s");
  add_curves(page, "Throughput", "Means of epochs, and of the last 20 steps in pale.", speed);
  add_curves(page, "Waiting for data", "Share of the training time of an epoch.", chart("epoch", "share (%)", {by_epoch("data_wait_share", "waiting for data", 100)}));
  add_curves(page, "Wait of single steps", "By the training thread.", chart("step", "time (ms)", {by_step("data_wait_s", "waiting for data", 1e3)}));
  add_curves(page, "Time of an epoch", "Training and evaluation.", chart("epoch", "time (s)", {by_epoch("train_s", "training"), by_epoch("eval_s", "evaluation")}));
  page.end_figures();

  page.section("Memory");
  page.begin_figures();
  LineChart memory = chart("step", "memory (GiB)", {by_step("rss_bytes", "resident", 1 / kGiB)});
  memory.wide = true;
  add_curves(page, "Memory", "Of the process, resident.", memory, "wide");
  page.end_figures();
}

/// The pictures that fit into `room` bytes.
std::string pictures_html(const ReportData& data, std::size_t room) {
  const auto image = [](const ReportPicture& picture, const std::vector<std::uint8_t>& jpeg, const std::string& what) {
    const std::string about = html_text(picture.name, 120) + ", " + what;
    return "<div><img src=\"data:image/jpeg;base64," + base64(jpeg) + "\" width=\"" + std::to_string(picture.width) + "\" height=\"" + std::to_string(picture.height) +
           "\" alt=\"" + about + "\" title=\"" + about + "\"/><span>" + what + "</span></div>\n";
  };
  std::string out;
  for (std::size_t i = 0; i < std::min(data.pictures.size(), kMaxReportPictures); ++i) {
    const ReportPicture& p = data.pictures[i];
    const std::string figure = "<figure><div class=\"pair\">\n" + image(p, p.truth_jpeg, "truth: " + std::to_string(p.truths)) +
                               image(p, p.prediction_jpeg, "prediction: " + std::to_string(p.predictions)) + "</div><figcaption>" + html_text(p.name, 120) + "</figcaption></figure>\n";
    if (out.size() + figure.size() > room) break;
    out += figure;
  }
  return out.empty() ? "" : "<div class=\"pairs\">\n" + out + "</div>\n";
}

std::string warnings_html(const std::vector<std::string>& warnings) {
  if (warnings.empty()) return "<p>There was none.</p>\n";
  const std::size_t first = warnings.size() - std::min(warnings.size(), kMaxWarnings);
  std::string out;
  if (first > 0) out += "<p>The last " + std::to_string(kMaxWarnings) + " of " + std::to_string(warnings.size()) + "; train.log has all.</p>\n";
  out += "<ol class=\"warnings\" start=\"" + std::to_string(first + 1) + "\">\n";
  for (std::size_t i = first; i < warnings.size(); ++i) out += "<li>" + html_text(warnings[i], 400) + "</li>\n";
  return out + "</ol>\n";
}

}  // namespace

void HtmlPage::section(std::string_view title, std::string_view about) {
  if (in_section_) html_ += "</section>\n";
  in_section_ = true;
  html_ += "<section>\n<h2>" + html_text(title) + "</h2>\n";
  if (!about.empty()) html_ += "<p>" + html_text(about) + "</p>\n";
}

void HtmlPage::figure(const Figure& figure) {
  html_ += "<figure" + (figure.style.empty() ? "" : " class=\"" + figure.style + "\"") + "><figcaption><p><b>Figure " + std::to_string(++figures_) + ". " + html_text(figure.title) + "</b> " +
           html_text(figure.about) + "</p>\n" + figure.legend + "</figcaption>\n<div class=\"scroll\">\n" + figure.chart + "</div>\n<div>\n" + figure.table + "</div></figure>\n";
}

void HtmlPage::begin_figures() { html_ += "<div class=\"figures\">\n"; }
void HtmlPage::end_figures() { html_ += "</div>\n"; }

std::string HtmlPage::finish() {
  if (in_section_) html_ += "</section>\n";
  in_section_ = false;
  return std::move(html_);
}

std::string html_report(const ReportData& data) {
  constexpr std::size_t kMaxConfig = 100'000, kMargin = 4'000;
  const std::string name = html_text(data.name, 120);
  std::string head = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n";
  // The page asks for nothing from elsewhere; should a fault ever let text of a data set through, it still cannot.
  head += "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\"/>\n";
  head += "<title>" + name + "</title>\n<style>" + std::string(kReportStyle) + "</style>\n</head>\n<body>\n";
  head += "<header><h1>" + name + "</h1>\n<p>Training report</p></header>\n<main>\n";
  const std::string warnings = warnings_html(data.warnings);
  const std::string config = "<pre>" + html_text(data.config_json, kMaxConfig, true) + "</pre>\n";

  HtmlPage page;
  add_summary(page, data);
  add_training(page, data);
  add_evaluation(page, data);
  add_data_set(page, data);
  page.section("Pictures", data.pictures.empty() ? "There are no pictures."
                                                 : "Validation pictures: true boxes dashed at the left, predictions with a score of at least " +
                                                       fixed_text(data.picture_score, 2) + " at the right, the best where there are many.");
  const std::size_t used = head.size() + page.size() + warnings.size() + config.size() + kMargin;
  page.add(pictures_html(data, used < kMaxReportBytes ? kMaxReportBytes - used : 0));
  page.section("Warnings");
  page.add(warnings);
  page.section("Configuration");
  page.add(config);
  return head + page.finish() + "</main>\n<footer></footer>\n</body>\n</html>\n";
}

}  // namespace detr::train

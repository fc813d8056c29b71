#include <algorithm>
#include <cmath>
#include <numeric>

#include "train/html_page.h"

namespace detr::train {
namespace {

constexpr std::size_t kMaxBars = 80;          // classes with a bar of their own
constexpr std::size_t kMaxMatrixClasses = 30; // rows of the confusion matrix besides "others" and "background"

std::string class_name(const data::ClassResult& c) { return c.name.empty() ? "category " + std::to_string(c.id) : c.name; }

/// Indices of the classes with true boxes by falling number of these; equal ones in order.
std::vector<std::size_t> classes_by_boxes(const data::EvalResult& result) {
  std::vector<std::size_t> order(result.per_class.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return result.per_class[a].boxes > result.per_class[b].boxes; });
  return order;
}

void add_classes(HtmlPage& page, const data::EvalResult& result) {
  std::vector<const data::ClassResult*> scored;
  HtmlTable table{{"class", "id", "true boxes", "AP", "AP50", "AP75", "AR"}, {}};
  for (const data::ClassResult& c : result.per_class) {
    if (c.AP >= 0) scored.push_back(&c);
    table.rows.push_back({class_name(c), std::to_string(c.id), count_text(c.boxes), fixed_text(defined(c.AP), 4),
                          fixed_text(defined(c.AP50), 4), fixed_text(defined(c.AP75), 4), fixed_text(defined(c.AR), 4)});
  }
  std::stable_sort(scored.begin(), scored.end(), [](const auto* a, const auto* b) { return a->AP > b->AP; });
  std::string about = "Classes by falling AP; the pale bar behind is AP at IoU 0.5. The number is the AP.";
  if (scored.size() > kMaxBars) {
    about += " Shown are the best and the worst " + std::to_string(kMaxBars / 2) + " of " + std::to_string(scored.size()) + ".";
    scored.erase(scored.begin() + kMaxBars / 2, scored.end() - kMaxBars / 2);
  }
  if (scored.size() < result.per_class.size()) about += " Classes without a true box have no AP.";

  BarChart chart{.title = "AP per class", .label_axis = "class", .value_axis = "average precision", .labels = {}, .series = {{"AP at IoU 0.5", {}}, {"AP at IoU 0.50:0.95", {}}},
                 .horizontal = true, .nested = true, .wide = true, .decimals = 3, .maximum = 1.0};
  for (const data::ClassResult* c : scored) {
    chart.labels.push_back(class_name(*c));
    chart.series[0].values.push_back(defined(c->AP50));
    chart.series[1].values.push_back(defined(c->AP));
  }
  page.section("AP per class");
  page.figure({"AP per class.", about, bar_legend({chart.series[0].name, chart.series[1].name}), bar_chart(chart), folded_table(table, kMaxListedClasses), "nested"});
}

/// Every fifth recall with the values of the curves.
HtmlTable recall_table(const std::vector<double>& recall, const std::vector<Curve>& curves) {
  HtmlTable table{{"recall"}, {}};
  for (const Curve& curve : curves) table.head.push_back(curve.name);
  for (std::size_t r = 0; r < recall.size() && !curves.empty(); r += 5) {
    table.rows.push_back({fixed_text(recall[r], 2)});
    for (const Curve& curve : curves) table.rows.back().push_back(fixed_text(curve.y[r], 3));
  }
  return table;
}

void add_precision_recall(HtmlPage& page, const data::EvalResult& result) {
  LineChart chart{.title = "Precision over recall at IoU 0.5", .x_label = "recall", .y_label = "precision", .curves = {}, .marks = {}, .x_whole = false,
                  .x_range = Range{0, 1}, .y_range = Range{0, 1}};
  LineChart scores = chart;
  scores.title = "Score at which a recall is reached, IoU 0.5";
  scores.y_label = "score";
  std::vector<double> recall(data::kRecallPoints), mean(data::kRecallPoints);
  for (std::size_t r = 0; r < recall.size(); ++r) recall[r] = static_cast<double>(r) / (data::kRecallPoints - 1);
  std::size_t classes = 0;
  for (const std::size_t k : classes_by_boxes(result)) {
    const data::ClassResult& c = result.per_class[k];
    if (c.boxes == 0) continue;
    ++classes;
    for (std::size_t r = 0; r < recall.size(); ++r) mean[r] += c.precision50[r];
    if (classes > kMaxCurves - 1) continue;
    chart.curves.push_back({class_name(c), recall, {c.precision50.begin(), c.precision50.end()}});
    scores.curves.push_back({class_name(c), recall, {c.score50.begin(), c.score50.end()}});
    for (std::size_t r = 0; r < recall.size(); ++r) {
      if (c.precision50[r] <= 0) scores.curves.back().y[r] = NAN;
    }
  }
  for (double& value : mean) value /= static_cast<double>(std::max<std::size_t>(classes, 1));
  if (classes > 1) chart.curves.push_back({"mean of classes", recall, mean});   // last, so that a class has one colour in both charts

  std::string about = "Interpolated precision at 101 recalls, IoU 0.5.";
  if (classes > kMaxCurves - 1) about += " Shown are the " + std::to_string(kMaxCurves - 1) + " classes with the most true boxes; the mean is over all " + std::to_string(classes) + ".";
  const data::BestF1& best = result.best_f1;
  std::string best_text;
  if (best.f1 >= 0) {
    best_text = "Best F1 over all classes together at IoU 0.5: " + fixed_text(best.f1, 3) + " at a score of " + fixed_text(best.conf, 3) + ", with precision " + fixed_text(best.p, 3) +
                " and recall " + fixed_text(best.r, 3) + ".";
  }
  page.section("Precision and recall", best_text);
  page.begin_figures();
  page.figure({"Precision over recall.", about, curve_legend(chart.curves), line_chart(chart), folded_table(recall_table(recall, chart.curves)), ""});
  page.figure({"Score over recall.", "The score down to which detections have to be taken to find that share of the boxes; where a curve ends nothing more is found.", curve_legend(scores.curves),
               line_chart(scores), folded_table(recall_table(recall, scores.curves)), ""});
  page.end_figures();
}

void add_confusion(HtmlPage& page, const data::EvalResult& result) {
  const std::size_t classes = result.per_class.size(), side = classes + 1;
  if (result.confusion.size() != side * side) return;
  std::vector<std::size_t> order = classes_by_boxes(result);
  const bool all = classes <= kMaxMatrixClasses;
  order.resize(std::min(classes, kMaxMatrixClasses));
  std::sort(order.begin(), order.end());
  MatrixChart chart{.title = "Confusion matrix at IoU 0.5", .row_axis = "true class", .column_axis = "predicted class", .labels = {}, .counts = {}};
  std::vector<std::size_t> place(side, order.size());   // row of the chart for a row of the result; what is not shown is "others"
  for (std::size_t i = 0; i < order.size(); ++i) {
    place[order[i]] = i;
    chart.labels.push_back(class_name(result.per_class[order[i]]));
  }
  if (!all) chart.labels.push_back("others");
  chart.labels.push_back("background");
  const std::size_t n = chart.labels.size();
  place[classes] = n - 1;
  chart.counts.assign(n * n, 0);
  struct Mistake {
    std::size_t row, column;
    std::int64_t count;
  };
  std::vector<Mistake> mistakes;
  std::vector<std::int64_t> row_sums(side, 0);
  for (std::size_t i = 0; i < side; ++i) {
    for (std::size_t j = 0; j < side; ++j) {
      const std::int64_t count = result.confusion[i * side + j];
      chart.counts[place[i] * n + place[j]] += count;
      row_sums[i] += count;
      if (i != j && count > 0) mistakes.push_back({i, j, count});
    }
  }
  std::stable_sort(mistakes.begin(), mistakes.end(), [](const Mistake& a, const Mistake& b) { return a.count > b.count; });
  constexpr std::size_t kMaxMistakes = 40;
  if (mistakes.size() > kMaxMistakes) mistakes.resize(kMaxMistakes);
  HtmlTable table{{"true", "predicted", "count", "share of row, %"}, {}, 2};
  const auto name = [&](std::size_t k) { return k == classes ? std::string("background") : class_name(result.per_class[k]); };
  for (const Mistake& m : mistakes) {
    table.rows.push_back({name(m.row), name(m.column), count_text(m.count), fixed_text(100 * static_cast<double>(m.count) / static_cast<double>(row_sums[m.row]), 1)});
  }
  std::string about = "Counts at IoU 0.5 for detections with a score of at least " + fixed_text(result.confusion_score, 3) +
                      ". A row is a true class and its shade the share of the row; the last column holds missed boxes, the last row false alarms. The table lists the most frequent mistakes.";
  if (!all) about += " Shown are the " + std::to_string(kMaxMatrixClasses) + " classes with the most true boxes; the rest is summed up as others.";
  page.section("Confusion");
  page.figure({"Confusion matrix.", about, "", matrix_chart(chart), folded_table(table), ""});
}

}  // namespace

double defined(double ap) { return ap < 0 ? NAN : ap; }

void add_evaluation(HtmlPage& page, const ReportData& data) {
  if (!data.evaluation) {
    page.section("Evaluation", "There is no evaluation yet.");
    return;
  }
  add_classes(page, *data.evaluation);
  add_precision_recall(page, *data.evaluation);
  add_confusion(page, *data.evaluation);
}

}  // namespace detr::train

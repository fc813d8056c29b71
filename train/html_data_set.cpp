#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "data/check.h"
#include "train/html_page.h"

namespace detr::train {
namespace {

/// Lower ends of the classes of box size, in pixels of the side of a square of the same area; 32 and 96 part COCO's small, medium, large.
constexpr std::array<double, 11> kSizeEnds = {0, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024};
constexpr std::size_t kMaxClasses = 40;   // with a bar

double percent(std::int64_t part, std::int64_t whole) { return whole > 0 ? 100 * static_cast<double>(part) / static_cast<double>(whole) : 0; }

/// Trainable boxes of each image.
std::vector<std::int64_t> boxes_per_image(const data::CocoData& coco) {
  std::vector<std::int64_t> counts;
  for (const data::ImageRecord& image : coco.images) {
    const auto first = coco.annotations.begin() + image.first;
    counts.push_back(std::count_if(first, first + image.count, [](const data::Annotation& a) { return a.trainable; }));
  }
  return counts;
}

std::string range_text(std::int64_t first, std::int64_t last) { return first == last ? std::to_string(first) : std::to_string(first) + "–" + std::to_string(last); }

/// Share of the images, in percent, by their number of boxes in at most 24 bins of equal width.
BarChart count_chart(const ReportData& data, HtmlTable& table) {
  std::vector<std::vector<std::int64_t>> counts;
  std::int64_t most = 0;
  for (const ReportSplit& split : data.splits) {
    counts.push_back(boxes_per_image(*split.coco));
    for (const std::int64_t n : counts.back()) most = std::max(most, n);
  }
  std::int64_t width = 1;   // 1, 2, 5, 10, 20, 50, ...
  for (int k = 1; most / width >= 24; ++k) width = k % 3 == 2 ? width / 2 * 5 : width * 2;
  BarChart chart{.title = "Boxes per image", .label_axis = "boxes in an image", .value_axis = "images (%)", .labels = {}, .series = {}, .decimals = 2};
  const auto bins = static_cast<std::size_t>(most / width + 1);
  for (std::size_t b = 0; b < bins; ++b) {
    const auto first = static_cast<std::int64_t>(b) * width;
    chart.labels.push_back(range_text(first, first + width - 1));
    table.rows.push_back({chart.labels.back()});
  }
  for (std::size_t s = 0; s < counts.size(); ++s) {
    std::vector<std::int64_t> histogram(bins, 0);
    for (const std::int64_t n : counts[s]) ++histogram[static_cast<std::size_t>(n / width)];
    chart.series.push_back({data.splits[s].name, {}});
    for (std::size_t b = 0; b < bins; ++b) {
      chart.series.back().values.push_back(percent(histogram[b], static_cast<std::int64_t>(counts[s].size())));
      table.rows[b].push_back(count_text(histogram[b]));
    }
  }
  return chart;
}

/// Share of the boxes, in percent, by size.
BarChart size_chart(const ReportData& data, HtmlTable& table) {
  BarChart chart{.title = "Size of the boxes", .label_axis = "square root of width × height (pixels of the picture)", .value_axis = "boxes (%)", .labels = {}, .series = {}, .decimals = 2};
  for (std::size_t b = 0; b < kSizeEnds.size(); ++b) {
    const auto first = static_cast<std::int64_t>(kSizeEnds[b]);
    chart.labels.push_back(b + 1 < kSizeEnds.size() ? std::to_string(first) + "–" + std::to_string(static_cast<std::int64_t>(kSizeEnds[b + 1])) : "≥" + std::to_string(first));
    table.rows.push_back({chart.labels.back()});
  }
  for (const ReportSplit& split : data.splits) {
    std::array<std::int64_t, kSizeEnds.size()> histogram{};
    std::int64_t boxes = 0;
    for (const data::Annotation& a : split.coco->annotations) {
      if (!a.trainable) continue;
      const double side = std::sqrt(std::max(0.0, a.box_xywh[2] * a.box_xywh[3]));
      ++histogram[static_cast<std::size_t>(std::upper_bound(kSizeEnds.begin() + 1, kSizeEnds.end(), side) - kSizeEnds.begin() - 1)];
      ++boxes;
    }
    chart.series.push_back({split.name, {}});
    for (std::size_t b = 0; b < kSizeEnds.size(); ++b) {
      chart.series.back().values.push_back(percent(histogram[b], boxes));
      table.rows[b].push_back(count_text(histogram[b]));
    }
  }
  return chart;
}

/// Share of the boxes, in percent, by class, most frequent first; classes that not all splits know count 0 there.
BarChart class_chart(const ReportData& data, const std::vector<data::DataStats>& stats, HtmlTable& table) {
  BarChart chart{.title = "Boxes per class", .label_axis = "class", .value_axis = "boxes (%)", .labels = {}, .series = {}, .horizontal = true, .wide = true, .decimals = 2};
  const std::vector<data::Category>& categories = data.splits[0].coco->categories;
  std::vector<std::size_t> order(categories.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto count = [&](std::size_t s, std::size_t k) { return k < stats[s].per_class.size() ? stats[s].per_class[k] : 0; };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return count(0, a) > count(0, b); });
  for (const ReportSplit& split : data.splits) chart.series.push_back({split.name, {}});
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::string& name = categories[order[i]].name;
    table.rows.push_back({name});
    for (std::size_t s = 0; s < stats.size(); ++s) table.rows.back().push_back(count_text(count(s, order[i])));
    if (i >= kMaxClasses) continue;
    chart.labels.push_back(name);
    for (std::size_t s = 0; s < stats.size(); ++s) chart.series[s].values.push_back(percent(count(s, order[i]), stats[s].trainable));
  }
  return chart;
}

std::string picture_sizes(const data::CocoData& coco) {
  std::array<std::int64_t, 2> least{INT64_MAX, INT64_MAX}, most{0, 0};
  for (const data::ImageRecord& image : coco.images) {
    if (image.width <= 0 || image.height <= 0) continue;
    least = {std::min(least[0], image.width), std::min(least[1], image.height)};
    most = {std::max(most[0], image.width), std::max(most[1], image.height)};
  }
  return most[0] == 0 ? "–" : range_text(least[0], most[0]) + " × " + range_text(least[1], most[1]);
}

}  // namespace

void add_data_set(HtmlPage& page, const ReportData& data) {
  const bool empty = data.splits.empty();
  page.section("Data set", empty ? "No data set was given."
                                 : "Boxes are those that are no crowd and have an area inside their picture. Small, medium and large are by area, parted at 32² and 96² px.");
  if (empty) return;
  std::vector<data::DataStats> stats;
  for (const ReportSplit& split : data.splits) stats.push_back(data::data_stats(*split.coco));
  HtmlTable summary{{"split", "images", "without boxes", "boxes", "crowd", "small", "medium", "large", "most per image", "p99 per image", "picture size (px)"}, {}};
  for (std::size_t s = 0; s < stats.size(); ++s) {
    const data::DataStats& d = stats[s];
    summary.rows.push_back({data.splits[s].name, count_text(d.images), count_text(d.background), count_text(d.trainable), count_text(d.crowd), count_text(d.small), count_text(d.medium),
                            count_text(d.large), count_text(d.most_per_image), count_text(d.p99_per_image), picture_sizes(*data.splits[s].coco)});
  }
  page.add(html_table(summary));

  std::vector<std::string> names, images, boxes;
  for (const ReportSplit& split : data.splits) {
    names.push_back(split.name);
    images.push_back(split.name + ", images");
    boxes.push_back(split.name + ", boxes");
  }
  const auto head = [](const std::string& first, std::vector<std::string> rest) {
    rest.insert(rest.begin(), first);
    return rest;
  };
  HtmlTable per_image{head("boxes in an image", images), {}}, sizes{head("side (px)", boxes), {}}, classes{head("class", boxes), {}};
  const BarChart count = count_chart(data, per_image), size = size_chart(data, sizes), per_class = class_chart(data, stats, classes);
  const std::string key = bar_legend(names);
  page.begin_figures();
  page.figure({"Boxes per image.", "Share of the images of a split by their number of boxes.", key, bar_chart(count), folded_table(per_image), ""});
  page.figure({"Size of the boxes.", "Share of the boxes by the side of a square of their area; sizes are parted at 32 and 96 px.", key, bar_chart(size), folded_table(sizes), ""});
  std::string about = "Share of the boxes of a split, most frequent class first.";
  if (per_class.labels.size() < classes.rows.size()) about += " The first " + std::to_string(kMaxClasses) + " of " + std::to_string(classes.rows.size()) + " classes.";
  page.figure({"Boxes per class.", about, key, bar_chart(per_class), folded_table(classes, kMaxListedClasses), "wide"});
  page.end_figures();
}

}  // namespace detr::train

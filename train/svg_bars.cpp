#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/error.h"
#include "train/html_text.h"
#include "train/svg_axis.h"
#include "train/svg_chart.h"

namespace detr::train {
namespace {

constexpr double kHalfWidth = 500, kWideWidth = 1040, kHeight = 290;

/// Name of a row or column that has to fit beside a chart.
std::string clipped(const std::string& label, std::size_t characters) {
  std::size_t at = 0;
  for (; at < label.size() && characters > 0; ++at) {
    if ((static_cast<std::uint8_t>(label[at]) & 0xc0) != 0x80) --characters;
  }
  while (at < label.size() && (static_cast<std::uint8_t>(label[at]) & 0xc0) == 0x80) ++at;
  return at < label.size() ? label.substr(0, at) + "…" : label;
}

/// Counts in the room of four characters: 9,999 stays 9999; 12,345 is 12k.
std::string tight_count(std::int64_t count) {
  return count < 10'000 ? std::to_string(count) : count < 10'000'000 ? std::to_string(count / 1000) + "k" : std::to_string(count / 1'000'000) + "M";
}

std::string bar(double x, double y, double width, double height, std::size_t look, const std::string& about) {
  const std::string n = std::to_string(look % kMaxCurves);
  return "<rect class=\"bar c" + n + "\" x=\"" + px(x) + "\" y=\"" + px(y) + "\" width=\"" + px(width) + "\" height=\"" + px(height) + "\"><title>" + about + "</title></rect>\n";
}

struct Slot {
  double begin, size;   ///< across the bar
};

/// Where bar `s` of `count` lies in a band.
Slot slot_of(double begin, double size, std::size_t s, std::size_t count, bool nested) {
  if (nested) {
    const double inner = size * (s == 0 ? 1 : 0.5);
    return {begin + (size - inner) / 2, inner};
  }
  const double each = size / static_cast<double>(count);
  return {begin + static_cast<double>(s) * each, each};
}

Axis value_axis(const BarChart& chart, int ticks) {
  double greatest = 0;
  for (const BarSeries& series : chart.series) {
    for (const double value : series.values) greatest = std::isfinite(value) ? std::max(greatest, value) : greatest;
  }
  return linear_axis(0, chart.maximum.value_or(greatest > 0 ? greatest : 1), ticks);
}

std::string about_bar(const BarChart& chart, std::size_t s, std::size_t i) {
  const std::string series = chart.series.size() > 1 ? chart.series[s].name + ", " : "";
  return html_text(series + chart.labels[i], 120) + ": " + fixed_text(chart.series[s].values[i], chart.decimals);
}

std::string horizontal_bars(const BarChart& chart) {
  const double width = chart.wide ? kWideWidth : kHalfWidth;
  const double band = chart.nested || chart.series.size() == 1 ? 20 : 26;
  const double label_width = 150, value_width = 52;
  const PlotArea area{label_width, 12, width - value_width, 12 + band * static_cast<double>(chart.labels.size())};
  const Axis axis = value_axis(chart, chart.wide ? 10 : 5);
  std::string out = svg_begin(width, area.bottom + 42, chart.title) + draw_bottom_axis(area, axis, chart.value_axis, true);
  for (std::size_t i = 0; i < chart.labels.size(); ++i) {
    const double top = area.top + band * static_cast<double>(i);
    out += "<text x=\"" + px(label_width - 8) + "\" y=\"" + px(top + band / 2 + 4) + "\" text-anchor=\"end\">" + html_text(clipped(chart.labels[i], 20)) + "<title>" +
           html_text(chart.labels[i], 120) + "</title></text>\n";
    for (std::size_t s = 0; s < chart.series.size(); ++s) {
      const double value = chart.series[s].values[i];
      if (!std::isfinite(value)) continue;
      const Slot slot = slot_of(top + 2.5, band - 5, s, chart.series.size(), chart.nested);
      const double length = std::clamp(axis.place(value), 0.0, 1.0) * area.width();
      out += bar(area.left, slot.begin, length, slot.size, s, about_bar(chart, s, i));
      if (!chart.nested && chart.series.size() == 1) out += svg_text(area.left + length + 6, top + band / 2 + 4, "start", fixed_text(value, chart.decimals), "note");
    }
    if (chart.nested) out += svg_text(width - 4, top + band / 2 + 4, "end", fixed_text(chart.series.back().values[i], chart.decimals), "note");
  }
  return out + "</svg>\n";
}

std::string vertical_bars(const BarChart& chart) {
  const double width = chart.wide ? kWideWidth : kHalfWidth;
  const PlotArea area{54, 30, width - 16, kHeight - 44};
  const Axis axis = value_axis(chart, 5);
  std::string out = svg_begin(width, kHeight, chart.title) + draw_left_axis(area, axis, chart.value_axis);
  const double band = area.width() / static_cast<double>(chart.labels.size());
  const auto longest = std::max_element(chart.labels.begin(), chart.labels.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); })->size();
  const auto stride = static_cast<std::size_t>(std::ceil((7.0 * static_cast<double>(longest) + 6) / band));   // labels must not touch
  for (std::size_t i = 0; i < chart.labels.size(); ++i) {
    const double left = area.left + band * static_cast<double>(i);
    if (i % stride == 0) out += svg_text(left + band / 2, area.bottom + 17, "middle", chart.labels[i]);
    for (std::size_t s = 0; s < chart.series.size(); ++s) {
      const double value = chart.series[s].values[i];
      if (!std::isfinite(value) || value <= 0) continue;
      const Slot slot = slot_of(left + band * 0.1, band * 0.8, s, chart.series.size(), chart.nested);
      const double height = std::clamp(axis.place(value), 0.0, 1.0) * area.height();
      out += bar(slot.begin, area.bottom - height, slot.size, height, s, about_bar(chart, s, i));
    }
  }
  out += "<path class=\"axis\" d=\"" + move_to(area.left, area.bottom) + line_to_x(area.right) + "\"/>\n";
  return out + svg_text((area.left + area.right) / 2, area.bottom + 35, "middle", chart.label_axis, "name") + "</svg>\n";
}

}  // namespace

std::string bar_chart(const BarChart& chart) {
  DETR_CHECK(chart.series.size() <= kMaxCurves, "bar_chart: ", chart.title, ": ", chart.series.size(), " series, at most ", kMaxCurves, " can be told apart");
  for (const BarSeries& series : chart.series) {
    DETR_CHECK(series.values.size() == chart.labels.size(), "bar_chart: ", series.name, " has ", series.values.size(), " values for ", chart.labels.size(), " labels");
  }
  if (chart.labels.empty() || chart.series.empty()) {
    return svg_begin(kHalfWidth, 60, chart.title) + svg_text(kHalfWidth / 2, 34, "middle", "no data", "note") + "</svg>\n";
  }
  return chart.horizontal ? horizontal_bars(chart) : vertical_bars(chart);
}

std::string matrix_chart(const MatrixChart& chart) {
  const std::size_t n = chart.labels.size();
  DETR_CHECK(chart.counts.size() == n * n, "matrix_chart: ", chart.title, ": ", chart.counts.size(), " counts for ", n, " labels");
  const double cell = std::clamp(860.0 / static_cast<double>(std::max<std::size_t>(n, 1)), 26.0, 64.0);
  std::size_t longest = 1;
  for (const std::string& label : chart.labels) longest = std::max(longest, std::min<std::size_t>(label.size(), 18));
  const double left = 34 + 7.2 * static_cast<double>(longest), top = 34 + 5.2 * static_cast<double>(longest), side = cell * static_cast<double>(n);
  const double width = std::max(kHalfWidth, left + side + 96), height = top + side + 12;
  std::string out = svg_begin(width, height, chart.title);
  out += svg_text(left + side / 2, 14, "middle", chart.column_axis, "name");
  out += svg_text(0, 0, "middle", chart.row_axis, "name", " transform=\"translate(14 " + px(top + side / 2) + ") rotate(-90)\"");
  for (std::size_t i = 0; i < n; ++i) {
    const double at = cell * (static_cast<double>(i) + 0.5);
    out += svg_text(left - 8, top + at + 4, "end", clipped(chart.labels[i], 18));
    out += svg_text(0, 0, "start", clipped(chart.labels[i], 16), "", " transform=\"translate(" + px(left + at + 3) + " " + px(top - 8) + ") rotate(-45)\"");
    const auto row = chart.counts.begin() + static_cast<std::ptrdiff_t>(i * n);
    const std::int64_t sum = std::accumulate(row, row + static_cast<std::ptrdiff_t>(n), std::int64_t{0});
    for (std::size_t j = 0; j < n; ++j) {
      const std::int64_t count = row[static_cast<std::ptrdiff_t>(j)];
      if (count <= 0) continue;
      const double share = static_cast<double>(count) / static_cast<double>(sum);
      const double x = left + cell * static_cast<double>(j), y = top + cell * static_cast<double>(i);
      const std::string about = html_text(chart.labels[i], 80) + " → " + html_text(chart.labels[j], 80) + ": " + count_text(count) + " (" + fixed_text(100 * share, 1) + " % of the row)";
      out += "<g><title>" + about + "</title><rect class=\"cell\" x=\"" + px(x) + "\" y=\"" + px(y) + "\" width=\"" + px(cell) + "\" height=\"" + px(cell) + "\" fill-opacity=\"" +
             fixed_text(0.06 + 0.94 * share, 2) + "\"/>" + svg_text(x + cell / 2, y + cell / 2 + 4, "middle", tight_count(count), share > 0.5 ? "on" : "in") + "</g>\n";
    }
  }
  std::string lines;
  for (std::size_t i = 0; i <= n; ++i) {
    const double at = cell * static_cast<double>(i);
    lines += move_to(left, top + at) + line_to_x(left + side) + move_to(left + at, top) + line_to_y(top + side);
  }
  return out + "<path class=\"grid\" d=\"" + lines + "\"/>\n</svg>\n";
}

}  // namespace detr::train

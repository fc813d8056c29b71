#include "train/svg_chart.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "runtime/error.h"
#include "train/html_text.h"
#include "train/svg_axis.h"

namespace detr::train {
namespace {

constexpr double kHalfWidth = 500, kWideWidth = 1040, kHeight = 290;
constexpr std::size_t kMarkerPoints = 60;   // fewer points than this are marked one by one
constexpr double kPlottable = 1e30;         // keeps spans and their tenths inside a double

bool plottable(double value) { return std::abs(value) <= kPlottable; }

/// Least and greatest plottable value, or nothing.
std::optional<Range> range_of(const std::vector<Curve>& curves, bool of_y) {
  std::optional<Range> range;
  for (const Curve& curve : curves) {
    for (std::size_t i = 0; i < curve.x.size(); ++i) {
      if (!plottable(curve.x[i]) || !plottable(curve.y[i])) continue;
      const double value = of_y ? curve.y[i] : curve.x[i];
      range = range ? Range{std::min(range->first, value), std::max(range->second, value)} : Range{value, value};
    }
  }
  return range;
}

Axis y_axis(const LineChart& chart, const Range& range) {
  if (chart.y_range) return linear_axis(chart.y_range->first, chart.y_range->second, 5);
  if (chart.y_may_be_log && range.first > 0 && range.second / range.first > 50) return log_axis(range.first, range.second);
  return chart.y_from_zero ? linear_axis(std::min(0.0, range.first), std::max(0.0, range.second), 5) : linear_axis(range.first, range.second, 5);
}

std::string draw_curve(const Curve& curve, std::size_t look, const PlotArea& area, const Axis& x, const Axis& y) {
  const auto columns = std::min(static_cast<std::size_t>(area.width()), kMaxCurvePoints / 2);
  const std::vector<CurvePoint> points = thin_curve(curve, x.low, x.high, columns);
  if (points.empty()) return "";
  std::string path, markers;
  double least = points[0].y, greatest = points[0].y;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const double px_x = area.left + std::clamp(x.place(points[i].x), 0.0, 1.0) * area.width();
    const double px_y = area.bottom - std::clamp(y.place(points[i].y), 0.0, 1.0) * area.height();
    path += concat(points[i].gap ? 'M' : 'L', px(px_x), ' ', px(px_y));
    least = std::min(least, points[i].y);
    greatest = std::max(greatest, points[i].y);
    const bool alone = points[i].gap && (i + 1 == points.size() || points[i + 1].gap);
    if (!alone && (curve.faint || curve.x.size() > kMarkerPoints)) continue;
    markers += "<circle cx=\"" + px(px_x) + "\" cy=\"" + px(px_y) + "\" r=\"2.6\"><title>" + html_text(curve.name, 80) + ": " + short_text(points[i].y) + " at " +
               short_text(points[i].x, 9) + "</title></circle>\n";
  }
  const std::string about = html_text(curve.name, 80) + ": least " + short_text(least) + ", greatest " + short_text(greatest) + ", last " + short_text(points.back().y);
  const std::string n = std::to_string(look);
  return "<g class=\"c" + n + " d" + n + (curve.faint ? " faint" : "") + "\">\n<path class=\"curve\" d=\"" + path + "\"><title>" + about + "</title></path>\n" + markers + "</g>\n";
}

std::string draw_mark(const ChartMark& mark, const PlotArea& area, const Axis& x) {
  const double place = x.place(mark.x);
  if (!(place >= 0 && place <= 1)) return "";
  const double at = area.left + place * area.width();
  return "<path class=\"mark\" d=\"" + move_to(at, area.top) + line_to_y(area.bottom) + "\"><title>" + html_text(mark.text, 80) + "</title></path>\n" +
         svg_text(at + (place > 0.5 ? -5 : 5), area.bottom - 7, place > 0.5 ? "end" : "start", mark.text, "note");
}

std::string legend_item(const std::string& text, std::size_t look, const std::string& swatch) {
  const std::string n = std::to_string(look), name = html_text(text, 60);
  return "<li><svg class=\"swatch\" viewBox=\"0 0 34 12\" role=\"img\" aria-label=\"" + name + "\"><title>" + name + "</title><g class=\"c" + n + " d" + n + "\">" + swatch + "</g></svg>" + name +
         "</li>\n";
}

std::string legend_list(const std::vector<std::string>& items) {
  if (items.size() < 2) return "";
  std::string out = "<ul class=\"legend\">\n";
  for (const std::string& item : items) out += item;
  return out + "</ul>\n";
}

}  // namespace

std::vector<CurvePoint> thin_curve(const Curve& curve, double low, double high, std::size_t columns) {
  DETR_CHECK(curve.x.size() == curve.y.size(), "thin_curve: ", curve.name, " has ", curve.x.size(), " x but ", curve.y.size(), " y");
  DETR_CHECK(columns > 0, "thin_curve: wanted at least one column");
  std::vector<std::size_t> order(curve.x.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::erase_if(order, [&](std::size_t i) { return !plottable(curve.x[i]); });
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return curve.x[a] < curve.x[b]; });

  struct Kept {
    double x, y;
    std::size_t piece;
  };
  std::vector<CurvePoint> points;
  std::optional<Kept> least, greatest;   // of the column in hand
  std::size_t column = 0, piece = 1, drawn_piece = 0;
  const auto keep = [&](const Kept& point) {
    points.push_back({point.x, point.y, point.piece != drawn_piece});
    drawn_piece = point.piece;
  };
  const auto end_column = [&] {
    if (!least) return;
    const bool one = least->x == greatest->x && least->y == greatest->y;
    const bool least_first = std::tie(least->x, least->piece) <= std::tie(greatest->x, greatest->piece);
    keep(least_first ? *least : *greatest);
    if (!one) keep(least_first ? *greatest : *least);
    least.reset();
    greatest.reset();
  };
  for (const std::size_t i : order) {
    if (!plottable(curve.y[i])) {
      ++piece;
      continue;
    }
    const double share = high > low ? (curve.x[i] - low) / (high - low) : 0;
    const auto at = static_cast<std::size_t>(std::clamp(share * static_cast<double>(columns), 0.0, static_cast<double>(columns - 1)));
    if (at != column) end_column();
    column = at;
    const Kept point{curve.x[i], curve.y[i], piece};
    if (!least || point.y < least->y) least = point;
    if (!greatest || point.y > greatest->y) greatest = point;
  }
  end_column();
  return points;
}

std::string line_chart(const LineChart& chart) {
  DETR_CHECK(chart.curves.size() <= kMaxCurves, "line_chart: ", chart.title, ": ", chart.curves.size(), " curves, at most ", kMaxCurves, " can be told apart");
  for (const Curve& curve : chart.curves) DETR_CHECK(curve.look.value_or(0) < kMaxCurves, "line_chart: ", chart.title, ": ", curve.name, ": no look ", curve.look.value_or(0));
  const double width = chart.wide ? kWideWidth : kHalfWidth;
  const PlotArea area{54, 30, width - 16, kHeight - 44};
  std::string out = svg_begin(width, kHeight, chart.title);
  const std::optional<Range> x_range = range_of(chart.curves, false), y_range = range_of(chart.curves, true);
  if (!x_range) return out + svg_text(width / 2, kHeight / 2, "middle", "no data", "note") + "</svg>\n";
  const Range ends = chart.x_range.value_or(*x_range);
  const Axis x = linear_axis(ends.first, ends.second, chart.wide ? 10 : 6, chart.x_whole), y = y_axis(chart, *y_range);
  out += draw_left_axis(area, y, chart.y_label) + draw_bottom_axis(area, x, chart.x_label, false);
  for (const ChartMark& mark : chart.marks) out += draw_mark(mark, area, x);
  for (const bool faint : {true, false}) {   // faint ones lie behind
    for (std::size_t i = 0; i < chart.curves.size(); ++i) {
      if (chart.curves[i].faint == faint) out += draw_curve(chart.curves[i], chart.curves[i].look.value_or(i), area, x, y);
    }
  }
  return out + "</svg>\n";
}

std::string curve_legend(const std::vector<Curve>& curves) {
  std::vector<std::string> items;
  for (std::size_t i = 0; i < curves.size(); ++i) {
    const bool drawn = range_of({curves[i]}, true).has_value();
    if (drawn && !curves[i].faint) items.push_back(legend_item(curves[i].name, curves[i].look.value_or(i), "<path class=\"curve\" d=\"M1 6H33\"/>"));
  }
  return legend_list(items);
}

std::string bar_legend(const std::vector<std::string>& names) {
  std::vector<std::string> items;
  for (std::size_t i = 0; i < names.size(); ++i) items.push_back(legend_item(names[i], i, "<rect class=\"bar\" x=\"6\" y=\"1\" width=\"22\" height=\"10\"/>"));
  return legend_list(items);
}

}  // namespace detr::train

#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace detr::train {

constexpr std::size_t kMaxCurvePoints = 2000;   ///< drawn for one curve
constexpr std::size_t kMaxCurves = 8;           ///< of a chart: as many pairs of colour and dash pattern as readers tell apart

/// Values over something. Where y is not finite (or beyond 1e30) the curve has a gap.
struct Curve {
  std::string name;
  std::vector<double> x, y;   ///< of one length; x in any order
  bool faint = false;         ///< the noisy measurement behind a mean: thin, pale, without dashes, not in the legend
  std::optional<std::size_t> look = {};   ///< which colour and dash pattern, below kMaxCurves; else its place among the curves
};

/// A point of a thinned curve; `gap`: no line leads to it.
struct CurvePoint {
  double x = 0, y = 0;
  bool gap = false;
};

/// The points to draw of a curve: those with the least and the greatest y of each of `columns` equal parts of [low, high], in order of
/// x. At most 2 x columns.
std::vector<CurvePoint> thin_curve(const Curve& curve, double low, double high, std::size_t columns);

/// A dotted line at one x, with a word.
struct ChartMark {
  double x = 0;
  std::string text;
};

using Range = std::pair<double, double>;

struct LineChart {
  std::string title;               ///< shown on hover and read out
  std::string x_label, y_label;    ///< with units: "memory (GiB)"
  std::vector<Curve> curves;       ///< at most kMaxCurves
  std::vector<ChartMark> marks;
  bool x_whole = true;             ///< steps, epochs
  bool y_from_zero = true;
  bool y_may_be_log = false;       ///< logarithmic where all values are positive and span a factor over 50
  std::optional<Range> x_range = {}, y_range = {};   ///< fixed ends; else those of the data
  bool wide = false;               ///< over the whole page rather than half of it
};

/// The chart as one <svg> element: axes with marks, curves that differ in colour and dash pattern, a <title> in each. A chart without
/// a point that can be drawn says "no data".
std::string line_chart(const LineChart& chart);

struct BarSeries {
  std::string name;
  std::vector<double> values;      ///< one a label; what is not finite has no bar
};

struct BarChart {
  std::string title, label_axis, value_axis;
  std::vector<std::string> labels;
  std::vector<BarSeries> series;   ///< side by side; or one in the other, widest first, where `nested`
  bool horizontal = false, nested = false, wide = false;
  int decimals = 0;                ///< of the values in titles and behind bars
  std::optional<double> maximum = {};   ///< end of the value axis
};

std::string bar_chart(const BarChart& chart);

/// A square matrix of counts, rows shaded by their share of the row's sum.
struct MatrixChart {
  std::string title, row_axis, column_axis;
  std::vector<std::string> labels;       ///< of rows and columns
  std::vector<std::int64_t> counts;      ///< row-major
};

std::string matrix_chart(const MatrixChart& chart);

/// The names of curves or bars with their looks, as an HTML list, faint ones and those without a value left out; empty for fewer than two.
std::string curve_legend(const std::vector<Curve>& curves);
std::string bar_legend(const std::vector<std::string>& names);

}  // namespace detr::train

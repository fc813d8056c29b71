#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace detr::train {

/// One axis of a chart: where it begins and ends, and where it is marked.
struct Axis {
  double low = 0, high = 1;           ///< of the data's own units
  bool logarithmic = false;
  int exponent = 0;                   ///< the marks show value / 10^exponent; the axis' label has to say so
  std::vector<double> ticks;          ///< within [low, high], ascending
  std::vector<std::string> labels;    ///< one a tick

  /// Where a value lies between low (0) and high (1).
  double place(double value) const;
};

/// An axis from about `low` to `high` (finite, in any order; equal ends are moved apart) with about `count` marks at 1, 2 or 5 times a
/// power of ten. `whole`: marks at whole numbers alone, and the ends are kept, since steps and epochs begin where they begin.
Axis linear_axis(double low, double high, int count, bool whole = false);

/// A logarithmic axis for 0 < low <= high.
Axis log_axis(double low, double high);

/// " (×10⁻⁴)" for exponent -4, empty for 0.
std::string exponent_text(int exponent);

/// The box of a chart in which data is drawn, in units of the SVG's viewBox; y grows downwards.
struct PlotArea {
  double left = 0, top = 0, right = 0, bottom = 0;
  double width() const { return right - left; }
  double height() const { return bottom - top; }
};

/// A length or place with one decimal at most.
std::string px(double value);

/// Path commands: to a point, and from there to an x or a y.
std::string move_to(double x, double y);
std::string line_to_x(double x);
std::string line_to_y(double y);

/// A <text> element; `anchor` is start, middle or end, `style` a class or empty, `extra` further attributes.
std::string svg_text(double x, double y, std::string_view anchor, std::string_view text, std::string_view style = "", const std::string& extra = "");

/// `<svg ...><title>...</title>`, to be closed by the caller.
std::string svg_begin(double width, double height, std::string_view title);

/// Grid lines, marks and labels of an axis along the bottom or the left of the area, with its name.
std::string draw_bottom_axis(const PlotArea& area, const Axis& axis, std::string_view name, bool grid);
std::string draw_left_axis(const PlotArea& area, const Axis& axis, std::string_view name);

}  // namespace detr::train

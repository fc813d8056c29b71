#include "train/svg_axis.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

#include "runtime/error.h"
#include "train/html_text.h"

namespace detr::train {
namespace {

double nice_step(double span, int count) {
  const double raw = span / count;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  const double lead = raw / power;
  return power * (lead <= 1.0001 ? 1 : lead <= 2.0001 ? 2 : lead <= 5.0001 ? 5 : 10);
}

}  // namespace

double Axis::place(double value) const {
  if (logarithmic) return (std::log10(value) - std::log10(low)) / (std::log10(high) - std::log10(low));
  return (value - low) / (high - low);
}

Axis linear_axis(double low, double high, int count, bool whole) {
  Axis axis;
  std::tie(low, high) = std::minmax({low, high});
  if (!(high - low > 1e-12 * std::max(std::abs(low), std::abs(high)))) {   // one value, or so near that rounding would draw it
    const double reach = whole ? 1 : low == 0 ? 1 : 0.1 * std::abs(low);
    low -= reach;
    high += reach;
  }
  double step = nice_step(high - low, count);
  if (whole) step = std::max(step, 1.0);
  const double first = whole ? std::ceil(low / step - 1e-9) : std::floor(low / step + 1e-9);
  const double last = whole ? std::floor(high / step + 1e-9) : std::ceil(high / step - 1e-9);
  axis.low = whole ? low : first * step;
  axis.high = whole ? high : last * step;
  const double reach = std::max(std::abs(axis.low), std::abs(axis.high));
  if (!whole && (reach >= 1e5 || reach < 1e-2)) axis.exponent = static_cast<int>(std::floor(std::log10(reach)));
  const double unit = std::pow(10.0, axis.exponent);
  const int decimals = std::clamp(static_cast<int>(std::ceil(-std::log10(step / unit) - 1e-9)), 0, 12);
  for (double i = first; i <= last + 0.5; ++i) {
    axis.ticks.push_back(i * step);
    axis.labels.push_back(whole ? count_text(std::llround(i * step)) : fixed_text(i * step / unit, decimals));
  }
  return axis;
}

Axis log_axis(double low, double high) {
  Axis axis;
  axis.logarithmic = true;
  const double decades = std::log10(high / low);
  const std::vector<double> leads = decades > 4 ? std::vector<double>{1} : decades > 1.5 ? std::vector<double>{1, 3} : std::vector<double>{1, 2, 5};
  const int first = static_cast<int>(std::floor(std::log10(low))), last = static_cast<int>(std::floor(std::log10(high)));
  std::vector<double> marks;
  for (int e = first; e <= last + 1; ++e) {
    for (const double lead : leads) marks.push_back(lead * std::pow(10.0, e));
  }
  const auto from = std::prev(std::upper_bound(marks.begin(), marks.end(), low * (1 + 1e-9)));
  auto to = std::lower_bound(marks.begin(), marks.end(), high * (1 - 1e-9));
  if (to == from) ++to;
  axis.low = *from;
  axis.high = *to;
  const std::ptrdiff_t stride = std::max<std::ptrdiff_t>(1, (to - from + 1) / 8);
  for (auto mark = from; mark <= to; ++mark) {
    if ((mark - from) % stride != 0) continue;
    axis.ticks.push_back(*mark);
    const double size = std::abs(std::log10(*mark));
    axis.labels.push_back(size <= 4 ? fixed_text(*mark, std::max(0, -static_cast<int>(std::floor(std::log10(*mark) + 1e-9)))) : short_text(*mark, 2));
  }
  return axis;
}

std::string exponent_text(int exponent) {
  if (exponent == 0) return "";
  constexpr std::array<const char*, 10> digits = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string text = exponent < 0 ? " (×10⁻" : " (×10";
  for (const char c : std::to_string(std::abs(exponent))) text += digits[static_cast<std::size_t>(c - '0')];
  return text + ")";
}

std::string px(double value) {
  std::string text = fixed_text(value, 1);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text;
}

std::string move_to(double x, double y) { return concat('M', px(x), ' ', px(y)); }
std::string line_to_x(double x) { return concat('H', px(x)); }
std::string line_to_y(double y) { return concat('V', px(y)); }

std::string svg_text(double x, double y, std::string_view anchor, std::string_view text, std::string_view style, const std::string& extra) {
  std::string out = "<text x=\"" + px(x) + "\" y=\"" + px(y) + "\" text-anchor=\"" + std::string(anchor) + "\"";
  if (!style.empty()) out += " class=\"" + std::string(style) + "\"";
  return out + extra + ">" + html_text(text) + "</text>\n";
}

std::string svg_begin(double width, double height, std::string_view title) {
  const std::string name = html_text(title, 200);
  const std::string least = width > 640 ? ";min-width:640px" : "";   // on a small screen it scrolls rather than becoming illegible
  return "<svg viewBox=\"0 0 " + px(width) + " " + px(height) + "\" style=\"max-width:" + px(width) + "px" + least + "\" role=\"img\" aria-label=\"" + name + "\">\n<title>" + name + "</title>\n";
}

std::string draw_bottom_axis(const PlotArea& area, const Axis& axis, std::string_view name, bool grid) {
  std::string lines, labels;
  for (std::size_t i = 0; i < axis.ticks.size(); ++i) {
    const double x = area.left + axis.place(axis.ticks[i]) * area.width();
    lines += move_to(x, area.bottom) + line_to_y(grid ? area.top : area.bottom + 4);
    labels += svg_text(x, area.bottom + 17, "middle", axis.labels[i]);
  }
  std::string out = "<path class=\"" + std::string(grid ? "grid" : "axis") + "\" d=\"" + lines + "\"/>\n";
  out += "<path class=\"axis\" d=\"" + move_to(area.left, area.bottom) + line_to_x(area.right) + "\"/>\n" + labels;
  return out + svg_text((area.left + area.right) / 2, area.bottom + 35, "middle", std::string(name) + exponent_text(axis.exponent), "name");
}

std::string draw_left_axis(const PlotArea& area, const Axis& axis, std::string_view name) {
  std::string lines, labels;
  for (std::size_t i = 0; i < axis.ticks.size(); ++i) {
    const double y = area.bottom - axis.place(axis.ticks[i]) * area.height();
    lines += move_to(area.left, y) + line_to_x(area.right);
    labels += svg_text(area.left - 7, y + 4, "end", axis.labels[i]);
  }
  return "<path class=\"grid\" d=\"" + lines + "\"/>\n" + labels + svg_text(4, area.top - 12, "start", std::string(name) + exponent_text(axis.exponent), "name");
}

}  // namespace detr::train

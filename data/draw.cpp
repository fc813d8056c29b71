#include "data/draw.h"

#include <algorithm>
#include <cmath>

#include "data/font.h"

namespace detr::data {
namespace {

using Colour = std::array<std::uint8_t, 3>;

constexpr std::int64_t kHues = 20;
constexpr std::int64_t kCell = kGlyphWidth + 1;           // font pixels from one character to the next
constexpr std::int64_t kStripHeight = kGlyphHeight + 2;   // font pixels, one more above and below
constexpr std::int64_t kPadding = 2;                      // font pixels left of the text; its spacing serves on the right
constexpr std::int64_t kDashWidths = 3;                   // a dash is so many outline widths long, and so is a gap

/// A rectangle of whole pixels, right and bottom exclusive.
struct Rect {
  std::int64_t left = 0, top = 0, right = 0, bottom = 0;
};

void set_pixel(Image& image, std::int64_t x, std::int64_t y, const Colour& colour) {
  std::copy(colour.begin(), colour.end(), image.at(x, y));
}

/// Fills what of a rectangle lies in the picture.
void fill(Image& image, const Rect& rect, const Colour& colour) {
  for (std::int64_t y = std::max<std::int64_t>(rect.top, 0); y < std::min(rect.bottom, image.height); ++y) {
    for (std::int64_t x = std::max<std::int64_t>(rect.left, 0); x < std::min(rect.right, image.width); ++x) {
      set_pixel(image, x, y, colour);
    }
  }
}

/// WCAG 2.1, relative luminance.
double luminance(const Colour& colour) {
  constexpr std::array<double, 3> kShare = {0.2126, 0.7152, 0.0722};
  double sum = 0;
  for (int c = 0; c < 3; ++c) {
    const double value = colour[c] / 255.0;
    sum += kShare[c] * (value <= 0.04045 ? value / 12.92 : std::pow((value + 0.055) / 1.055, 2.4));
  }
  return sum;
}

Colour text_colour(const Colour& background) {
  const double lightness = luminance(background) + 0.05;
  return lightness / 0.05 >= 1.05 / lightness ? Colour{0, 0, 0} : Colour{255, 255, 255};
}

/// The part of a box that lies in the picture, outwards to whole pixels and at least one; false if there is none.
bool visible_part(const Image& image, const std::array<double, 4>& xyxy_px, Rect& rect) {
  if (!std::all_of(xyxy_px.begin(), xyxy_px.end(), [](double v) { return std::isfinite(v); })) return false;
  const double width = static_cast<double>(image.width), height = static_cast<double>(image.height);
  const auto [left, top, right, bottom] = xyxy_px;
  if (!(left < width && top < height && right >= 0 && bottom >= 0 && left <= right && top <= bottom)) return false;
  rect.left = static_cast<std::int64_t>(std::floor(std::max(left, 0.0)));
  rect.top = static_cast<std::int64_t>(std::floor(std::max(top, 0.0)));
  rect.right = std::max(static_cast<std::int64_t>(std::ceil(std::min(right, width))), rect.left + 1);
  rect.bottom = std::max(static_cast<std::int64_t>(std::ceil(std::min(bottom, height))), rect.top + 1);
  return true;
}

void draw_outline(Image& image, const Rect& rect, std::int64_t line_width, bool dashed, const Colour& colour) {
  const std::int64_t dash = kDashWidths * line_width;
  for (std::int64_t y = rect.top; y < rect.bottom; ++y) {
    const bool in_row = y < rect.top + line_width || y >= rect.bottom - line_width;
    for (std::int64_t x = rect.left; x < rect.right; ++x) {
      const bool in_column = x < rect.left + line_width || x >= rect.right - line_width;
      if (!in_row && !in_column) {
        x = std::max(x, rect.right - line_width - 1);   // on to the right side
        continue;
      }
      const std::int64_t along = in_row ? x - rect.left : y - rect.top;
      if (!dashed || along / dash % 2 == 0) set_pixel(image, x, y, colour);
    }
  }
}

void draw_text(Image& image, const std::u32string& codes, std::int64_t left, std::int64_t top, std::int64_t scale,
               const Colour& colour) {
  for (const char32_t code : codes) {
    const Glyph glyph = glyph_of(code);
    for (std::int64_t y = 0; y < kGlyphHeight; ++y) {
      for (std::int64_t x = 0; x < kGlyphWidth; ++x) {
        if ((glyph[y] >> (kGlyphWidth - 1 - x) & 1) == 0) continue;
        fill(image, {left + x * scale, top + y * scale, left + (x + 1) * scale, top + (y + 1) * scale}, colour);
      }
    }
    left += kCell * scale;
  }
}

void draw_label(Image& image, const Rect& box, const std::string& text, std::int64_t scale, const Colour& colour) {
  std::u32string codes = decode_utf8(text);
  const auto width = [&] { return (static_cast<std::int64_t>(codes.size()) * kCell + kPadding) * scale; };
  while (scale > 1 && (width() > image.width || kStripHeight * scale > image.height)) --scale;
  while (codes.size() > 1 && width() > image.width) codes.pop_back();
  const std::int64_t height = kStripHeight * scale;
  const std::int64_t left = std::max<std::int64_t>(std::min(box.left, image.width - width()), 0);
  const std::int64_t above = box.top - height;
  const std::int64_t top = above >= 0 ? above : std::max<std::int64_t>(std::min(box.top, image.height - height), 0);
  fill(image, {left, top, left + width(), top + height}, colour);
  draw_text(image, codes, left + kPadding * scale, top + scale, scale, text_colour(colour));
}

}  // namespace

std::array<std::uint8_t, 3> class_colour(std::int64_t label) {
  // Seven steps of 18 degrees from one class to the next: 7 and 20 share no factor, so all twenty hues are reached.
  const std::int64_t hue = ((label % kHues + kHues) % kHues) * 7 % kHues;
  constexpr double kValue = 255, kSaturation = 0.85;
  const double sextant = static_cast<double>(hue) * 6.0 / kHues;
  Colour colour;
  for (int c = 0; c < 3; ++c) {
    const double k = std::fmod(5.0 - 2.0 * c + sextant, 6.0);   // HSV to RGB: 5, 3, 1 for red, green, blue
    const double drop = std::clamp(std::min(k, 4.0 - k), 0.0, 1.0);
    colour[c] = static_cast<std::uint8_t>(std::lround(kValue * (1.0 - kSaturation * drop)));
  }
  return colour;
}

void draw_boxes(Image& image, std::span<const DrawnBox> boxes) {
  if (image.rgb.empty()) return;
  const double longer = static_cast<double>(std::max(image.width, image.height));
  const std::int64_t line_width = std::max<std::int64_t>(2, std::lround(longer / 300.0));
  const std::int64_t scale = std::max<std::int64_t>(1, std::lround(longer / 500.0));
  for (const DrawnBox& box : boxes) {
    Rect rect;
    if (!visible_part(image, box.xyxy_px, rect)) continue;
    const Colour colour = class_colour(box.label);
    draw_outline(image, rect, line_width, box.dashed, colour);
    if (!box.text.empty()) draw_label(image, rect, box.text, scale, colour);
  }
}

}  // namespace detr::data

#include "data/synth_draw.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

namespace detr::data::synth {
namespace {

constexpr std::array<const char*, kKinds> kKindNames = {"circle",  "square", "triangle", "cross",   "ring",
                                                        "diamond", "star",   "arrow",    "hexagon", "crescent"};
constexpr std::array<const char*, kPatterns> kPatternNames = {"",          "striped ",  "barred ", "checkered ",
                                                              "diagonal ", "halved ", "dotted ", "cored "};

bool in_star(double u, double v) {
  // One of ten mirrored wedges: between the tip at distance 1 and the notch at distance kNotch, half a wedge away.
  constexpr double kNotch = 0.42, kWedge = std::numbers::pi / 5;
  const double angle = std::atan2(u, -v);   // from the tip on top
  const double folded = std::abs(std::remainder(angle, 2 * kWedge)), radius = std::hypot(u, v);
  const double x = radius * std::cos(folded), y = radius * std::sin(folded);
  const double edge_x = kNotch * std::cos(kWedge) - 1, edge_y = kNotch * std::sin(kWedge);
  return edge_x * y - edge_y * (x - 1) >= 0;
}

/// Whether a point of the square [-1, 1] x [-1, 1] (v down) lies in the outline.
bool inside(std::int64_t kind, double u, double v) {
  const double a = std::abs(u), b = std::abs(v), r2 = u * u + v * v;
  if (a > 1 || b > 1) return false;
  switch (kind) {
    case 0: return r2 <= 1;
    case 1: return true;
    case 2: return a <= (v + 1) / 2;
    case 3: return a <= 0.33 || b <= 0.33;
    case 4: return r2 <= 1 && r2 >= 0.3;
    case 5: return a + b <= 1;
    case 6: return in_star(u, v);
    case 7: return u < 0 ? b <= 0.35 : b <= 1 - u;
    case 8: return a <= 1 - b / 2;
    default: return r2 <= 1 && (u - 0.45) * (u - 0.45) + v * v > 0.5;
  }
}

/// Whether a point of the outline has the second colour.
bool is_second(std::int64_t pattern, double u, double v) {
  const auto band = [](double x) { return (static_cast<int>(std::floor(x * 3 + 6)) & 1) != 0; };   // six bands across a shape
  switch (pattern) {
    case 0: return false;
    case 1: return band(v);
    case 2: return band(u);
    case 3: return band(u) != band(v);
    case 4: return band((u + v) * 0.7);
    case 5: return v > 0;
    case 6: return std::hypot(std::remainder(u, 0.6), std::remainder(v, 0.6)) < 0.18;
    default: return u * u + v * v < 0.28;
  }
}

std::uint8_t grey_level(double value) { return static_cast<std::uint8_t>(std::clamp(std::lround(value), 0L, 255L)); }

double distance(const Colour& a, const Colour& b) { return std::abs(a[0] - b[0]) + std::abs(a[1] - b[1]) + std::abs(a[2] - b[2]); }

}  // namespace

std::string shape_name(std::int64_t label) {
  return std::string(kPatternNames[static_cast<std::size_t>(label / kKinds)]) + kKindNames[static_cast<std::size_t>(label % kKinds)];
}

Image ground(RandomKey key, std::int64_t width, std::int64_t height, const Colour& mean) {
  constexpr std::int64_t kCell = 24;          // pixels between the knots of the texture
  constexpr double kAmplitude = 32;           // grey levels
  const std::int64_t columns = width / kCell + 2, rows = height / kCell + 2;
  std::vector<double> knots(static_cast<std::size_t>(columns * rows * 3));
  for (std::size_t i = 0; i < knots.size(); ++i) knots[i] = mean[i % 3] + kAmplitude * (2 * uniform(key, i) - 1);
  Image image(width, height);
  for (std::int64_t y = 0; y < height; ++y)
    for (std::int64_t x = 0; x < width; ++x) {
      const double fx = static_cast<double>(x % kCell) / kCell, fy = static_cast<double>(y % kCell) / kCell;
      const double* top = &knots[static_cast<std::size_t>((y / kCell * columns + x / kCell) * 3)];
      const double* bottom = top + columns * 3;
      for (int c = 0; c < 3; ++c) {
        const double upper = top[c] + fx * (top[c + 3] - top[c]), lower = bottom[c] + fx * (bottom[c + 3] - bottom[c]);
        image.at(x, y)[c] = grey_level(upper + fy * (lower - upper));
      }
    }
  return image;
}

Drawn draw(Image& image, const Shape& shape) {
  const double cosine = std::cos(shape.turn), sine = std::sin(shape.turn);
  const double reach_x = shape.half_w * std::abs(cosine) + shape.half_h * std::abs(sine);
  const double reach_y = shape.half_w * std::abs(sine) + shape.half_h * std::abs(cosine);
  const auto first = [](double value) { return std::max<std::int64_t>(0, static_cast<std::int64_t>(std::floor(value))); };
  const std::int64_t x_end = std::min(image.width, static_cast<std::int64_t>(std::ceil(shape.cx + reach_x)));
  const std::int64_t y_end = std::min(image.height, static_cast<std::int64_t>(std::ceil(shape.cy + reach_y)));
  Drawn drawn{image.width, image.height, 0, 0, 0};
  for (std::int64_t y = first(shape.cy - reach_y); y < y_end; ++y)
    for (std::int64_t x = first(shape.cx - reach_x); x < x_end; ++x) {
      const double dx = static_cast<double>(x) + 0.5 - shape.cx, dy = static_cast<double>(y) + 0.5 - shape.cy;
      const double u = (cosine * dx + sine * dy) / shape.half_w, v = (cosine * dy - sine * dx) / shape.half_h;
      if (!inside(shape.label % kKinds, u, v)) continue;
      const Colour& colour = is_second(shape.label / kKinds, u, v) ? shape.second : shape.ink;
      for (std::size_t c = 0; c < 3; ++c) image.at(x, y)[c] = grey_level(colour[c]);
      drawn.x0 = std::min(drawn.x0, x);
      drawn.y0 = std::min(drawn.y0, y);
      drawn.x1 = std::max(drawn.x1, x + 1);
      drawn.y1 = std::max(drawn.y1, y + 1);
      ++drawn.count;
    }
  return drawn;
}

void add_noise(RandomKey key, Image& image, int amplitude) {
  const std::int64_t span = 2 * amplitude + 1;
  std::array<std::uint32_t, 4> words{};
  for (std::size_t i = 0; i < image.rgb.size(); ++i) {
    if (i % 16 == 0) words = philox(key, i / 16);
    const std::int64_t byte = words[i % 16 / 4] >> (8 * (i % 4)) & 0xff;
    image.rgb[i] = grey_level(static_cast<double>(image.rgb[i] + byte * span / 256 - amplitude));
  }
}

Colour contrasting(RandomSequence& random, const Colour& ground) {
  constexpr double kFar = 170;   // of 765; from the middle greys of a ground some corner of the cube is always farther
  Colour colour{};
  do {
    for (double& channel : colour) channel = random.uniform(0, 255);
  } while (distance(colour, ground) < kFar);
  return colour;
}

Colour second_of(const Colour& ink) {
  const bool bright = ink[0] + ink[1] + ink[2] > 1.5 * 255;
  Colour colour{};
  for (std::size_t c = 0; c < 3; ++c) colour[c] = bright ? ink[c] * 0.3 : 255 - (255 - ink[c]) * 0.3;
  return colour;
}

}  // namespace detr::data::synth

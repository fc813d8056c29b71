#include "data/colour.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "runtime/error.h"

namespace detr::data {
namespace {

void check_factor(const char* name, double factor) {
  DETR_CHECK(std::isfinite(factor) && factor >= 0, name, ": factor must be 0 or more, got ", factor);
}

std::uint8_t luma(const std::uint8_t* pixel) {
  return static_cast<std::uint8_t>((pixel[0] * 19595 + pixel[1] * 38470 + pixel[2] * 7471 + 0x8000) >> 16);
}

/// base + factor * (value - base) in f32, cut (not rounded) to 8 bits. The product has a statement of its own, which
/// under -ffp-contract=on keeps it from being fused with the sum.
std::uint8_t blend(int base, int value, float factor) {
  const float change = factor * static_cast<float>(value - base);
  const float sum = static_cast<float>(base) + change;
  return static_cast<std::uint8_t>(std::clamp(sum, 0.0f, 255.0f));
}

void blend_with(Image& image, int base, float factor) {
  std::array<std::uint8_t, 256> table;
  for (int value = 0; value < 256; ++value) table[value] = blend(base, value, factor);
  for (std::uint8_t& value : image.rgb) value = table[value];
}

struct Hsv {
  std::uint8_t h = 0, s = 0, v = 0;
};

/// Smith 1978, "Color Gamut Transform Pairs", with the mix of f32 and f64 that Pillow has, since each step rounds.
Hsv to_hsv(const std::uint8_t* pixel) {
  const int r = pixel[0], g = pixel[1], b = pixel[2];
  const int high = std::max({r, g, b}), low = std::min({r, g, b});
  if (high == low) return {0, 0, static_cast<std::uint8_t>(high)};
  const float range = static_cast<float>(high - low);
  const float saturation = range / static_cast<float>(high);
  const float from_r = static_cast<float>(high - r) / range;
  const float from_g = static_cast<float>(high - g) / range;
  const float from_b = static_cast<float>(high - b) / range;
  float sextant = 0;
  if (r == high) {
    sextant = from_b - from_g;
  } else if (g == high) {
    sextant = static_cast<float>(2.0 + from_r - from_b);
  } else {
    sextant = static_cast<float>(4.0 + from_g - from_r);
  }
  const double turns = sextant / 6.0 + 1.0;   // 5/6 to 11/6: the difference below is exact
  const float hue = static_cast<float>(turns >= 1.0 ? turns - 1.0 : turns);
  return {static_cast<std::uint8_t>(hue * 255.0), static_cast<std::uint8_t>(saturation * 255.0), static_cast<std::uint8_t>(high)};
}

void to_rgb(const Hsv& hsv, std::uint8_t* pixel) {
  const std::uint8_t v = hsv.v;
  if (hsv.s == 0) {
    pixel[0] = pixel[1] = pixel[2] = v;
    return;
  }
  const double turns = static_cast<float>(hsv.h) * 6.0 / 255.0;
  const int sextant = static_cast<int>(turns);                                // 0 to 6
  const float part = static_cast<float>(turns - static_cast<float>(sextant));
  const float saturation = static_cast<float>(hsv.s / 255.0);
  const auto level = [v](double share) { return static_cast<std::uint8_t>(v * share + 0.5); };   // shares are 0 to 1
  const std::uint8_t p = level(1.0 - saturation);
  const std::uint8_t q = level(1.0 - saturation * part);
  const std::uint8_t t = level(1.0 - saturation * (1.0 - part));
  const std::array<std::array<std::uint8_t, 3>, 6> choices = {{{v, t, p}, {q, v, p}, {p, v, t}, {p, q, v}, {t, p, v}, {v, p, q}}};
  std::copy_n(choices[sextant % 6].begin(), 3, pixel);
}

}  // namespace

void adjust_brightness(Image& image, double factor) {
  check_factor("adjust_brightness", factor);
  blend_with(image, 0, static_cast<float>(factor));
}

void adjust_contrast(Image& image, double factor) {
  check_factor("adjust_contrast", factor);
  if (image.rgb.empty()) return;
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < image.rgb.size(); i += 3) sum += luma(&image.rgb[i]);
  const double mean = static_cast<double>(sum) / static_cast<double>(image.width * image.height);
  blend_with(image, static_cast<int>(mean + 0.5), static_cast<float>(factor));
}

void adjust_saturation(Image& image, double factor) {
  check_factor("adjust_saturation", factor);
  const float single = static_cast<float>(factor);
  // The luma of a block first, three times over, so that the blend runs along flat arrays.
  constexpr std::size_t kBlock = 64 * 3;
  std::array<std::uint8_t, kBlock> grey;
  for (std::size_t start = 0; start < image.rgb.size(); start += kBlock) {
    std::uint8_t* block = image.rgb.data() + start;
    const std::size_t size = std::min(kBlock, image.rgb.size() - start);
    for (std::size_t i = 0; i < size; i += 3) grey[i] = grey[i + 1] = grey[i + 2] = luma(block + i);
    for (std::size_t i = 0; i < size; ++i) block[i] = blend(grey[i], block[i], single);
  }
}

void adjust_hue(Image& image, double factor) {
  DETR_CHECK(factor >= -0.5 && factor <= 0.5, "adjust_hue: factor must be -0.5 to 0.5, got ", factor);
  const int steps = static_cast<int>(factor * 255);
  for (std::size_t i = 0; i < image.rgb.size(); i += 3) {
    Hsv hsv = to_hsv(&image.rgb[i]);
    hsv.h = static_cast<std::uint8_t>(hsv.h + steps);
    to_rgb(hsv, &image.rgb[i]);
  }
}

}  // namespace detr::data

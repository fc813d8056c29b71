#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "data/image.h"
#include "runtime/error.h"

namespace detr::data {
namespace {

constexpr int kWeightBits = 32 - 8 - 2;                            // 8 for the pixel, 2 spare for the sum and the sign
constexpr std::int32_t kHalf = std::int32_t{1} << (kWeightBits - 1);

/// For each output position of one axis the input positions it reads and their weights.
struct Weights {
  std::int64_t taps = 0;                  ///< weights kept for each output position; those not used are 0
  std::vector<std::int64_t> first;        ///< first input position; first + taps may lie behind the end only with weights 0
  std::vector<std::int64_t> count;        ///< input positions read
  std::vector<std::int32_t> weight;       ///< (out, taps), in units of 2^-22
};

/// The triangle filter of half width max(1, in / out), sampled at the centres of the input pixels and scaled to a sum of 1. In
/// double and in the order of operations that Pillow has, since the weights are rounded afterwards.
Weights triangle_weights(std::int64_t in, std::int64_t out) {
  const double scale = static_cast<double>(in) / static_cast<double>(out);
  const double support = std::max(scale, 1.0);
  const double inverse_support = 1.0 / support;
  Weights weights;
  weights.taps = static_cast<std::int64_t>(std::ceil(support)) * 2 + 1;
  weights.first.resize(static_cast<std::size_t>(out));
  weights.count.resize(static_cast<std::size_t>(out));
  weights.weight.resize(static_cast<std::size_t>(out * weights.taps));
  std::vector<double> exact(static_cast<std::size_t>(weights.taps));
  for (std::int64_t i = 0; i < out; ++i) {
    const double center = (static_cast<double>(i) + 0.5) * scale;
    const std::int64_t first = std::max<std::int64_t>(static_cast<std::int64_t>(center - support + 0.5), 0);
    const std::int64_t count = std::min(static_cast<std::int64_t>(center + support + 0.5), in) - first;
    double sum = 0;
    for (std::int64_t k = 0; k < count; ++k) {
      const double distance = std::abs((static_cast<double>(k + first) - center + 0.5) * inverse_support);
      exact[k] = distance < 1.0 ? 1.0 - distance : 0.0;
      sum += exact[k];
    }
    for (std::int64_t k = 0; k < count; ++k) {
      const double share = sum != 0 ? exact[k] / sum : exact[k];
      weights.weight[i * weights.taps + k] = static_cast<std::int32_t>(0.5 + share * (std::int32_t{1} << kWeightBits));
    }
    weights.first[i] = first;
    weights.count[i] = count;
  }
  return weights;
}

std::uint8_t to_byte(std::int32_t sum) { return static_cast<std::uint8_t>(std::clamp(sum >> kWeightBits, 0, 255)); }

Image resize_width(const Image& image, std::int64_t width) {
  const Weights weights = triangle_weights(image.width, width);
  Image out(width, image.height);
  for (std::int64_t y = 0; y < image.height; ++y) {
    std::uint8_t* to = out.at(0, y);
    for (std::int64_t x = 0; x < width; ++x, to += 3) {
      const std::uint8_t* from = image.at(weights.first[x], y);
      const std::int32_t* weight = weights.weight.data() + x * weights.taps;
      std::int32_t r = kHalf, g = kHalf, b = kHalf;
      for (std::int64_t k = 0; k < weights.count[x]; ++k, from += 3) {
        r += from[0] * weight[k];
        g += from[1] * weight[k];
        b += from[2] * weight[k];
      }
      to[0] = to_byte(r), to[1] = to_byte(g), to[2] = to_byte(b);
    }
  }
  return out;
}

Image resize_height(const Image& image, std::int64_t height) {
  const Weights weights = triangle_weights(image.height, height);
  Image out(image.width, height);
  const std::int64_t row_bytes = image.width * 3;
  std::vector<std::int32_t> sums(static_cast<std::size_t>(row_bytes));
  for (std::int64_t y = 0; y < height; ++y) {
    std::fill(sums.begin(), sums.end(), kHalf);
    for (std::int64_t k = 0; k < weights.count[y]; ++k) {
      const std::uint8_t* from = image.at(0, weights.first[y] + k);
      const std::int32_t weight = weights.weight[y * weights.taps + k];
      for (std::int64_t i = 0; i < row_bytes; ++i) sums[i] += from[i] * weight;
    }
    std::uint8_t* to = out.at(0, y);
    for (std::int64_t i = 0; i < row_bytes; ++i) to[i] = to_byte(sums[i]);
  }
  return out;
}

}  // namespace

Image resize_bilinear(const Image& image, std::int64_t width, std::int64_t height) {
  DETR_CHECK(image.width >= 1 && image.height >= 1, "resize_bilinear: the picture is empty");
  DETR_CHECK(width >= 1 && height >= 1, "resize_bilinear: width and height must be positive, got ", width, " x ", height);
  if (width == image.width) return height == image.height ? image : resize_height(image, height);
  const Image narrowed = resize_width(image, width);
  return height == image.height ? narrowed : resize_height(narrowed, height);
}

}  // namespace detr::data

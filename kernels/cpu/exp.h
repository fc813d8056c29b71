#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace detr::kernels::cpu {

/// e^x within 2 units in the last place; 0 and infinity beyond the range of f32, NaN for NaN. Free of branches and calls, so
/// that loops over it vectorise. Range reduction by Cody and Waite, x = n ln 2 + r, and the Taylor series of e^r up to r^7 / 7!,
/// whose next term is under 2^-27 for |r| <= ln(2) / 2.
inline float fast_exp(float x) {
  constexpr float kLog2e = 1.44269504F;
  constexpr float kLn2High = 0.693359375F, kLn2Low = -2.12194440e-4F;   // the high part has 9 bits: n times it is exact
  constexpr float kRound = 12582912.0F;                                 // 1.5 * 2^23: adding it rounds to an integer
  // The comparisons are false for NaN, which goes through. Beyond these bounds the result is 0 or infinity all the same.
  x = x < -110.0F ? -110.0F : x;
  x = x > 90.0F ? 90.0F : x;
  const float shifted = x * kLog2e + kRound;
  const std::uint32_t n = std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(kRound);
  const float n_real = shifted - kRound;
  const float r = (x - n_real * kLn2High) - n_real * kLn2Low;
  float p = 1.0F / 5040.0F;
  p = p * r + 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  // 2^n in two factors, since n reaches beyond the exponents of f32 at both ends.
  const std::uint32_t half = static_cast<std::uint32_t>(static_cast<std::int32_t>(n) >> 1);
  const float first = std::bit_cast<float>((half + 127U) << 23U), second = std::bit_cast<float>((n - half + 127U) << 23U);
  return p * first * second;
}
inline double fast_exp(double x) { return std::exp(x); }

/// 1 / (1 + e^-x), exact at +-infinity.
template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + fast_exp(-x));
}

}  // namespace detr::kernels::cpu

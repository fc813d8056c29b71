#pragma once
#include <cmath>
#include <numbers>

#include "kernels/activation_tag.h"
#include "kernels/cpu/exp.h"

namespace detr::kernels::cpu {

/// act(x). NaN goes through all of them.
template <Activation kind, class T>
T activate(T x) {
  if constexpr (kind == Activation::relu) return x < T(0) ? T(0) : x;
  else if constexpr (kind == Activation::silu) return x * sigmoid(x);
  else if constexpr (kind == Activation::gelu) return T(0.5) * x * (T(1) + std::erf(x * static_cast<T>(std::numbers::sqrt2 / 2)));
  else if constexpr (kind == Activation::sigmoid) return sigmoid(x);
  else return x;
}

/// dy act'(x), where `v` is the output y for ReLU and sigmoid and the input x for the others.
template <Activation kind, class T>
T activate_backward(T dy, T v) {
  if constexpr (kind == Activation::relu) {
    return v <= T(0) ? T(0) : dy;
  } else if constexpr (kind == Activation::silu) {
    const T s = sigmoid(v);
    return dy * s * (T(1) + v * (T(1) - s));
  } else if constexpr (kind == Activation::gelu) {
    // Phi(x) + x phi(x), the distribution function and density of the standard normal.
    const T cdf = T(0.5) * (T(1) + std::erf(v * static_cast<T>(std::numbers::sqrt2 / 2)));
    const T density = std::exp(T(-0.5) * v * v) * static_cast<T>(std::numbers::inv_sqrtpi * std::numbers::sqrt2 / 2);
    return dy * (cdf + v * density);
  } else if constexpr (kind == Activation::sigmoid) {
    return dy * v * (T(1) - v);
  } else {
    return dy;
  }
}

}  // namespace detr::kernels::cpu

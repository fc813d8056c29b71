#pragma once
#include "kernels/activation.h"
#include "kernels/cuda/launch.cuh"

// The formulas of kernels/cpu/activation_math.h in float. T is the dtype of the result: where it is bf16, exponential and division are
// the hardware's approximations, whose relative error, under 1e-5, disappears in the rounding.

namespace detr::kernels::cuda {

/// 1 / (1 + e^-x), exact at +-infinity.
template <class T>
__device__ inline float sigmoid(float x) {
  if constexpr (sizeof(T) == 2) return __fdividef(1.0F, 1.0F + __expf(-x));
  else return 1.0F / (1.0F + expf(-x));
}

/// act(x). NaN goes through all of them.
template <Activation kind, class T>
__device__ inline float activate(float x) {
  if constexpr (kind == Activation::relu) return x < 0.0F ? 0.0F : x;
  else if constexpr (kind == Activation::silu) return x * sigmoid<T>(x);
  else if constexpr (kind == Activation::gelu) return 0.5F * x * (1.0F + erff(x * 0.70710678F));
  else if constexpr (kind == Activation::sigmoid) return sigmoid<T>(x);
  else return x;
}

/// dy act'(x), where `v` is the output y for ReLU and sigmoid and the input x for the others.
template <Activation kind, class T>
__device__ inline float activate_backward(float dy, float v) {
  if constexpr (kind == Activation::relu) {
    return v <= 0.0F ? 0.0F : dy;
  } else if constexpr (kind == Activation::silu) {
    const float s = sigmoid<T>(v);
    return dy * s * (1.0F + v * (1.0F - s));
  } else if constexpr (kind == Activation::gelu) {
    const float cdf = 0.5F * (1.0F + erff(v * 0.70710678F)), density = expf(-0.5F * v * v) * 0.39894228F;
    return dy * (cdf + v * density);
  } else if constexpr (kind == Activation::sigmoid) {
    return dy * v * (1.0F - v);
  } else {
    return dy;
  }
}

}  // namespace detr::kernels::cuda

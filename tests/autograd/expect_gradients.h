#pragma once
#include <vector>

#include "autograd/gradient_check.h"
#include "tests/support.h"

namespace detr::test {

/// f64 values, standard normal, a pure function of shape and seed.
inline Tensor normal(const Shape& shape, std::uint64_t seed = 0) {
  Tensor x = host_zeros(shape, DType::f64);
  const RandomKey key = RandomKey(seed).fold(static_cast<std::uint64_t>(shape.numel()));
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<double>()[i] = detr::normal(key, static_cast<std::uint64_t>(i));
  return x;
}
/// f64 values, uniform in [low, high).
inline Tensor uniform(const Shape& shape, double low, double high, std::uint64_t seed = 0) {
  Tensor x = host_zeros(shape, DType::f64);
  const RandomKey key = RandomKey(seed).fold(static_cast<std::uint64_t>(shape.numel()));
  for (std::int64_t i = 0; i < x.numel(); ++i)
    x.data<double>()[i] = low + (high - low) * detr::uniform(key, static_cast<std::uint64_t>(i));
  return x;
}

/// Backward of each f64 input against central differences.
inline void expect_gradients(const Op& op, const std::vector<Tensor>& inputs) {
  const GradientReport report = check_gradients(op, inputs);
  INFO(report.failure);
  CHECK(report.failure.empty());
}

/// All 2^k sets of wanted gradients give the bits of the full run, and nothing else is made.
inline void expect_gradient_subsets(const Op& op, const std::vector<Tensor>& inputs) {
  const std::string failure = check_gradient_subsets(op, inputs);
  INFO(failure);
  CHECK(failure.empty());
}

}  // namespace detr::test

#pragma once
#include <limits>

#include "runtime/random.h"
#include "tests/support.h"

namespace detr::test {

/// Pseudo-random values in [-1, 1), of either dtype.
inline Tensor random(const Shape& shape, DType dtype, std::uint64_t seed) {
  Tensor x = host_zeros(shape, dtype);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const double value = 2 * uniform(RandomKey(seed), static_cast<std::uint64_t>(i)) - 1;
    if (dtype == DType::f32) x.data<float>()[i] = static_cast<float>(value);
    else x.data<double>()[i] = value;
  }
  return x;
}

/// An output in which whatever an op leaves unwritten, or adds to, shows.
inline Tensor poisoned(const Shape& shape, DType dtype) {
  Tensor x = host_zeros(shape, dtype);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    if (dtype == DType::f32) x.data<float>()[i] = std::numeric_limits<float>::quiet_NaN();
    else x.data<double>()[i] = std::numeric_limits<double>::quiet_NaN();
  }
  return x;
}

}  // namespace detr::test

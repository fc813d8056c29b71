#include "models/nn/init.h"

#include <algorithm>
#include <cmath>

#include "runtime/error.h"

namespace detr::models::init {

Init constant(double value) {
  return [value](RandomKey, std::span<double> values) { std::fill(values.begin(), values.end(), value); };
}

Init uniform(double bound) {
  return [bound](RandomKey key, std::span<double> values) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = (2 * detr::uniform(key, i) - 1) * bound;
  };
}

Init fan_in_uniform(std::int64_t fan_in) { return uniform(1 / std::sqrt(static_cast<double>(fan_in))); }

Init xavier_uniform(std::int64_t fan_in, std::int64_t fan_out) {
  return uniform(std::sqrt(6.0 / static_cast<double>(fan_in + fan_out)));
}

void apply(const Parameter& parameter, std::uint64_t seed, Tensor& into) {
  RandomKey key(seed);
  for (const char c : parameter.state().init_name) key = key.fold(static_cast<unsigned char>(c));
  std::vector<double> values(static_cast<std::size_t>(into.numel()));
  parameter.state().init(key, values);
  if (into.dtype() == DType::f64) {
    std::copy(values.begin(), values.end(), into.data<double>());
  } else {
    std::transform(values.begin(), values.end(), into.data<float>(), [](double v) { return static_cast<float>(v); });
  }
}

}  // namespace detr::models::init

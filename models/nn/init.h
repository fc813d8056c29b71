#pragma once
#include <cstdint>

#include "autograd/parameter.h"

namespace detr::models::init {

/// Every element `value`.
Init constant(double value);
/// U(-bound, bound).
Init uniform(double bound);
/// U(-1/sqrt(fan_in), 1/sqrt(fan_in)): the framework's default for convolutions and linear layers, weight and bias alike.
Init fan_in_uniform(std::int64_t fan_in);
/// U(-b, b) with b = sqrt(6 / (fan_in + fan_out)). Glorot and Bengio 2010.
Init xavier_uniform(std::int64_t fan_in, std::int64_t fan_out);

/// Fills a tensor (f32 or f64) with a parameter's initial values; the draws depend on the seed and its init_name alone.
void apply(const Parameter& parameter, std::uint64_t seed, Tensor& into);

}  // namespace detr::models::init

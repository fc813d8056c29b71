#pragma once
#include "autograd/parameter.h"
#include "models/nn/init.h"
#include "tests/support.h"
#include "tests/tiny_model.h"

namespace detr::test {

/// Gives every parameter memory of its own with its initial values, and a zero gradient where it is trained. `noise` adds normal
/// numbers of that size to what is trained, so that layers which start at zero do something.
inline void give_values(const ParameterList& list, std::uint64_t seed, DType dtype, double noise = 0) {
  for (const Parameter& p : list.all()) {
    p.state().value = p.state().exact = host_zeros(p.shape(), dtype);
    models::init::apply(p, seed, p.state().value);
    if (!p.trainable()) continue;
    p.state().grad = host_zeros(p.shape(), dtype);
    p.state().written.clear();
    RandomKey key(seed);
    for (const char c : p.name()) key = key.fold(static_cast<unsigned char>(c));
    for (std::int64_t i = 0; noise > 0 && i < p.shape().numel(); ++i) {
      const double more = noise * normal(key, static_cast<std::uint64_t>(i));
      if (dtype == DType::f64) p.value().data<double>()[i] += more;
      else p.value().data<float>()[i] += static_cast<float>(more);
    }
  }
}

/// Pictures (n, h, w, 3) in [0, 1).
inline Tensor noise_pictures(std::int64_t n, std::int64_t h, std::int64_t w, DType dtype, std::uint64_t seed = 1) {
  Tensor x = host_zeros({n, h, w, 3}, dtype);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const double v = uniform(RandomKey(seed), static_cast<std::uint64_t>(i));
    if (dtype == DType::f64) x.data<double>()[i] = v;
    else x.data<float>()[i] = static_cast<float>(v);
  }
  return x;
}

}  // namespace detr::test

#include "bench/inputs.h"

#include <algorithm>
#include <cmath>

#include "kernels/pointwise.h"
#include "runtime/error.h"

namespace detr::bench {
namespace {

// Odd, so that neither rows nor images repeat.
constexpr std::int64_t kPoolSize = (std::int64_t{1} << 22) - 3;

}  // namespace

RandomPool::RandomPool(const Stream& on, DType type) : stream(on), host(on.device().is_cpu() ? on : Stream::cpu()), dtype(type), host_values(std::make_shared<std::vector<float>>(kPoolSize)) {
  Tensor floats = host_zeros({kPoolSize}, DType::f32), octets = host_zeros({kPoolSize}, DType::u8);
  for (std::int64_t i = 0; i < kPoolSize; ++i) {
    const auto counter = static_cast<std::uint64_t>(i);
    const float value = to_float(to_bf16(static_cast<float>(detr::normal(RandomKey(11), counter))));
    floats.data<float>()[i] = (*host_values)[static_cast<std::size_t>(i)] = value;
    octets.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(random_bits(RandomKey(12), counter));
  }
  wide_values = stream.to_device(floats);
  bytes = stream.to_device(octets);
  values = wide_values;
  if (dtype != DType::f32) {
    values = stream.empty({kPoolSize}, dtype);
    kernels::cast(stream, wide_values, values);
  }
  stream.wait();   // the host's copies go
}

std::int64_t Inputs::next_start() {
  at_ = (at_ * 31 + 1009) % static_cast<std::uint64_t>(kPoolSize);
  return static_cast<std::int64_t>(at_);
}

Tensor Inputs::tiled(const Shape& shape, double sigma, const Tensor& pool) {
  int exponent = 0;
  DETR_CHECK(sigma > 0 && std::frexp(sigma, &exponent) == 0.5, "inputs: sigma must be a power of two, got ", sigma);
  Tensor y = stream().empty(shape, pool.dtype());
  const Tensor flat = y.reshape({y.numel()});
  std::int64_t from = next_start();
  for (std::int64_t to = 0; to < flat.numel(); from = 0) {
    const std::int64_t count = std::min(kPoolSize - from, flat.numel() - to);
    Tensor part = flat.slice(to, to + count);
    stream().copy(pool.slice(from, from + count), part);
    to += count;
  }
  if (sigma == 1) return y;
  Tensor scaled = stream().empty_like(y);
  kernels::scale(stream(), y, sigma, scaled);
  return scaled;
}

Tensor Inputs::host_normal(const Shape& shape, double mean, double sigma) {
  Tensor y = host_zeros(shape, DType::f32);
  auto from = static_cast<std::size_t>(next_start());
  for (float& value : y.span<float>()) {
    value = static_cast<float>(mean + sigma * static_cast<double>((*pool_->host_values)[from]));
    from = from + 1 == pool_->host_values->size() ? 0 : from + 1;
  }
  return y;
}

Tensor Inputs::host_boxes(const Shape& shape) {
  Tensor y = host_zeros(shape, DType::f32);
  for (std::int64_t r = 0; r < y.rows(); ++r) {
    const double w = random_.uniform(0.05, 0.5), h = random_.uniform(0.05, 0.5);
    const double box[] = {random_.uniform(w / 2, 1 - w / 2), random_.uniform(h / 2, 1 - h / 2), w, h};
    for (std::int64_t i = 0; i < 4; ++i) y.data<float>()[r * 4 + i] = static_cast<float>(box[i]);
  }
  return y;
}

Tensor Inputs::host_integers(const Shape& shape, std::int64_t bound) {
  Tensor y = host_zeros(shape, DType::i64);
  for (std::int64_t& value : y.span<std::int64_t>()) value = random_.uniform_int(bound);
  return y;
}

Tensor Inputs::upload(const Tensor& tensor) const {
  if (stream().device().is_cpu()) return tensor;
  const Tensor y = stream().to_device(tensor);
  stream().wait();   // the host's copy may go
  return y;
}

}  // namespace detr::bench

#include "tests/gpu.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "runtime/gpus.h"

namespace detr::test {
namespace {

constexpr std::int64_t kGuardBytes = 256;

}  // namespace

bool cuda_available() {
  const bool available = !list_gpus().empty();
  if (!available && std::getenv("DETR_REQUIRE_GPU")) throw DeviceError("DETR_REQUIRE_GPU is set and there is no CUDA device, or no code for one");
  return available;
}

const Stream& gpu() {
  static const Stream stream = Stream::cuda(0, 2);
  return stream;
}

Tensor rounded(const Tensor& host, DType dtype) {
  const std::vector<double> values = values_of(host);
  Tensor y = host_zeros(host.shape(), DType::f64);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto single = static_cast<float>(values[i]);
    y.data<double>()[i] = static_cast<double>(dtype == DType::bf16 ? to_float(to_bf16(single)) : single);
  }
  return y;
}

Tensor on_gpu(const Tensor& host, DType dtype) {
  if (host.dtype() == DType::i64 || host.dtype() == DType::u8) return gpu().to_device(host);
  const std::vector<double> values = values_of(host);
  Tensor y = host_zeros(host.shape(), dtype);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto single = static_cast<float>(values[i]);
    if (dtype == DType::bf16) y.data<BFloat16>()[i] = to_bf16(single);
    else y.data<float>()[i] = single;
  }
  Tensor result = gpu().to_device(y);
  gpu().wait();   // y goes
  return result;
}

Tensor from_gpu(const Tensor& tensor) {
  const Tensor host = gpu().to_host(tensor);
  if (host.dtype() == DType::i64 || host.dtype() == DType::u8) return host;
  Tensor y = host_zeros(host.shape(), DType::f64);
  for (std::int64_t i = 0; i < host.numel(); ++i) {
    switch (host.dtype()) {
      case DType::bf16: y.data<double>()[i] = static_cast<double>(to_float(host.data<BFloat16>()[i])); break;
      case DType::f32: y.data<double>()[i] = static_cast<double>(host.data<float>()[i]); break;
      default: y.data<double>()[i] = host.data<double>()[i]; break;
    }
  }
  return y;
}

Guarded::Guarded(const Shape& shape, DType dtype) : begin_(kGuardBytes / size_of(dtype)) {
  Tensor host = host_zeros({shape.numel() + 2 * begin_}, dtype);
  std::memset(host.raw(), 0xff, static_cast<std::size_t>(host.bytes()));
  memory_ = gpu().to_device(host);
  gpu().wait();
  tensor = memory_.view(begin_, shape);
}

Tensor Guarded::values() const {
  const Tensor host = gpu().to_host(memory_);
  const auto* bytes = static_cast<const unsigned char*>(host.raw());
  const auto intact = [](const unsigned char* begin, std::int64_t count) { return std::all_of(begin, begin + count, [](unsigned char b) { return b == 0xff; }); };
  CHECK(intact(bytes, kGuardBytes));
  CHECK(intact(bytes + kGuardBytes + tensor.bytes(), kGuardBytes));
  return from_gpu(tensor);
}

void expect_near(const Tensor& got, const Tensor& wanted, double tolerance, double floor) {
  REQUIRE(got.shape() == wanted.shape());
  const std::vector<double> x = values_of(got), y = values_of(wanted);
  double largest = 0;
  for (const double v : y) largest = std::max(largest, std::isfinite(v) ? std::abs(v) : 0);
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]))) continue;
    if (std::abs(x[i] - y[i]) <= tolerance * std::max(std::abs(y[i]), floor * largest)) continue;
    FAIL_CHECK("element " << i << " of " << got.shape() << ": got " << x[i] << ", wanted " << y[i] << ", largest " << largest);
    return;
  }
}

}  // namespace detr::test

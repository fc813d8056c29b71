#include "kernels/step_report.h"

#include <algorithm>
#include <cmath>

#include "runtime/host_value.h"

namespace detr::kernels::cpu {

void collect(const Stream&, std::span<const Tensor> inputs, Tensor& y) {
  double* to = y.data<double>();
  for (const Tensor& input : inputs) {
    for (std::int64_t i = 0; i < input.numel(); ++i)
      *to++ = input.dtype() == DType::i64 ? static_cast<double>(input.data<std::int64_t>()[i]) : host_value(input, i);
  }
}

void first_not_finite(const Stream&, std::span<const Tensor> inputs, Tensor& first) {
  const auto index_in = [](auto values, const auto& finite) {
    const auto found = std::find_if_not(values.begin(), values.end(), finite);
    return found == values.end() ? std::int64_t{-1} : static_cast<std::int64_t>(found - values.begin());
  };
  const auto plain = [](auto v) { return std::isfinite(v); };
  std::int64_t* to = first.data<std::int64_t>();
  for (const Tensor& input : inputs) {
    switch (input.dtype()) {
      case DType::f64: *to++ = index_in(input.span<double>(), plain); break;
      case DType::bf16: *to++ = index_in(input.span<BFloat16>(), [](BFloat16 v) { return std::isfinite(to_float(v)); }); break;
      default: *to++ = index_in(input.span<float>(), plain); break;
    }
  }
}

}  // namespace detr::kernels::cpu

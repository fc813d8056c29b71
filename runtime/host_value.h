#pragma once
#include "runtime/tensor.h"

namespace detr {

/// Element i, row-major, of a floating tensor on the CPU. Throws InvalidArgument for other dtypes.
inline double host_value(const Tensor& tensor, std::int64_t i) {
  if (tensor.dtype() == DType::bf16) return static_cast<double>(to_float(tensor.data<BFloat16>()[i]));
  return tensor.dtype() == DType::f64 ? tensor.data<double>()[i] : static_cast<double>(tensor.data<float>()[i]);
}

}  // namespace detr

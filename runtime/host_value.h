#pragma once
#include "runtime/tensor.h"

namespace detr {

/// Element i, row-major, of an f32 or f64 tensor on the CPU. Throws InvalidArgument for other dtypes.
inline double host_value(const Tensor& tensor, std::int64_t i) {
  return tensor.dtype() == DType::f64 ? tensor.data<double>()[i] : static_cast<double>(tensor.data<float>()[i]);
}

}  // namespace detr

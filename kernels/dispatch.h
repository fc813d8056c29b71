#pragma once
#include "runtime/build.h"
#include "runtime/error.h"
#include "runtime/stream.h"

// Note [Element types]
// The contracts speak of x's dtype: f32 or f64 on the CPU, f32 or bf16 on CUDA (whose arithmetic is in f32 for both). "wide" is
// wide_dtype(x): f32 where x is bf16, else x's own. Weights and biases of matrix products and convolutions have x's dtype, those of
// norms are wide; so are statistics, boxes, losses and all gradients of parameters.

/// Calls the version of `op` for the device, or none on a planning stream. The only place that asks which backend runs.
#define DETR_DISPATCH(device, op, stream, ...)                                             \
  do {                                                                                     \
    if ((stream).is_planning()) break;                                                     \
    if ((device).is_cpu()) cpu::op(stream, __VA_ARGS__);                                   \
    else if constexpr (::detr::kHasCuda) cuda::op(stream, __VA_ARGS__);                    \
    else throw ::detr::DeviceError(#op, ": this build has no code for device ", (device)); \
  } while (false)

namespace detr::kernels {

/// Passed to the lambda of dispatch_float: `typename decltype(tag)::type` is the element type.
template <class T>
struct TypeTag {
  using type = T;
};

/// Calls fn(TypeTag<T>{}) with T float or double. Throws InvalidArgument for any other dtype.
template <class F>
void dispatch_float(const char* op, DType dtype, F&& fn) {
  switch (dtype) {
    case DType::f32: fn(TypeTag<float>{}); break;
    case DType::f64: fn(TypeTag<double>{}); break;
    default: throw InvalidArgument(op, ": the CPU computes in f32 and f64, got ", dtype);
  }
}

}  // namespace detr::kernels

#pragma once
#include <span>

#include "runtime/stream.h"

namespace detr::kernels {

/// What a step tells the host, gathered on the device so that it is one copy.

/// y (sum of sizes) f64 out: the elements of all inputs, one input after the other. Inputs of dtype f32, f64 or i64, any shape, up
/// to 2^53 in size. Throws InvalidArgument if a dtype, device or the size of y disagrees.
void collect(const Stream& stream, std::span<const Tensor> inputs, Tensor& y);

/// first (inputs) i64 out: index of the first element of each input that is NaN or infinite, -1 where all are finite. Floating inputs
/// of any dtype and shape.
void first_not_finite(const Stream& stream, std::span<const Tensor> inputs, Tensor& first);

namespace cpu {
extern decltype(kernels::collect) collect;
extern decltype(kernels::first_not_finite) first_not_finite;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::collect) collect;
extern decltype(kernels::first_not_finite) first_not_finite;
}  // namespace cuda
}  // namespace detr::kernels

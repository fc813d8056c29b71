#pragma once
#include "runtime/stream.h"

namespace detr::kernels::cuda {

/// A matrix operand in row-major memory; `transposed` says that the product takes its transpose.
struct Operand {
  const void* data = nullptr;
  bool transposed = false;
};

/// c (m, n) = op(a) (m, k) op(b) (k, n) + bias (n), row-major, by cuBLASLt; added to what c holds if `add`.
///
/// a, b  of dtype `type`, f32 or bf16; k >= 1
/// c     of dtype `c_type`, f32 or the type of a and b; bias of that dtype, or null
///
/// Accumulates in f32 without TF32. The algorithm is the first of the library's heuristic for the shape that adds its parts in a
/// fixed order; it is kept, so equal calls give equal bits. Throws DeviceError where there is none.
void gemm(const Stream& stream, DType type, Operand a, Operand b, std::int64_t m, std::int64_t n, std::int64_t k, const void* bias,
          DType c_type, void* c, bool add = false);

}  // namespace detr::kernels::cuda

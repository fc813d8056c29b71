#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "kernels/dispatch.h"
#include "runtime/cuda/stream_state.h"
#include "runtime/cuda/try.h"

namespace detr {

template <>
struct DTypeOf<__nv_bfloat16> {
  static constexpr DType value = DType::bf16;
};

}  // namespace detr

namespace detr::kernels::cuda {

using detr::cuda::native;
using bf16 = __nv_bfloat16;

/// Calls fn(TypeTag<T>{}) with T float or bf16. Throws InvalidArgument for any other dtype. Arithmetic is in float for both.
template <class F>
void dispatch_float(const char* op, DType dtype, F&& fn) {
  switch (dtype) {
    case DType::f32: fn(TypeTag<float>{}); break;
    case DType::bf16: fn(TypeTag<bf16>{}); break;
    default: throw InvalidArgument(op, ": CUDA computes in f32 and bf16, got ", dtype);
  }
}

/// Blocks needed for `count` items, `per_block` each. Throws InvalidArgument beyond what a grid holds.
inline unsigned blocks_for(std::int64_t count, std::int64_t per_block) {
  const std::int64_t blocks = (count + per_block - 1) / per_block;
  DETR_CHECK(blocks <= 0x7fffffff, "a tensor is too large for one launch: ", count, " items");
  return static_cast<unsigned>(blocks);
}

/// Enqueues a kernel; an empty grid is skipped. `shared_bytes` of dynamic shared memory beyond 48 KB need allow_shared() first.
template <class... Parameters, class... Arguments>
void launch(const Stream& stream, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes, Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = native(stream);
  DETR_TRY(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...));
}

/// Lets a kernel use `bytes` of dynamic shared memory.
template <class... Parameters>
void allow_shared(void (*kernel)(Parameters...), std::size_t bytes) {
  if (bytes > 48 * 1024) DETR_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
/// Rounded to nearest, ties to even.
template <class T>
__device__ inline T from_float(float x) {
  if constexpr (sizeof(T) == 2) return __float2bfloat16_rn(x);
  else return x;
}

/// Elements of T in 16 bytes: 4 floats or 8 bf16.
template <class T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

/// kVector<T> neighbouring elements in one access; `place` must be a multiple of 16 bytes.
template <class T>
__device__ inline void load_vector(const T* place, float (&x)[kVector<T>]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(place);
  const T* values = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) x[i] = to_float(values[i]);
}
template <class T>
__device__ inline void store_vector(T* place, const float (&x)[kVector<T>]) {
  uint4 raw;
  T* values = reinterpret_cast<T*>(&raw);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) values[i] = from_float<T>(x[i]);
  *reinterpret_cast<uint4*>(place) = raw;
}

/// Whether an array of T may be read by load_vector in rows of `width` elements.
template <class T>
bool fits_vectors(const void* place, std::int64_t width) {
  return width % kVector<T> == 0 && reinterpret_cast<std::uintptr_t>(place) % 16 == 0;
}

/// Sum over the 32 lanes, the same bits in each.
template <class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffU, x, distance);
  return x;
}

/// Sum over the block's threads in a fixed order, the same bits in each. `scratch` is shared memory for 32 values; ends with the
/// block in step. blockDim.x is a multiple of 32, the block one-dimensional.
template <class T>
__device__ inline T block_sum(T x, T* scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  x = warp_sum(x);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = warp_sum(lane < warps ? scratch[lane] : T(0));
  __syncthreads();
  return x;
}

}  // namespace detr::kernels::cuda

#pragma once
#include <algorithm>

#include "kernels/cuda/launch.cuh"

namespace detr::kernels::cuda {

/// kWidth neighbouring elements, moved in one access of at most 16 bytes.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  static_assert(sizeof(T) * kWidth <= 16);
  T values[kWidth];
};

/// Whether packs may start at `place`.
template <int kWidth, class T>
bool fits_packs(const T* place) {
  return reinterpret_cast<std::uintptr_t>(place) % (sizeof(T) * kWidth) == 0;
}

/// The number of packs that a launch indexes in 32 bits.
inline std::uint32_t index_count(std::int64_t count) {
  DETR_CHECK(count < (std::int64_t{1} << 31), "a tensor is too large for one launch: ", count, " accesses");
  return static_cast<std::uint32_t>(count);
}

constexpr int kMapThreads = 256, kMapPacks = 2;   // a thread has two loads of each input in flight

/// y[i] = f(x[i]) for i in [0, count). One thread: packs p and p + kMapThreads; the first block adds the elements behind the last pack.
template <int kWidth, class F, class From, class To>
__global__ void __launch_bounds__(kMapThreads) map_kernel(std::int64_t count, F f, const From* x, To* y) {
  const auto packs = static_cast<std::uint32_t>(count / kWidth);
  const std::uint32_t first = blockIdx.x * (kMapThreads * kMapPacks) + threadIdx.x;
  Pack<From, kWidth> in[kMapPacks];
#pragma unroll
  for (int k = 0; k < kMapPacks; ++k)
    if (first + k * kMapThreads < packs) in[k] = reinterpret_cast<const Pack<From, kWidth>*>(x)[first + k * kMapThreads];
#pragma unroll
  for (int k = 0; k < kMapPacks; ++k) {
    if (first + k * kMapThreads >= packs) continue;
    Pack<To, kWidth> out;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) out.values[i] = f(in[k].values[i]);
    reinterpret_cast<Pack<To, kWidth>*>(y)[first + k * kMapThreads] = out;
  }
  const std::int64_t last = std::int64_t{packs} * kWidth + threadIdx.x;
  if (kWidth > 1 && blockIdx.x == 0 && last < count) y[last] = f(x[last]);
}

/// y[i] = f(a[i], b[i % (period kWidth)]); a period below the number of packs divides it, and then no element is left over.
template <int kWidth, class F, class T>
__global__ void __launch_bounds__(kMapThreads) map_pair_kernel(std::int64_t count, std::uint32_t period, F f, const T* a, const T* b, T* y) {
  using P = Pack<T, kWidth>;
  const auto packs = static_cast<std::uint32_t>(count / kWidth);
  const std::uint32_t first = blockIdx.x * (kMapThreads * kMapPacks) + threadIdx.x;
  P left[kMapPacks], right[kMapPacks];
#pragma unroll
  for (int k = 0; k < kMapPacks; ++k) {
    const std::uint32_t pack = first + k * kMapThreads;
    if (pack >= packs) continue;
    left[k] = reinterpret_cast<const P*>(a)[pack];
    right[k] = reinterpret_cast<const P*>(b)[pack < period ? pack : pack % period];
  }
#pragma unroll
  for (int k = 0; k < kMapPacks; ++k) {
    if (first + k * kMapThreads >= packs) continue;
    P out;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) out.values[i] = f(left[k].values[i], right[k].values[i]);
    reinterpret_cast<P*>(y)[first + k * kMapThreads] = out;
  }
  const std::int64_t last = std::int64_t{packs} * kWidth + threadIdx.x;
  if (kWidth > 1 && blockIdx.x == 0 && last < count) y[last] = f(a[last], b[last]);
}

/// Blocks of the two above: at least one, for the elements behind the last pack.
inline unsigned map_blocks(std::int64_t count, int width) {
  return std::max(1U, blocks_for(index_count(count / width), kMapThreads * kMapPacks));
}

/// y[i] = f(x[i]) for i in [0, count), in place or not. f is a device function object from From to To.
template <class F, class From, class To>
void map(const Stream& stream, std::int64_t count, F f, const From* x, To* y) {
  constexpr int kWidth = 16 / static_cast<int>(std::max(sizeof(From), sizeof(To)));
  if (count == 0) return;
  if (fits_packs<kWidth>(x) && fits_packs<kWidth>(y))
    launch(stream, map_kernel<kWidth, F, From, To>, map_blocks(count, kWidth), kMapThreads, 0, count, f, x, y);
  else launch(stream, map_kernel<1, F, From, To>, map_blocks(count, 1), kMapThreads, 0, count, f, x, y);
}

/// y[i] = f(a[i], b[i % period]) for i in [0, count), in place in a or not; `period` >= 1 divides count. f: (T, T) to T, on the device.
template <class F, class T>
void map(const Stream& stream, std::int64_t count, F f, const T* a, const T* b, std::int64_t period, T* y) {
  constexpr int kWidth = kVector<T>;
  if (count == 0) return;
  if ((period == count || period % kWidth == 0) && fits_packs<kWidth>(a) && fits_packs<kWidth>(b) && fits_packs<kWidth>(y))
    launch(stream, map_pair_kernel<kWidth, F, T>, map_blocks(count, kWidth), kMapThreads, 0, count, period / kWidth, f, a, b, y);
  else launch(stream, map_pair_kernel<1, F, T>, map_blocks(count, 1), kMapThreads, 0, count, period, f, a, b, y);
}

}  // namespace detr::kernels::cuda

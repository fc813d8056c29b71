#include "kernels/pointwise.h"

#include <cmath>
#include <type_traits>

#include "kernels/cuda/pointwise_map.cuh"

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 256;

struct Add {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return from_float<T>(to_float(a) + to_float(b));
  }
};

struct Scale {
  float factor;
  template <class T>
  __device__ T operator()(T x) const {
    return from_float<T>(factor * to_float(x));
  }
};

/// A value in another dtype, rounded to nearest.
template <class From, class To>
struct Convert {
  __device__ To operator()(From x) const {
    if constexpr (std::is_same_v<From, bf16>) return static_cast<To>(to_float(x));
    else if constexpr (std::is_same_v<To, bf16>) return from_float<bf16>(x);
    else return static_cast<To>(x);
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) fill_kernel(std::int64_t count, T value, T* y) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) y[i] = value;
}

// The sum over rows of dy (rows, columns): each thread sums one pack of columns over a chunk of rows, then a block sums the chunks of 32
// columns. The chunks depend on the shape alone, not on the path taken, so that the address of a tensor does not change a bit.

constexpr int kFinishColumns = 32, kFinishRows = 8;

/// partial (chunks, columns) f32: sums of `chunk_rows` rows of dy, the last chunk's of what is left. packs = columns / kWidth.
template <int kWidth, class T>
__global__ void __launch_bounds__(kThreads)
    sum_rows_kernel(std::uint32_t items, std::uint32_t packs, std::int64_t rows, std::int64_t chunk_rows, const T* dy, float* partial) {
  const std::uint32_t item = blockIdx.x * kThreads + threadIdx.x;
  if (item >= items) return;
  const std::uint32_t chunk = item / packs;
  const std::int64_t begin = chunk * chunk_rows, end = begin + chunk_rows < rows ? begin + chunk_rows : rows;
  const auto* from = reinterpret_cast<const Pack<T, kWidth>*>(dy) + item % packs;
  float sums[kWidth] = {};
#pragma unroll 4
  for (std::int64_t r = begin; r < end; ++r) {
    const Pack<T, kWidth> x = from[r * packs];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums[i] += to_float(x.values[i]);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) partial[std::int64_t{item} * kWidth + i] = sums[i];
}

template <class T>
__global__ void __launch_bounds__(kFinishColumns* kFinishRows)
    sum_chunks_kernel(std::int64_t columns, int chunks, const float* partial, T* db) {
  __shared__ float sums[kFinishRows][kFinishColumns];
  const std::int64_t column = std::int64_t{blockIdx.x} * kFinishColumns + threadIdx.x;
  float sum = 0;
  if (column < columns) {
#pragma unroll 4
    for (int chunk = static_cast<int>(threadIdx.y); chunk < chunks; chunk += kFinishRows) sum += partial[chunk * columns + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= columns) return;
#pragma unroll
  for (int k = 1; k < kFinishRows; ++k) sum += sums[k][threadIdx.x];
  db[column] = from_float<T>(sum);
}

/// db (columns) = dy (rows, columns) summed over its rows; rows and columns >= 1.
template <class T>
void sum_rows(const Stream& stream, std::int64_t rows, std::int64_t columns, const T* dy, T* db) {
  // Some 65,536 threads, but chunks of at least 8 rows, and no more of them than the second kernel reads quickly.
  const std::int64_t threads = (columns + kVector<T> - 1) / kVector<T>;
  const std::int64_t wanted = std::clamp<std::int64_t>((65536 + threads - 1) / threads, 1, 512);
  const std::int64_t chunk_rows = std::max<std::int64_t>(8, (rows + wanted - 1) / wanted), chunks = (rows + chunk_rows - 1) / chunk_rows;
  const Tensor partial = stream.empty({chunks, columns}, DType::f32);
  const bool wide = fits_vectors<T>(dy, columns);
  const std::uint32_t packs = index_count(wide ? columns / kVector<T> : columns), items = index_count(chunks * packs);
  launch(stream, wide ? sum_rows_kernel<kVector<T>, T> : sum_rows_kernel<1, T>, blocks_for(items, kThreads), kThreads, 0, items, packs,
         rows, chunk_rows, dy, partial.data<float>());
  launch(stream, sum_chunks_kernel<T>, blocks_for(columns, kFinishColumns), dim3(kFinishColumns, kFinishRows), 0, columns, chunks,
         partial.data<float>(), db);
}

// Sums of scalars: the tensors' addresses travel with the launch.

constexpr int kGroup = 128;   // tensors of one launch
constexpr int kSumThreads = 1024;

/// At most kGroup tensors laid end to end: element e lies in the first tensor k with e < end[k].
template <class T>
struct Group {
  T* data[kGroup];
  std::int64_t end[kGroup];
  int tensors = 0;

  std::int64_t elements() const { return tensors ? end[tensors - 1] : 0; }
  void push(T* first, std::int64_t count) {
    data[tensors] = first;
    end[tensors] = elements() + count;
    ++tensors;
  }
};

/// One block: carry + the sum of all elements, in double, to `total`, or where that is null to `carry`.
template <class T>
__global__ void __launch_bounds__(kSumThreads) sum_kernel(const __grid_constant__ Group<const T> in, bool carried, double* carry, T* total) {
  __shared__ double scratch[32];
  const std::int64_t elements = in.tensors ? in.end[in.tensors - 1] : 0;
  double sum = 0;
  int k = 0;
  std::int64_t begin = 0;
  for (std::int64_t e = threadIdx.x; e < elements; e += kSumThreads) {
    while (e >= in.end[k]) begin = in.end[k++];
    sum += static_cast<double>(to_float(in.data[k][e - begin]));
  }
  sum = block_sum(sum, scratch);
  if (threadIdx.x > 0) return;
  if (carried) sum += *carry;
  if (total) *total = from_float<T>(static_cast<float>(sum));
  else *carry = sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) spread_kernel(const __grid_constant__ Group<T> out, std::int64_t elements, const T* value) {
  const std::int64_t e = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (e >= elements) return;
  int k = 0;
  while (e >= out.end[k]) ++k;
  out.data[k][e - (k ? out.end[k - 1] : 0)] = *value;
}

/// y[r] = mask[r % period] ? x[r] : 0 for rows of `width` units.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    mask_rows_kernel(std::uint32_t units, std::uint32_t width, std::uint32_t period, const Unit* x, const std::uint8_t* mask, Unit* y) {
  const std::uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= units) return;
  const std::uint32_t row = i / width;
  const Unit value = x[i];   // read in any case: most rows are kept, and the load need not wait for the mask
  y[i] = mask[row < period ? row : row % period] ? value : Unit{};
}

template <class Unit>
void mask_rows(const Stream& stream, const Tensor& x, const Tensor& mask, Tensor& y) {
  const std::uint32_t units = index_count(x.bytes() / static_cast<std::int64_t>(sizeof(Unit)));
  launch(stream, mask_rows_kernel<Unit>, blocks_for(units, kThreads), kThreads, 0, units, units / x.rows(), index_count(mask.numel()),
         static_cast<const Unit*>(x.raw()), mask.data<std::uint8_t>(), static_cast<Unit*>(y.raw()));
}

constexpr int kImageThreads = 128;

/// Sizes of pictures (N, H, W, C) and of their resized form (N, h, w, C).
struct Resize {
  std::uint32_t H, W, h, w, C;
};

/// x / 255 to the last bit: the product with the inverse, and one correction by its remainder.
__device__ float level(std::uint8_t x) {
  constexpr float kInverse = 1.0F / 255.0F;
  const float value = x, quotient = value * kInverse;
  return fmaf(fmaf(-255.0F, quotient, value), kInverse, quotient);
}

/// One block a row of y. Source columns floor(j W / w) come from one division a pack, then by steps of W / w with the remainder kept.
template <int kWidth, class T>
__global__ void __launch_bounds__(kImageThreads) images_to_float_kernel(Resize size, const std::uint8_t* images, T* y) {
  const std::uint32_t row = blockIdx.x, n = row / size.h, i = row % size.h;
  const std::uint8_t* source = images + (std::int64_t{n} * size.H + i * size.H / size.h) * (std::int64_t{size.W} * size.C);
  const std::uint32_t width = size.w * size.C, step = size.W / size.w, step_rest = size.W % size.w;
  auto* target = reinterpret_cast<Pack<T, kWidth>*>(y + std::int64_t{row} * width);
  for (std::uint32_t pack = threadIdx.x; pack < width / kWidth; pack += kImageThreads) {
    const std::uint32_t pixel = pack * kWidth / size.C;
    std::uint32_t c = pack * kWidth % size.C, column = pixel * size.W / size.w, rest = pixel * size.W % size.w;
    std::uint8_t bytes[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      bytes[k] = source[column * size.C + c];
      if (++c < size.C) continue;
      c = 0;
      column += step;
      rest += step_rest;
      if (rest >= size.w) {
        rest -= size.w;
        ++column;
      }
    }
    Pack<T, kWidth> out;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) out.values[k] = from_float<T>(level(bytes[k]));
    target[pack] = out;
  }
}

}  // namespace

void add_forward(const Stream& stream, const Tensor& a, const Tensor& b, Tensor& y) {
  dispatch_float("add", a.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    map(stream, a.numel(), Add{}, a.data<T>(), b.data<T>(), b.numel(), y.data<T>());
  });
}

void add_backward(const Stream& stream, const Tensor& dy, Tensor* da, Tensor* db) {
  if (da) stream.copy(dy, *da);
  if (!db || db->numel() == 0) return;
  if (db->numel() == dy.numel()) return stream.copy(dy.reshape(db->shape()), *db);
  if (dy.numel() == 0) return fill(stream, 0, *db);
  dispatch_float("add", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    sum_rows(stream, dy.numel() / db->numel(), db->numel(), dy.data<T>(), db->data<T>());
  });
}

void accumulate(const Stream& stream, const Tensor& x, Tensor& into) {
  dispatch_float("accumulate", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    map(stream, x.numel(), Add{}, static_cast<const T*>(into.data<T>()), static_cast<const T*>(x.data<T>()), x.numel(), into.data<T>());
  });
}

void fill(const Stream& stream, double value, Tensor& into) {
  const std::int64_t count = into.numel();
  const auto enqueue = [&]<class T>(T converted, T* to) {
    if (count == 0) return;
    // All of these types write +0 as zero bytes.
    if (value == 0 && !std::signbit(value)) DETR_TRY(cudaMemsetAsync(to, 0, static_cast<std::size_t>(into.bytes()), native(stream)));
    else launch(stream, fill_kernel<T>, blocks_for(count, kThreads), kThreads, 0, count, converted, to);
  };
  switch (into.dtype()) {
    case DType::f32: enqueue(static_cast<float>(value), into.data<float>()); break;
    case DType::f64: enqueue(value, into.data<double>()); break;
    case DType::bf16: enqueue(__float2bfloat16_rn(static_cast<float>(value)), into.data<bf16>()); break;
    default: throw InvalidArgument("fill: CUDA fills f32, f64 and bf16, got ", into);
  }
}

void scale(const Stream& stream, const Tensor& x, double factor, Tensor& y) {
  dispatch_float("scale", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    map(stream, x.numel(), Scale{static_cast<float>(factor)}, x.data<T>(), y.data<T>());
  });
}

void sum_forward(const Stream& stream, std::span<const Tensor> inputs, Tensor& total) {
  dispatch_float("sum", total.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Tensor carry;
    for (std::size_t begin = 0; begin < inputs.size(); begin += kGroup) {
      const bool last = begin + kGroup >= inputs.size();
      if (!last && !carry.defined()) carry = stream.empty({1}, DType::f64);
      Group<const T> group;
      for (const Tensor& input : inputs.subspan(begin, std::min<std::size_t>(kGroup, inputs.size() - begin)))
        if (input.numel()) group.push(input.data<T>(), input.numel());
      launch(stream, sum_kernel<T>, 1, kSumThreads, 0, group, begin > 0, carry.defined() ? carry.data<double>() : nullptr,
             last ? total.data<T>() : nullptr);
    }
  });
}

void sum_backward(const Stream& stream, const Tensor& dtotal, std::span<Tensor* const> dinputs) {
  dispatch_float("sum", dtotal.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Group<T> group;
    const auto enqueue = [&] {
      launch(stream, spread_kernel<T>, blocks_for(group.elements(), kThreads), kThreads, 0, group, group.elements(), dtotal.data<T>());
      group.tensors = 0;
    };
    for (Tensor* dinput : dinputs) {
      if (!dinput || dinput->numel() == 0) continue;
      if (group.tensors == kGroup) enqueue();
      group.push(dinput->data<T>(), dinput->numel());
    }
    enqueue();
  });
}

void cast(const Stream& stream, const Tensor& x, Tensor& y) {
  if (x.dtype() == y.dtype()) return stream.copy(x, y);
  const auto convert = [&]<class From, class To>(TypeTag<From>, TypeTag<To>) {
    map(stream, x.numel(), Convert<From, To>{}, x.data<From>(), y.data<To>());
  };
  if (y.dtype() == DType::f32) {
    switch (x.dtype()) {
      case DType::bf16: return convert(TypeTag<bf16>{}, TypeTag<float>{});
      case DType::f64: return convert(TypeTag<double>{}, TypeTag<float>{});
      case DType::i64: return convert(TypeTag<std::int64_t>{}, TypeTag<float>{});
      case DType::u8: return convert(TypeTag<std::uint8_t>{}, TypeTag<float>{});
      default: break;
    }
  }
  if (y.dtype() == DType::bf16 && x.dtype() == DType::f32) return convert(TypeTag<float>{}, TypeTag<bf16>{});
  if (y.dtype() == DType::f64 && x.dtype() == DType::f32) return convert(TypeTag<float>{}, TypeTag<double>{});
  if (y.dtype() == DType::f64 && x.dtype() == DType::bf16) return convert(TypeTag<bf16>{}, TypeTag<double>{});
  throw InvalidArgument("cast: CUDA casts any dtype to f32, f32 to bf16, and both to f64, got ", x, " to ", y.dtype());
}

void mask_rows(const Stream& stream, const Tensor& x, const Tensor& mask, Tensor& y) {
  dispatch_float("mask_rows", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (x.numel() == 0) return;
    if (fits_vectors<T>(x.raw(), x.dim(-1)) && fits_packs<kVector<T>>(y.data<T>())) mask_rows<uint4>(stream, x, mask, y);
    else if constexpr (sizeof(T) == 2) mask_rows<std::uint16_t>(stream, x, mask, y);
    else mask_rows<std::uint32_t>(stream, x, mask, y);
  });
}

void images_to_float(const Stream& stream, const Tensor& images, Tensor& y) {
  dispatch_float("images_to_float", y.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (y.numel() == 0) return;
    const std::int64_t H = images.dim(1), W = images.dim(2), C = images.dim(3), h = y.dim(1), w = y.dim(2);
    index_count(std::max({H * h, W * w, W * C, w * C}));
    const Resize size{static_cast<std::uint32_t>(H), static_cast<std::uint32_t>(W), static_cast<std::uint32_t>(h), static_cast<std::uint32_t>(w),
                      static_cast<std::uint32_t>(C)};
    const bool wide = fits_vectors<T>(y.raw(), w * C);
    launch(stream, wide ? images_to_float_kernel<kVector<T>, T> : images_to_float_kernel<1, T>, blocks_for(y.dim(0) * h, 1), kImageThreads, 0, size,
           images.data<std::uint8_t>(), y.data<T>());
  });
}

}  // namespace detr::kernels::cuda

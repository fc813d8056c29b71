#include "kernels/linear.h"

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/launch.cuh"

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerThread = 16;

/// y[r] = bias, or 0 where there is none: a product over no inputs.
template <class T>
__global__ void broadcast_kernel(const T* bias, std::int64_t count, std::int64_t width, T* y) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) y[i] = bias ? bias[i % width] : from_float<T>(0);
}

/// partial[chunk][o] = sum of dy[r][o] over the chunk's rows. A thread has V neighbouring columns; `across` threads of a block lie
/// along the columns, the others take every (256 / across)-th row of the chunk.
template <class T, int V>
__global__ void partial_columns_kernel(const T* dy, std::int64_t rows, std::int64_t width, int across, int rows_per_block, float* partial) {
  __shared__ float sums[kThreads * V];
  const int x = static_cast<int>(threadIdx.x) % across, y = static_cast<int>(threadIdx.x) / across, down = kThreads / across;
  const std::int64_t column = (std::int64_t{blockIdx.y} * across + x) * V;
  const std::int64_t begin = std::int64_t{blockIdx.x} * rows_per_block;
  const std::int64_t end = begin + rows_per_block < rows ? begin + rows_per_block : rows;
  float sum[V] = {};
  if (column < width) {
#pragma unroll 4
    for (std::int64_t r = begin + y; r < end; r += down) {
      if constexpr (V == 1) {
        sum[0] += to_float(dy[r * width + column]);
      } else {
        float values[V];
        load_vector(dy + r * width + column, values);
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += values[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < V; ++i) sums[threadIdx.x * V + i] = sum[i];
  __syncthreads();
  if (y != 0 || column >= width) return;
  for (int row = 1; row < down; ++row) {
#pragma unroll
    for (int i = 0; i < V; ++i) sum[i] += sums[(row * across + x) * V + i];
  }
#pragma unroll
  for (int i = 0; i < V; ++i) partial[std::int64_t{blockIdx.x} * width + column + i] = sum[i];
}

/// dbias[o] = sum over the chunks in order. A warp has 32 columns' chunks dealt to 8 rows of threads.
__global__ void sum_partials_kernel(const float* partial, int chunks, std::int64_t width, float* dbias) {
  __shared__ double sums[8][32];
  const std::int64_t column = std::int64_t{blockIdx.x} * 32 + threadIdx.x;
  double sum = 0;
  if (column < width) {
    for (int chunk = static_cast<int>(threadIdx.y); chunk < chunks; chunk += 8) sum += static_cast<double>(partial[chunk * width + column]);
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  for (int row = 1; row < 8; ++row) sum += sums[row][threadIdx.x];
  dbias[column] = static_cast<float>(sum);
}

template <class T, int V>
void sum_columns(const Stream& stream, const T* dy, std::int64_t rows, std::int64_t width, float* dbias) {
  int across = 1;
  while (across < 32 && across * V < width) across *= 2;
  const int down = kThreads / across;
  const auto column_blocks = static_cast<unsigned>((width + across * V - 1) / (across * V));
  // Chunks depend on the shape alone: enough blocks for a large GPU, and few enough partial sums.
  std::int64_t rows_per_block = down * kRowsPerThread;
  while ((rows + rows_per_block - 1) / rows_per_block * column_blocks > 2048) rows_per_block *= 2;
  const unsigned chunks = blocks_for(rows, rows_per_block);
  Tensor partial = stream.empty({static_cast<std::int64_t>(chunks), width}, DType::f32);
  launch(stream, partial_columns_kernel<T, V>, dim3(chunks, column_blocks), dim3(kThreads), 0, dy, rows, width, across, static_cast<int>(rows_per_block), partial.data<float>());
  launch(stream, sum_partials_kernel, dim3(blocks_for(width, 32)), dim3(32, 8), 0, partial.data<float>(), static_cast<int>(chunks), width, dbias);
}

}  // namespace

void linear_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor* bias, Tensor& y) {
  const std::int64_t rows = y.rows(), out = weight.dim(0), in = weight.dim(1);
  dispatch_float("linear", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (in > 0) return gemm(stream, x.dtype(), {x.raw(), false}, {weight.raw(), true}, rows, out, in, bias ? bias->raw() : nullptr, y.dtype(), y.raw());
    launch(stream, broadcast_kernel<T>, dim3(blocks_for(y.numel(), kThreads)), dim3(kThreads), 0, bias ? bias->data<T>() : nullptr, y.numel(), out, y.data<T>());
  });
}

void linear_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, Tensor* dx, Tensor* dweight,
                     Tensor* dbias) {
  const std::int64_t rows = dy.rows(), out = weight.dim(0), in = weight.dim(1);
  dispatch_float("linear", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto product = [&](Operand a, Operand b, std::int64_t m, std::int64_t n, std::int64_t k, Tensor& c) {
      if (k > 0) gemm(stream, x.dtype(), a, b, m, n, k, nullptr, c.dtype(), c.raw());
      else if (c.bytes()) DETR_TRY(cudaMemsetAsync(c.raw(), 0, static_cast<std::size_t>(c.bytes()), native(stream)));
    };
    if (dx) product({dy.raw(), false}, {weight.raw(), false}, rows, in, out, *dx);
    if (dweight) product({dy.raw(), true}, {x.raw(), false}, out, in, rows, *dweight);
    if (!dbias) return;
    if (rows == 0) {
      if (dbias->bytes()) DETR_TRY(cudaMemsetAsync(dbias->raw(), 0, static_cast<std::size_t>(dbias->bytes()), native(stream)));
    } else if (fits_vectors<T>(dy.raw(), out)) {
      sum_columns<T, kVector<T>>(stream, dy.data<T>(), rows, out, dbias->data<float>());
    } else {
      sum_columns<T, 1>(stream, dy.data<T>(), rows, out, dbias->data<float>());
    }
  });
}

}  // namespace detr::kernels::cuda

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

/// dbias[o] = sum of dy[r][o]. First partial[chunk][o], over the rows of each block's chunk: a thread has V neighbouring columns;
/// `across` threads of a block lie along the columns, the others take every (256 / across)-th row. The last block of a column of
/// blocks to finish then adds the chunks in their order, whichever block it is.
template <class T, int V>
__global__ void sum_columns_kernel(const T* dy, std::int64_t rows, std::int64_t width, int across, int rows_per_block, float* partial, unsigned* counters,
                                   float* dbias) {
  __shared__ float sums[kThreads * V];
  __shared__ bool is_last;
  const int thread = static_cast<int>(threadIdx.x), x = thread % across, y = thread / across, down = kThreads / across;
  const std::int64_t first_column = std::int64_t{blockIdx.y} * across * V, column = first_column + x * V;
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
  for (int i = 0; i < V; ++i) sums[thread * V + i] = sum[i];
  __syncthreads();
  const int columns = static_cast<int>(width - first_column < across * V ? width - first_column : across * V);
  for (int c = thread; c < columns; c += kThreads) {
    float total = 0;
    for (int row = 0; row < down; ++row) total += sums[row * across * V + c];
    partial[std::int64_t{blockIdx.x} * width + first_column + c] = total;
  }
  __threadfence();
  __syncthreads();
  if (thread == 0) is_last = atomicAdd(counters + blockIdx.y, 1U) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  if (thread == 0) counters[blockIdx.y] = 0;
  __threadfence();

  // A thread has one column; where the block has threads for more, they share the chunks out and are added in order.
  const int groups = columns < kThreads ? kThreads / columns : 1;
  for (int first = 0; first < columns; first += kThreads) {
    const int c = first + thread % (kThreads / groups), group = thread / (kThreads / groups);
    const bool mine = c < columns && group < groups;
    double total = 0;
    if (mine) {
#pragma unroll 8
      for (unsigned chunk = static_cast<unsigned>(group); chunk < gridDim.x; chunk += static_cast<unsigned>(groups))
        total += static_cast<double>(__ldcg(partial + chunk * width + first_column + c));
    }
    if (groups > 1) {
      __shared__ double totals[kThreads];
      totals[thread] = total;
      __syncthreads();
      if (mine && group == 0) {
        for (int other = 1; other < groups; ++other) total += totals[other * (kThreads / groups) + c];
      }
    }
    if (mine && group == 0) dbias[first_column + c] = static_cast<float>(total);
  }
}

/// Counters of blocks that have finished, one for each column of blocks, zero between launches. Of one stream, so no two launches
/// use them at a time.
struct Tickets {
  static constexpr std::int64_t kCount = 4096;
  explicit Tickets(const Stream& stream) : counters(stream.zeros({kCount}, DType::i64)) {}
  Tensor counters;
};

template <class T, int V>
void sum_columns(const Stream& stream, const T* dy, std::int64_t rows, std::int64_t width, float* dbias) {
  int across = 1;
  while (across < 8 && across * V < width) across *= 2;   // 64 columns of bf16 are a line of 128 bytes
  const int down = kThreads / across;
  const auto column_blocks = static_cast<unsigned>((width + across * V - 1) / (across * V));
  DETR_CHECK(column_blocks <= Tickets::kCount, "linear: too many outputs for dbias: ", width);
  // Chunks depend on the shape alone: enough blocks for a large GPU, few partial sums for the last block.
  std::int64_t rows_per_block = down * kRowsPerThread;
  while ((rows + rows_per_block - 1) / rows_per_block > 128) rows_per_block *= 2;
  const unsigned chunks = blocks_for(rows, rows_per_block);
  Tensor partial = stream.empty({static_cast<std::int64_t>(chunks), width}, DType::f32);
  auto* counters = reinterpret_cast<unsigned*>(stream.cuda_state().get<Tickets>(stream).counters.template data<std::int64_t>());
  launch(stream, sum_columns_kernel<T, V>, dim3(chunks, column_blocks), dim3(kThreads), 0, dy, rows, width, across, static_cast<int>(rows_per_block), partial.data<float>(),
         counters, dbias);
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
                     Tensor* dbias, bool add_dx) {
  const std::int64_t rows = dy.rows(), out = weight.dim(0), in = weight.dim(1);
  dispatch_float("linear", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto product = [&](Operand a, Operand b, std::int64_t m, std::int64_t n, std::int64_t k, Tensor& c, bool add) {
      if (k > 0) gemm(stream, x.dtype(), a, b, m, n, k, nullptr, c.dtype(), c.raw(), add);
      else if (!add && c.bytes()) DETR_TRY(cudaMemsetAsync(c.raw(), 0, static_cast<std::size_t>(c.bytes()), native(stream)));
    };
    if (dx) product({dy.raw(), false}, {weight.raw(), false}, rows, in, out, *dx, add_dx);
    if (dweight) product({dy.raw(), true}, {x.raw(), false}, out, in, rows, *dweight, false);
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

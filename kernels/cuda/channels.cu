#include "kernels/cuda/channels.h"

#include "kernels/cuda/launch.cuh"

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 256;

/// A thread writes one element; neighbouring threads neighbouring elements.
template <class T>
__global__ void copy_channels_kernel(const T* x, int from, T* y, int to, std::int64_t count) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const std::int64_t row = i / to;
  const int channel = static_cast<int>(i - row * to);
  y[i] = channel < from ? x[row * from + channel] : from_float<T>(0);
}

/// Eight channels a thread in one 16-byte store: the pictures.
__global__ void copy_to_eight_kernel(const bf16* x, int from, bf16* y, std::int64_t rows) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= rows) return;
  float values[8] = {};
  for (int channel = 0; channel < from; ++channel) values[channel] = to_float(x[row * from + channel]);
  store_vector(y + row * 8, values);
}

}  // namespace

void copy_channels(const Stream& stream, const Tensor& x, Tensor& y) {
  const int from = static_cast<int>(x.dim(-1)), to = static_cast<int>(y.dim(-1));
  if (x.dtype() == DType::bf16 && to == 8 && from < 8) {
    launch(stream, copy_to_eight_kernel, dim3(blocks_for(x.rows(), kThreads)), dim3(kThreads), 0, x.data<bf16>(), from, y.data<bf16>(), x.rows());
    return;
  }
  dispatch_float("copy_channels", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(stream, copy_channels_kernel<T>, dim3(blocks_for(y.numel(), kThreads)), dim3(kThreads), 0, x.data<T>(), from, y.data<T>(), to, y.numel());
  });
}

Tensor widened(const Stream& stream, const Tensor& x, std::int64_t channels) {
  if (x.dim(3) == channels) return x;
  Tensor y = stream.empty(with_channels(x.shape(), channels), x.dtype());
  copy_channels(stream, x, y);
  return y;
}

Tensor widened_weight(const Stream& stream, const Tensor& weight) {
  const Tensor rows = widened(stream, weight, in_eights(weight.dim(3)));
  if (weight.dim(0) % 8 == 0) return rows;
  Tensor y = stream.zeros({in_eights(weight.dim(0)), rows.dim(1), rows.dim(2), rows.dim(3)}, weight.dtype());
  Tensor real = y.slice(0, weight.dim(0));
  stream.copy(rows, real);
  return y;
}

}  // namespace detr::kernels::cuda

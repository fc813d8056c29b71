#include "kernels/conv2d_norm.h"

#include "kernels/cuda/conv2d_fused.h"
#include "kernels/cuda/conv2d_pictures.h"
#include "kernels/cuda/launch.cuh"

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 256;

/// A block for each output channel.
template <class T>
__global__ void fold_norm_kernel(const float* weight, const float* norm_weight, const float* norm_bias, const float* mean, const float* var, float eps, int size,
                                 T* folded, float* scale, float* shift) {
  const int o = static_cast<int>(blockIdx.x);
  const float s = norm_weight[o] / sqrtf(var[o] + eps);
  if (threadIdx.x == 0) {
    scale[o] = s;
    shift[o] = norm_bias[o] - mean[o] * s;
  }
  const std::int64_t begin = std::int64_t{o} * size;
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) folded[begin + i] = from_float<T>(s * weight[begin + i]);
}

__global__ void scale_rows_kernel(const float* scale, int size, float* x) {
  const float s = scale[blockIdx.x];
  const std::int64_t begin = std::int64_t{blockIdx.x} * size;
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) x[begin + i] *= s;
}

/// y = act(y + shift + residual), in place: what follows a convolution for which there is no fused engine.
template <class T>
__global__ void shift_kernel(const float* shift, const T* residual, bool relu, std::int64_t count, int channels, T* y) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const float value = to_float(y[i]) + shift[i % channels] + (residual ? to_float(residual[i]) : 0.0F);
  y[i] = from_float<T>(relu && value <= 0 ? 0.0F : value);   // NaN stays
}

}  // namespace

void fold_norm(const Stream& stream, const Tensor& weight, const Tensor& norm_weight, const Tensor& norm_bias, const Tensor& mean,
               const Tensor& var, double eps, Tensor& folded, Tensor& scale, Tensor& shift) {
  const std::int64_t channels = weight.dim(0), size = channels ? weight.numel() / channels : 0;
  DETR_CHECK(size < (std::int64_t{1} << 31), "fold_norm: weight is too large: ", weight);
  dispatch_float("fold_norm", folded.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(stream, fold_norm_kernel<T>, dim3(blocks_for(channels, 1)), dim3(kThreads), 0, weight.data<float>(), norm_weight.data<float>(), norm_bias.data<float>(),
           mean.data<float>(), var.data<float>(), static_cast<float>(eps), static_cast<int>(size), folded.data<T>(), scale.data<float>(), shift.data<float>());
  });
}

void conv2d_shift_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& shift, const Tensor* residual,
                          Activation activation, const Conv2dOptions& options, Tensor& y) {
  if (!residual && try_pictures_forward(stream, x, weight, &shift, activation, options, y)) return;
  if (y.numel() == 0 || try_fused_forward(stream, x, weight, shift, residual, activation, options, y)) return;
  cuda::conv2d_forward(stream, x, weight, options, y);
  dispatch_float("conv2d_shift", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(stream, shift_kernel<T>, dim3(blocks_for(y.numel(), kThreads)), dim3(kThreads), 0, shift.data<float>(), residual ? residual->data<T>() : nullptr,
           activation == Activation::relu, y.numel(), static_cast<int>(y.dim(-1)), y.data<T>());
  });
}

void scale_rows(const Stream& stream, const Tensor& scale, Tensor& x) {
  const std::int64_t rows = x.dim(0), size = rows ? x.numel() / rows : 0;
  DETR_CHECK(size < (std::int64_t{1} << 31), "scale_rows: x is too large: ", x);
  launch(stream, scale_rows_kernel, dim3(blocks_for(rows, 1)), dim3(kThreads), 0, scale.data<float>(), static_cast<int>(size), x.data<float>());
}

}  // namespace detr::kernels::cuda

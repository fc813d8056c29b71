#include "kernels/boxes.h"

#include "kernels/cuda/launch.cuh"

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Comparisons and not fminf, fmaxf, which would swallow a NaN.
__device__ float inverse_sigmoid(float x) {
  constexpr float eps = static_cast<float>(kInverseSigmoidEps);
  const float c = x < 0 ? 0 : (x > 1 ? 1 : x), rest = 1 - c;
  return logf((c < eps ? eps : c) / (rest < eps ? eps : rest));
}

/// A clamp passes gradient where its bound is not violated, bound included.
__device__ float inverse_sigmoid_derivative(float x) {
  constexpr float eps = static_cast<float>(kInverseSigmoidEps);
  if (!(x >= 0 && x <= 1)) return 0;
  return (x >= eps ? 1 / x : 0.0F) + (1 - x >= eps ? 1 / (1 - x) : 0.0F);
}

// Some 100,000 coordinates at most, read and written in order: one thread each keeps up with the launch.

template <class T>
__global__ void __launch_bounds__(kThreads) refine_boxes_kernel(std::int64_t count, const T* delta, const T* reference, T* box) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) box[i] = from_float<T>(1 / (1 + expf(-(to_float(delta[i]) + inverse_sigmoid(to_float(reference[i]))))));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    refine_boxes_backward_kernel(std::int64_t count, const T* dbox, const T* box, const T* reference, T* ddelta, T* dreference) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  const float b = to_float(box[i]), slope = to_float(dbox[i]) * (b * (1 - b));
  if (ddelta) ddelta[i] = from_float<T>(slope);
  if (dreference) dreference[i] = from_float<T>(slope * inverse_sigmoid_derivative(to_float(reference[i])));
}

}  // namespace

void refine_boxes_forward(const Stream& stream, const Tensor& delta, const Tensor& reference, Tensor& box) {
  dispatch_float("refine_boxes", delta.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t count = delta.numel();
    launch(stream, refine_boxes_kernel<T>, blocks_for(count, kThreads), kThreads, 0, count, delta.data<T>(), reference.data<T>(), box.data<T>());
  });
}

void refine_boxes_backward(const Stream& stream, const Tensor& dbox, const Tensor& box, const Tensor& reference, Tensor* ddelta,
                           Tensor* dreference) {
  dispatch_float("refine_boxes", box.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!ddelta && !dreference) return;
    const std::int64_t count = box.numel();
    launch(stream, refine_boxes_backward_kernel<T>, blocks_for(count, kThreads), kThreads, 0, count, dbox.data<T>(), box.data<T>(),
           reference.data<T>(), ddelta ? ddelta->data<T>() : nullptr, dreference ? dreference->data<T>() : nullptr);
  });
}

}  // namespace detr::kernels::cuda

#include "kernels/step_report.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kInputs = 32;   // of one launch

/// Inputs of a launch, by value.
struct Inputs {
  const void* place[kInputs];
  std::int64_t count[kInputs];
  DType dtype[kInputs];
};

Inputs inputs_of(std::span<const Tensor> tensors) {
  Inputs inputs{};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    inputs.place[i] = tensors[i].raw();
    inputs.count[i] = tensors[i].numel();
    inputs.dtype[i] = tensors[i].dtype();
  }
  return inputs;
}

/// One block for each input.
__global__ void collect_kernel(Inputs inputs, double* y) {
  const int input = static_cast<int>(blockIdx.x);
  for (int before = 0; before < input; ++before) y += inputs.count[before];
  for (std::int64_t i = threadIdx.x; i < inputs.count[input]; i += kThreads) {
    switch (inputs.dtype[input]) {
      case DType::f32: y[i] = static_cast<double>(static_cast<const float*>(inputs.place[input])[i]); break;
      case DType::f64: y[i] = static_cast<const double*>(inputs.place[input])[i]; break;
      default: y[i] = static_cast<double>(static_cast<const std::int64_t*>(inputs.place[input])[i]); break;
    }
  }
}

__global__ void fill_kernel(std::int64_t* first, int count, std::int64_t value) {
  if (static_cast<int>(threadIdx.x) < count) first[threadIdx.x] = value;
}

/// blockIdx.y is the input. The least index wins whatever the order.
template <class T>
__device__ void find(const T* values, std::int64_t count, std::int64_t* first) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += stride) {
    if (isfinite(static_cast<float>(values[i]))) continue;
    atomicMin(reinterpret_cast<unsigned long long*>(first), static_cast<unsigned long long>(i));
    return;
  }
}
__global__ void first_not_finite_kernel(Inputs inputs, std::int64_t* first) {
  const int input = static_cast<int>(blockIdx.y);
  switch (inputs.dtype[input]) {
    case DType::bf16: find(static_cast<const bf16*>(inputs.place[input]), inputs.count[input], first + input); break;
    case DType::f64: {
      // In double: a large value is no infinity.
      const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
      const auto* values = static_cast<const double*>(inputs.place[input]);
      for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < inputs.count[input]; i += stride) {
        if (!isfinite(values[i])) atomicMin(reinterpret_cast<unsigned long long*>(first + input), static_cast<unsigned long long>(i));
      }
      break;
    }
    default: find(static_cast<const float*>(inputs.place[input]), inputs.count[input], first + input); break;
  }
}

}  // namespace

void collect(const Stream& stream, std::span<const Tensor> inputs, Tensor& y) {
  double* to = y.data<double>();
  while (!inputs.empty()) {
    const std::span<const Tensor> part = inputs.first(std::min<std::size_t>(inputs.size(), kInputs));
    launch(stream, collect_kernel, dim3(static_cast<unsigned>(part.size())), dim3(kThreads), 0, inputs_of(part), to);
    for (const Tensor& input : part) to += input.numel();
    inputs = inputs.subspan(part.size());
  }
}

void first_not_finite(const Stream& stream, std::span<const Tensor> inputs, Tensor& first) {
  std::int64_t* to = first.data<std::int64_t>();
  while (!inputs.empty()) {
    const std::span<const Tensor> part = inputs.first(std::min<std::size_t>(inputs.size(), kInputs));
    const int count = static_cast<int>(part.size());
    launch(stream, fill_kernel, dim3(1), dim3(kInputs), 0, to, count, std::int64_t{-1});   // as an unsigned number the largest
    launch(stream, first_not_finite_kernel, dim3(64, static_cast<unsigned>(count)), dim3(kThreads), 0, inputs_of(part), to);
    to += count;
    inputs = inputs.subspan(part.size());
  }
}

}  // namespace detr::kernels::cuda

#include "runtime/gpus.h"

#include <cuda_runtime_api.h>

#include "runtime/error.h"

namespace detr::cuda {
namespace {

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw DeviceError(call, ": ", cudaGetErrorString(status));
}

}  // namespace

std::vector<Gpu> list_gpus() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  // Two errors to CUDA, one thing to us: there is no GPU.
  if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver) return {};
  check(status, "cudaGetDeviceCount");
  std::vector<Gpu> gpus;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
    gpus.push_back({properties.name, static_cast<std::int64_t>(properties.totalGlobalMem), properties.major, properties.minor});
  }
  return gpus;
}

}  // namespace detr::cuda

#include "runtime/gpus.h"

#include "runtime/cuda/try.h"

namespace detr::cuda {

std::vector<Gpu> list_gpus() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  // Two errors to CUDA, one thing to us: there is no GPU.
  if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver) return {};
  expect_success(status, "cudaGetDeviceCount");
  std::vector<Gpu> gpus;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    DETR_TRY(cudaGetDeviceProperties(&properties, i));
    gpus.push_back({properties.name, static_cast<std::int64_t>(properties.totalGlobalMem), properties.major, properties.minor});
  }
  return gpus;
}

GpuMemory memory_info(int index) {
  DETR_TRY(cudaSetDevice(index));
  std::size_t free = 0, total = 0;
  DETR_TRY(cudaMemGetInfo(&free, &total));
  return {static_cast<std::int64_t>(free), static_cast<std::int64_t>(total)};
}

}  // namespace detr::cuda

#pragma once
#include <cuda_runtime_api.h>

#include "runtime/error.h"

namespace detr::cuda {

/// Throws DeviceError naming the call and the library's words. Each CUDA library's status type has an overload.
inline void expect_success(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw DeviceError(call, ": ", cudaGetErrorString(status));
}

}  // namespace detr::cuda

/// For every status of a CUDA library.
#define DETR_TRY(call) ::detr::cuda::expect_success((call), #call)

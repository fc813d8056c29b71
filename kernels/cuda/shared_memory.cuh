#pragma once
#include "kernels/cuda/launch.cuh"

namespace detr::kernels::cuda {

/// Bytes of shared memory that a block may have on the stream's GPU: 227 KiB on an H100, 99 KiB on many smaller ones.
inline std::size_t most_shared(const Stream& stream) {
  int bytes = 0;
  DETR_TRY(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, stream.device().index));
  return static_cast<std::size_t>(bytes);
}

/// Lets a kernel of `op` use `bytes` of dynamic shared memory. Throws DeviceError if a block of this GPU has less.
template <class... Parameters>
void allow_shared(const Stream& stream, const char* op, void (*kernel)(Parameters...), std::size_t bytes) {
  if (bytes > most_shared(stream)) throw DeviceError(op, ": such sizes need ", bytes, " bytes of shared memory a block, this GPU has ", most_shared(stream));
  allow_shared(kernel, bytes);
}

}  // namespace detr::kernels::cuda

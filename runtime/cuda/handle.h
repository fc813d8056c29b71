#pragma once
#include <cuda_runtime_api.h>

#include <memory>
#include <type_traits>

namespace detr::cuda {

/// Owner of a library handle, so that what holds it needs no destructor.
template <auto Destroy>
struct HandleDeleter {
  template <class T>
  void operator()(T* handle) const noexcept {
    static_cast<void>(Destroy(handle));
  }
};
template <class T, auto Destroy>
using Unique = std::unique_ptr<std::remove_pointer_t<T>, HandleDeleter<Destroy>>;

using UniqueStream = Unique<cudaStream_t, cudaStreamDestroy>;
using UniqueEvent = Unique<cudaEvent_t, cudaEventDestroy>;
using UniqueGraph = Unique<cudaGraph_t, cudaGraphDestroy>;
using UniqueGraphExec = Unique<cudaGraphExec_t, cudaGraphExecDestroy>;

}  // namespace detr::cuda

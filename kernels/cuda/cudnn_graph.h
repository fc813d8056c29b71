#pragma once
#include <cudnn.h>

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "runtime/cuda/handle.h"
#include "runtime/cuda/try.h"
#include "runtime/stream.h"

namespace detr::cuda {

inline void expect_success(cudnnStatus_t status, const char* call) {
  if (status != CUDNN_STATUS_SUCCESS) throw DeviceError(call, ": ", cudnnGetErrorString(status));
}

}  // namespace detr::cuda

/// What cuDNN's graph interface needs here: tensors, operations, a plan for a graph of them, its execution.
namespace detr::kernels::cuda {

/// A descriptor of the library: attributes, then finalise.
class CudnnDescriptor {
 public:
  CudnnDescriptor() = default;
  explicit CudnnDescriptor(cudnnBackendDescriptorType_t type) {
    cudnnBackendDescriptor_t made = nullptr;
    DETR_TRY(cudnnBackendCreateDescriptor(type, &made));
    handle_.reset(made);
  }

  template <class T>
  CudnnDescriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::span<const T> values) {
    DETR_TRY(cudnnBackendSetAttribute(get(), name, type, static_cast<std::int64_t>(values.size()), values.data()));
    return *this;
  }
  template <class T>
  CudnnDescriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T& value) {
    return set(name, type, std::span<const T>(&value, 1));
  }
  CudnnDescriptor& set(cudnnBackendAttributeName_t name, const CudnnDescriptor& descriptor) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, descriptor.get());
  }
  CudnnDescriptor& finalize() {
    DETR_TRY(cudnnBackendFinalize(get()));
    return *this;
  }

  cudnnBackendDescriptor_t get() const { return handle_.get(); }

 private:
  detr::cuda::Unique<cudnnBackendDescriptor_t, cudnnBackendDestroyDescriptor> handle_;
};

/// A map (N, H, W, C), or a weight (O, kh, kw, I), that operations know by `id`.
CudnnDescriptor cudnn_tensor(std::int64_t id, DType dtype, const Shape& shape);
/// One in f32 that passes from an operation to the next within a kernel and has no memory.
CudnnDescriptor cudnn_virtual_tensor(std::int64_t id, const Shape& shape);

/// The library's number of the engine that a configuration sets up.
std::int64_t engine_index(const CudnnDescriptor& config);

/// What runs a graph of operations: an engine with its settings, and the scratch memory it wants.
struct CudnnPlan {
  CudnnDescriptor plan;
  std::int64_t workspace_bytes = 0;
};

/// The library's handle on a stream.
class Cudnn {
 public:
  explicit Cudnn(const Stream& stream);
  cudnnHandle_t handle() const { return handle_.get(); }

  /// Engines with settings for a graph of operations that give the same bits every time and, unless `tensor_cores` says so, use none
  /// (in f32 they would round to TF32); in the order of the library's heuristic.
  std::vector<CudnnDescriptor> configs(std::span<const cudnnBackendDescriptor_t> operations, bool tensor_cores) const;
  /// The plan of an engine; nothing if the engine does not take the graph after all.
  std::optional<CudnnPlan> plan(const CudnnDescriptor& config) const;

 private:
  detr::cuda::Unique<cudnnHandle_t, cudnnDestroy> handle_;
};

/// Enqueues a plan on the tensors with these ids.
void run_plan(const Stream& stream, const Cudnn& cudnn, const CudnnPlan& plan, std::span<const std::int64_t> ids, std::span<void* const> tensors);

}  // namespace detr::kernels::cuda

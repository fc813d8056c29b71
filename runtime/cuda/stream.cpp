#include "runtime/stream.h"

#include <cstdlib>
#include <string_view>

#include "runtime/cuda/stream_state.h"
#include "runtime/cuda/try.h"
#include "runtime/gpus.h"
#include "runtime/side_branch.h"

namespace detr::cuda {
namespace {

/// Whether an allocation gave memory; where none is left, the allocator frees its cache and asks again. Throws DeviceError for other faults.
bool has_memory(cudaError_t status, const char* call) {
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());   // else a library that looks for the last error would find it
    return false;
  }
  expect_success(status, call);
  return true;
}

class DeviceMemory final : public MemorySource {
 public:
  explicit DeviceMemory(int index) : index_(index) {}
  Device device() const override { return Device::cuda(index_); }
  /// With DETRTRAIN_SEGMENTS=off each block is taken by itself, so that compute-sanitizer sees where it ends.
  std::size_t segment_bytes() const override {
    const char* setting = std::getenv("DETRTRAIN_SEGMENTS");
    return setting != nullptr && std::string_view(setting) == "off" ? 0 : kCudaSegmentBytes;
  }
  void* take(std::size_t bytes) override {
    DETR_TRY(cudaSetDevice(index_));
    void* memory = nullptr;
    return has_memory(cudaMalloc(&memory, bytes), "cudaMalloc") ? memory : nullptr;
  }
  void give(void* memory, std::size_t) override { static_cast<void>(cudaFree(memory)); }

 private:
  int index_;
};

/// Host memory that the GPU copies from and to without waiting.
class PinnedMemory final : public MemorySource {
 public:
  explicit PinnedMemory(int index) : index_(index) {}
  Device device() const override { return Device::cpu(); }
  void* take(std::size_t bytes) override {
    DETR_TRY(cudaSetDevice(index_));
    void* memory = nullptr;
    return has_memory(cudaMallocHost(&memory, bytes), "cudaMallocHost") ? memory : nullptr;
  }
  void give(void* memory, std::size_t) override { static_cast<void>(cudaFreeHost(memory)); }

 private:
  int index_;
};

}  // namespace

StreamState::StreamState(int device) : device_(device) {
  DETR_TRY(cudaSetDevice(device));
  DETR_TRY(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device));
  cudaStream_t stream = nullptr;
  DETR_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stream_.reset(stream);
}

StreamParts open_stream(int index) {
  const std::vector<Gpu> gpus = detr::list_gpus();
  if (gpus.empty()) throw DeviceError("cuda:", index, ": there is no CUDA device, or no driver for one");
  if (index < 0 || index >= static_cast<int>(gpus.size())) throw DeviceError("cuda:", index, ": there are ", gpus.size(), " CUDA devices");
  return {Allocator::make(std::make_shared<DeviceMemory>(index)), Allocator::make(std::make_shared<PinnedMemory>(index)), std::make_shared<StreamState>(index)};
}

void copy(const Stream& stream, const Tensor& from, Tensor& to) {
  DETR_TRY(cudaMemcpyAsync(to.raw(), from.raw(), static_cast<std::size_t>(to.bytes()), cudaMemcpyDefault, native(stream)));
}

void clear(const Stream& stream, Tensor& tensor) {
  DETR_TRY(cudaMemsetAsync(tensor.raw(), 0, static_cast<std::size_t>(tensor.bytes()), native(stream)));
}

bool is_capturing(const Stream& stream) {
  cudaStreamCaptureStatus status{};
  DETR_TRY(cudaStreamIsCapturing(native(stream), &status));
  return status == cudaStreamCaptureStatusActive;
}

std::shared_ptr<void> record(const Stream& stream) {
  cudaEvent_t event = nullptr;
  DETR_TRY(cudaEventCreate(&event));
  std::shared_ptr<void> owner(event, [](void* e) { static_cast<void>(cudaEventDestroy(static_cast<cudaEvent_t>(e))); });
  DETR_TRY(cudaEventRecordWithFlags(event, native(stream), is_capturing(stream) ? cudaEventRecordExternal : cudaEventRecordDefault));
  return owner;
}

void wait_for(const Stream& stream, void* event) { DETR_TRY(cudaStreamWaitEvent(native(stream), static_cast<cudaEvent_t>(event), cudaEventWaitDefault)); }

std::shared_ptr<StreamState> state_beside(const Stream& stream) { return std::make_shared<StreamState>(stream.device().index); }

std::shared_ptr<void> mark(const Stream& stream) {
  cudaEvent_t event = nullptr;
  DETR_TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  std::shared_ptr<void> owner(event, [](void* e) { static_cast<void>(cudaEventDestroy(static_cast<cudaEvent_t>(e))); });
  DETR_TRY(cudaEventRecord(event, native(stream)));
  return owner;
}

double milliseconds_between(void* earlier, void* later) {
  float time = 0;
  DETR_TRY(cudaEventElapsedTime(&time, static_cast<cudaEvent_t>(earlier), static_cast<cudaEvent_t>(later)));
  return static_cast<double>(time);
}

void wait_event(void* event) { DETR_TRY(cudaEventSynchronize(static_cast<cudaEvent_t>(event))); }

bool has_passed(void* event) {
  const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
  if (status == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());   // it is no error, and a library that looks for the last one must not find it
    return false;
  }
  expect_success(status, "cudaEventQuery");
  return true;
}

void enter_thread(const Stream& stream) { DETR_TRY(cudaSetDevice(stream.device().index)); }

void wait(const Stream& stream) { DETR_TRY(cudaStreamSynchronize(native(stream))); }

}  // namespace detr::cuda

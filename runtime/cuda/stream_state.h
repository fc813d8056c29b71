#pragma once
#include <map>
#include <memory>
#include <typeindex>

#include "runtime/cuda/handle.h"
#include "runtime/stream.h"

namespace detr::cuda {

/// What a Stream on a GPU holds besides its allocator: the CUDA stream, and the libraries' handles, each made at its first use.
class StreamState {
 public:
  explicit StreamState(int device);

  cudaStream_t stream() const { return stream_.get(); }
  int device() const { return device_; }
  int multiprocessors() const { return multiprocessors_; }

  /// The stream's one T, constructed from (const Stream&) when first asked for.
  template <class T>
  T& get(const Stream& stream) {
    std::shared_ptr<void>& slot = slots_[typeid(T)];
    if (!slot) slot = std::make_shared<T>(stream.lasting());
    return *static_cast<T*>(slot.get());
  }

 private:
  int device_, multiprocessors_ = 0;
  UniqueStream stream_;
  std::map<std::type_index, std::shared_ptr<void>> slots_;   // goes before the stream does
};

/// The CUDA stream behind a Stream.
inline cudaStream_t native(const Stream& stream) { return stream.cuda_state().stream(); }

}  // namespace detr::cuda

#pragma once
#include <functional>
#include <memory>

#include "runtime/allocator.h"
#include "runtime/tensor.h"
#include "runtime/thread_pool.h"

namespace detr {

/// An ordered queue of work on one device, with that device's allocator. Passed to every op, never looked up. On the CPU
/// an op has run when its call returns; its loops share the stream's thread pool.
class Stream {
 public:
  /// A CPU stream with `threads` threads (0: as many as the machine has).
  static Stream cpu(int threads = 0);

  Device device() const { return allocator_->device(); }
  Allocator& allocator() const { return *allocator_; }
  ThreadPool& pool() const { return *pool_; }

  /// Uninitialised memory.
  Tensor empty(const Shape& shape, DType dtype) const;
  Tensor empty_like(const Tensor& tensor) const { return empty(tensor.shape(), tensor.dtype()); }
  Tensor zeros(const Shape& shape, DType dtype) const;

  /// Calls task(begin, end) for the blocks [0, grain), [grain, 2 grain), ... of [0, count), spread over the threads. The
  /// blocks depend on count and grain alone, so sums kept inside a block have the same bits for any number of threads.
  void parallel_blocks(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& task) const;

 private:
  Stream(std::shared_ptr<Allocator> allocator, std::shared_ptr<ThreadPool> pool)
      : allocator_(std::move(allocator)), pool_(std::move(pool)) {}

  std::shared_ptr<Allocator> allocator_;
  std::shared_ptr<ThreadPool> pool_;
};

}  // namespace detr

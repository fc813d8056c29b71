#pragma once
#include <functional>
#include <memory>

#include "runtime/allocator.h"
#include "runtime/tensor.h"
#include "runtime/thread_pool.h"

namespace detr {

namespace cuda {
class StreamState;
struct GraphState;
}  // namespace cuda

class Stream;

/// A place in a stream's queue. A default-constructed one, and those of a CPU stream, have been passed.
class Event {
 public:
  Event() = default;
  explicit Event(std::shared_ptr<void> event) : event_(std::move(event)) {}
  /// Returns when the work before it is done. Throws DeviceError if some of it failed.
  void wait() const;
  /// Whether the work before it is done; does not wait. Throws DeviceError if some of it failed. Not for an event of a capture that goes on.
  bool passed() const;
  /// From an earlier event, in ms, as the device measured; both have been passed and are of one GPU.
  double milliseconds_since(const Event& earlier) const;

 private:
  friend class Stream;
  std::shared_ptr<void> event_;
};

/// Captured work that is launched as one.
class Graph {
 public:
  Graph() = default;
  explicit Graph(std::shared_ptr<cuda::GraphState> state) : state_(std::move(state)) {}
  bool defined() const { return state_ != nullptr; }
  void launch(const Stream& stream) const;
  /// Kernels, and nodes of all kinds.
  std::int64_t kernels() const;
  std::int64_t nodes() const;

 private:
  std::shared_ptr<cuda::GraphState> state_;
};

/// An ordered queue of work on one device, with that device's allocator. Passed to every op, never looked up. On the CPU
/// an op has run when its call returns; its loops share the stream's thread pool. On a GPU a call only enqueues.
class Stream {
 public:
  /// A CPU stream with `threads` threads (0: as many as the machine has), its memory from `memory`.
  static Stream cpu(int threads = 0, const std::shared_ptr<MemorySource>& memory = host_memory());
  /// A stream of its own on GPU `index`, with `threads` threads for the host's part. Throws DeviceError where there is no such GPU
  /// or the build has no CUDA code.
  static Stream cuda(int index, int threads = 0);
  /// A stream on which nothing runs, for finding out what work needs in memory of a device that need not be there: ops check their
  /// arguments and return, copies do nothing, and tensors are addresses without memory behind them. Scratch that an op's
  /// version for the device takes is not seen. What was made on it must not meet a stream on which work runs.
  static Stream planning(Device device);
  bool is_planning() const { return planning_; }

  Device device() const { return allocator_->device(); }
  Allocator& allocator() const { return *allocator_; }
  ThreadPool& pool() const { return *pool_; }
  /// Of a CUDA stream only.
  cuda::StreamState& cuda_state() const { return *cuda_; }

  /// Uninitialised memory. On one stream a block may be dropped as soon as the work that uses it is enqueued: what is made next
  /// from the same memory is used later.
  Tensor empty(const Shape& shape, DType dtype) const;
  /// The same on the host, fit for copies that do not wait (page-locked, where the stream is on a GPU).
  Tensor empty_host(const Shape& shape, DType dtype) const;
  Tensor empty_like(const Tensor& tensor) const { return empty(tensor.shape(), tensor.dtype()); }
  Tensor zeros(const Shape& shape, DType dtype) const;

  /// to = from, of equal shape and dtype, between any two of the host and the stream's device. On a GPU it is enqueued: memory of
  /// the host must stay as it is until then, and is page-locked if nothing is to wait.
  void copy(const Tensor& from, Tensor& to) const;
  /// The tensor on the stream's device: itself if it is there, else a copy.
  Tensor to_device(const Tensor& tensor) const;
  /// The tensor on the host once all work before has been done: itself if it is there, else a copy. A planning stream has no values:
  /// throws InvalidArgument.
  Tensor to_host(const Tensor& tensor) const;
  /// Returns when all enqueued work is done. Throws DeviceError if some of it failed.
  void wait() const;
  /// A mark after the work enqueued so far. In a capture it becomes part of the graph, and each launch sets it anew.
  Event record() const;

  /// The same queue with an allocator of its own on the same memory, for what a repeated step makes and drops: a captured graph writes to the
  /// addresses of its tensors at each launch, so nothing that outlives a step may lie there.
  Stream with_arena() const;
  /// The same queue with the allocator it was made with: for what is made within a step and kept.
  Stream lasting() const;

  /// What is enqueued from here on starts once the event has been passed; the host does not wait.
  void wait_for(const Event& event) const;
  /// A second queue on the same device, with the memory of lasting(). What one makes and the other uses needs an event between, and
  /// must not be dropped before.
  Stream beside() const;

  /// Makes the stream's device that of the calling thread: once in each further thread that asks for its events or enqueues on it. Without it a
  /// thread belongs to GPU 0, and its first call takes memory there.
  void enter_thread() const;

  /// Runs `enqueue`, which enqueues work on this stream, and returns what it enqueued as a graph instead of running it. GPU only.
  /// The same work must have run before, so that libraries are set up and tables are made.
  Graph capture(const std::function<void()>& enqueue) const;
  /// Whether what is enqueued is captured, or part of another queue's capture.
  bool is_capturing() const;

  /// Calls task(begin, end) for the blocks [0, grain), [grain, 2 grain), ... of [0, count), spread over the threads. The
  /// blocks depend on count and grain alone, so sums kept inside a block have the same bits for any number of threads.
  void parallel_blocks(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& task) const;

 private:
  Stream(std::shared_ptr<Allocator> allocator, std::shared_ptr<Allocator> host_allocator, std::shared_ptr<ThreadPool> pool,
         std::shared_ptr<cuda::StreamState> state, bool planning = false)
      : allocator_(allocator), host_allocator_(std::move(host_allocator)), lasting_allocator_(std::move(allocator)), pool_(std::move(pool)), cuda_(std::move(state)), planning_(planning) {}

  std::shared_ptr<Allocator> allocator_, host_allocator_, lasting_allocator_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<cuda::StreamState> cuda_;   // null on the CPU and where nothing runs
  bool planning_ = false;
};

namespace cuda {
/// What a CUDA stream is made of.
struct StreamParts {
  std::shared_ptr<Allocator> device, pinned;
  std::shared_ptr<StreamState> state;
};
StreamParts open_stream(int index);
void copy(const Stream& stream, const Tensor& from, Tensor& to);
void clear(const Stream& stream, Tensor& tensor);
void wait(const Stream& stream);
std::shared_ptr<void> record(const Stream& stream);
void wait_event(void* event);
bool has_passed(void* event);
bool is_capturing(const Stream& stream);
void enter_thread(const Stream& stream);
void wait_for(const Stream& stream, void* event);
std::shared_ptr<StreamState> state_beside(const Stream& stream);
double milliseconds_between(void* earlier, void* later);
std::shared_ptr<GraphState> capture(const Stream& stream, const std::function<void()>& enqueue);
void launch(const Stream& stream, const GraphState& graph);
std::int64_t count_kernels(const GraphState& graph);
std::int64_t count_nodes(const GraphState& graph);
}  // namespace cuda

}  // namespace detr

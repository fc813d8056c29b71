#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/stream.h"

namespace detr::dist {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

/// Which collective of a run a call is.
struct Place {
  std::uint64_t tag = 0;   ///< the same on all ranks, and another one for each collective of a step and the next; the low 32 bits count
  std::string phase;       ///< for messages, such as "bucket 2 of step 417"
};

/// A collective that has been issued. It holds the tensor's memory until it is done.
class Work {
 public:
  Work() = default;
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  /// After it, work enqueued on `stream` finds the result. On the CPU it returns when the result is there; on a GPU at once.
  /// Throws CommError if the collective failed or is not done by the deadline; the communicator is then dead.
  virtual void wait(const Stream& stream, Clock::time_point deadline) = 0;
};

/// A group of ranks, 0 to size() - 1, that run the same collectives in the same order. One thread issues them; abort() is for any thread.
/// After its first error a communicator is dead: every later call throws CommError with the first reason.
class Communicator {
 public:
  Communicator() = default;
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// "single", "gloo" or "nccl".
  virtual const char* engine() const = 0;

  /// tensor = the sum of the ranks' tensors, f32, f64, bf16 (every hop rounds) or i64, in an order that the size and the length alone fix:
  /// the same bits on all ranks and on every run. Starts once the work enqueued on `stream` so far is done; the tensor must be left
  /// alone until the work has been waited for. Throws InvalidArgument for another dtype or a tensor on another device than the engine's.
  virtual std::shared_ptr<Work> all_reduce_sum(const Stream& stream, const Tensor& tensor, const Place& place) = 0;
  /// tensor = rank `root`'s tensor, of any dtype.
  virtual std::shared_ptr<Work> broadcast(const Stream& stream, const Tensor& tensor, int root, const Place& place) = 0;
  /// Returns when all ranks have called it: of the host, not of work on a GPU. Throws CommError naming the ranks that did not come.
  virtual void barrier(Milliseconds timeout, const std::string& phase) = 0;
  /// Returns when the work enqueued on `stream` is done. Throws CommError at the deadline, or once a peer is known to be lost, so that no
  /// host waits for a GPU whose peers are gone.
  virtual void watch(const Stream& stream, Clock::time_point deadline, const std::string& phase) = 0;
  /// Ends everything under way with `reason`, here and, as their connections close, on the other ranks.
  virtual void abort(const std::string& reason) noexcept = 0;
};

/// The group of one: nothing to do, on any device.
std::unique_ptr<Communicator> single_communicator();

/// Throws InvalidArgument unless all_reduce_sum takes the tensor.
void expect_summable(const Tensor& tensor, const std::string& phase);

}  // namespace detr::dist

#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "dist/flight_record.h"
#include "runtime/stream.h"

namespace detr::dist {

class Control;

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

/// Which collective of a run a call is.
struct Place {
  std::uint64_t tag = 0;   ///< the same on all ranks, and another one for each collective of a step and the next; the low 32 bits count
  std::string phase;       ///< for messages, such as "bucket 2 of step 417"
};

/// A collective that has been issued. It holds the tensors' memory until it is done.
class Work {
 public:
  Work() = default;
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  /// After it, work enqueued on `stream` finds the result. Once for each work. With "gloo" and "gloo-staged" it returns when the ranks have
  /// exchanged their values; with "nccl" at once. Throws CommError if the collective failed or is not done by the deadline; the communicator is
  /// then dead.
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
  /// "single", "gloo", "gloo-staged" or "nccl".
  virtual const char* engine() const = 0;
  /// Whether a captured graph may hold its collectives.
  virtual bool capturable() const = 0;

  /// tensor = the sum of the ranks' tensors, f32, f64, bf16 (every hop rounds) or i64, in an order that the size and the length alone fix:
  /// the same bits on all ranks and on every run. Starts once the work enqueued on `stream` so far is done; the tensor must be left
  /// alone until the work has been waited for. Throws InvalidArgument for another dtype or a tensor on another device than the engine's.
  virtual std::shared_ptr<Work> all_reduce_sum(const Stream& stream, const Tensor& tensor, const Place& place) = 0;
  /// all = every rank's `mine`, by rank. mine (K...), all (size, K...) of any dtype; the same K on all ranks. `mine` may be its own part of `all`.
  virtual std::shared_ptr<Work> all_gather(const Stream& stream, const Tensor& mine, const Tensor& all, const Place& place) = 0;
  /// tensor = rank `root`'s tensor, of any dtype.
  virtual std::shared_ptr<Work> broadcast(const Stream& stream, const Tensor& tensor, int root, const Place& place) = 0;
  /// Returns when all ranks have called it: of the host, not of work on a GPU. Throws CommError naming the ranks that did not come.
  virtual void barrier(Milliseconds timeout, const std::string& phase) = 0;
  /// Throws CommError if the communicator is dead, the engine reports an error or a peer is known to be lost. Does not wait.
  virtual void check(const std::string& phase) = 0;
  /// Ends everything under way with `reason`, here and, as their connections close, on the other ranks. Returns in bounded time, about a second.
  virtual void abort(const std::string& reason) noexcept = 0;

  /// Returns when the event has been passed, or when `passed` says so: the host's wait for a GPU whose peers may be gone. Throws CommError
  /// at the deadline, or once check() does; DeviceError if work before the event failed. Not during a capture.
  void watch(const Event& event, Clock::time_point deadline, const std::string& phase);
  void watch(const std::function<bool()>& passed, Clock::time_point deadline, const std::string& phase);
  /// The same for all work enqueued on the stream so far.
  void watch(const Stream& stream, Clock::time_point deadline, const std::string& phase) { watch(stream.record(), deadline, phase); }

  /// The last collectives that were issued. Whoever launches a captured step enters it here.
  virtual FlightRecord& record() { return *record_; }

 protected:
  /// The barrier of engines whose ranks have control connections.
  void barrier_over(Control& control, Milliseconds timeout, const std::string& phase);
  /// Enters in the record what has ended, where nothing else does; watch() calls it now and then, and before it returns.
  virtual void update_record() noexcept {}

  const std::shared_ptr<FlightRecord> record_ = std::make_shared<FlightRecord>();   // shared with the engine's threads
};

/// The group of one: nothing to do but the copy of all_gather, on any device.
std::unique_ptr<Communicator> single_communicator();

/// Throws InvalidArgument unless all_reduce_sum, all_gather or broadcast of a group of `size` takes the tensors.
void expect_summable(const Tensor& tensor, const std::string& phase);
void expect_gatherable(const Tensor& mine, const Tensor& all, int size, const std::string& phase);
void expect_root(int root, int size, const std::string& phase);

}  // namespace detr::dist

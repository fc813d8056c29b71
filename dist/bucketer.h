#pragma once
#include <functional>
#include <map>
#include <vector>

#include "dist/communicator.h"
#include "dist/layout.h"

namespace detr::dist {

/// Throws CommError, before the engine is called, unless a collective is as long as the plan says. With another length on one rank an engine may mix
/// up tensors, or end the process on a thread where nobody can catch it. slot: of the step's plan.
void expect_planned(int rank, const Place& place, std::int64_t slot, std::int64_t planned, std::int64_t given);

/// The same for its turn: of two that are equally long an engine may sum one of a rank with the other of the next, and nobody would notice.
/// due: the slot that the plan has now.
void expect_in_order(int rank, const Place& place, std::int64_t slot, std::int64_t due);

/// What a bucketer does besides summing gradients. All of it the same on all ranks, but for the fault.
struct BucketerOptions {
  std::int64_t extras = 0;          ///< further f64 values that are summed in the trailer
  Milliseconds timeout{120000};     ///< from finish() to the end of a step's collectives
  /// By bucket, not falling: how many exchanges of backward go out before it; empty: none. See Note [One order of collectives].
  std::vector<int> exchanges_before = {};
  std::int64_t slots_before = 0;    ///< collectives of a step that others issue; they have the tags before the bucketer's own

  /// A rehearsed failure: two buckets that go out in each other's place; a bucket of which half is to be sent. -1: none.
  struct Fault {
    int swap_a = -1, swap_b = -1, shorten = -1;
  };
};

/// Sums the gradients of the ranks, bucket by bucket, while backward goes on. A step is: begin(); for each parameter at most one of mark_ready()
/// and mark_missing(), in any order; finish(). Every rank issues the same collectives in the same order, whatever its backward
/// reached: a parameter that nobody marked goes out as what lies in the buffer, which the caller zeroes before each step.
/// Then comes the trailer, one f64 sum over [ranks that used it, for each parameter; extras]. One thread calls it.
///
/// Note [One order of collectives]
/// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
/// Ranks that run collectives in different orders hang, or mix two tensors. Backward has collectives of its own, the exchanges of
/// synchronised batch norms, and where a rank's loss does not reach some parameters, their buckets are ready earlier there: it would
/// send a bucket where the others still exchange. So the order is fixed before the first step, from a backward that reaches
/// everything: a bucket goes out after as many exchanges as it did there, on all ranks. It is ready by then, since what a rank does not
/// reach makes nothing later. exchange() says where backward has come to.
class Bucketer {
 public:
  /// grads: (layout.total) of layout.dtype, on the stream's device; it stays the buffer for the whole run.
  Bucketer(Communicator& communicator, Layout layout, const Tensor& grads, const Stream& stream, BucketerOptions options = {});

  void begin(std::int64_t step);
  /// An earlier micro-batch of this step has used the parameter (by its index in the layout).
  void mark_used(int parameter);
  /// Backward will not reach the parameter on this rank, so nothing is waited for.
  void mark_missing(int parameter);
  /// The last contribution to the parameter's gradient is enqueued. Issues each bucket whose turn has come and whose parameters are ready.
  /// Throws InvalidArgument naming the parameter if it was marked before, CommError if the communicator is dead.
  void mark_ready(int parameter);
  /// Calls `issue`, which issues the next exchange of backward. Throws InvalidArgument naming the parameter if a bucket that goes out before it is
  /// not ready.
  void exchange(const std::function<void()>& issue);
  /// Issues what is left and the trailer, and waits: what is enqueued on the stream after it finds the sums (not divided by the number of
  /// ranks) in grads, used() and extras(). Throws CommError naming the rank, the bucket and the step, also for one that is not the plan's
  /// next: then the engine has not been called.
  void finish();

  /// (P) f64: how many ranks used each parameter, after finish(). Where it is 0 the optimiser leaves the parameter alone.
  Tensor used() const { return trailer_.slice(0, count()); }
  /// (extras) f64: to be written in every step between begin() and finish(), summed after it.
  Tensor extras() const { return trailer_.slice(count(), trailer_.numel()); }

  const Layout& layout() const { return layout_; }
  /// Collectives of a step.
  std::int64_t plan_length() const { return options_.slots_before + static_cast<std::int64_t>(layout_.buckets.size()) + 1; }
  /// Of a collective of this step that others issue, slot < slots_before.
  std::uint64_t tag(std::int64_t slot) const { return static_cast<std::uint64_t>(step_ * plan_length() + slot); }
  std::int64_t step() const { return step_; }

  /// Called before a bucket is issued, with its index, in the order of the stream.
  std::function<void(int bucket)> before_bucket;
  /// For the steps from here on.
  void set_fault(const BucketerOptions::Fault& fault) { fault_ = fault; }

 private:
  enum class Mark : std::uint8_t { none, missing, ready };

  std::int64_t count() const { return static_cast<std::int64_t>(layout_.parameters.size()); }
  void mark(int parameter, Mark mark);
  void expect_in_step(int parameter) const;
  int exchanges_before(std::size_t bucket) const { return options_.exchanges_before.empty() ? 0 : options_.exchanges_before[bucket]; }
  void issue_due();
  void issue_bucket();
  void issue(const Tensor& tensor, std::int64_t slot, std::int64_t planned, const std::string& what);
  void write_used();

  Communicator* communicator_;
  Layout layout_;
  BucketerOptions options_;
  BucketerOptions::Fault fault_;
  Tensor grads_, trailer_;
  Stream stream_;
  // By pattern. Captured graphs copy from here, so what is in it stays; it is as many as the model has ways through its parameters, such as
  // with denoising and without.
  std::map<std::vector<double>, Tensor> used_on_device_;

  std::int64_t step_ = -1;
  bool in_step_ = false;
  std::vector<Mark> marks_;
  std::vector<double> used_;
  std::vector<std::size_t> waiting_;   // by bucket: parameters that are not ready
  std::size_t next_ = 0;               // the bucket that is to be issued next
  int exchanges_ = 0;                  // of this step's backward
  std::vector<std::shared_ptr<Work>> works_;   // of this step's buckets and trailer, in order
};

}  // namespace detr::dist

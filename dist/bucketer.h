#pragma once
#include <vector>

#include "dist/communicator.h"
#include "dist/layout.h"

namespace detr::dist {

/// Sums the gradients of the ranks, bucket by bucket, while backward goes on. A step is: begin(); for each parameter at most one of mark_ready()
/// and mark_missing(), in any order; finish(). Every rank issues the same collectives in the same order, whatever its backward
/// reached: a parameter that nobody marked goes out as what lies in the buffer, which the caller zeroes before each step.
/// Then comes the trailer, one f64 sum over [ranks that used it, for each parameter; extras]. One thread calls it.
class Bucketer {
 public:
  /// grads: (layout.total) of layout.dtype, on the stream's device; it stays the buffer for the whole run.
  /// extras: number of further f64 values to be summed in the trailer. timeout: from finish() to the end of a step's collectives.
  Bucketer(Communicator& communicator, Layout layout, const Tensor& grads, const Stream& stream, std::int64_t extras = 0, Milliseconds timeout = Milliseconds(120000));

  void begin(std::int64_t step);
  /// An earlier micro-batch of this step has used the parameter (by its index in the layout).
  void mark_used(int parameter);
  /// Backward will not reach the parameter on this rank, so nothing is waited for.
  void mark_missing(int parameter);
  /// The last contribution to the parameter's gradient is enqueued. Issues each bucket whose turn has come and whose parameters are ready.
  /// Throws InvalidArgument naming the parameter if it was marked before, CommError if the communicator is dead.
  void mark_ready(int parameter);
  /// Issues what is left and the trailer, and waits: what is enqueued on the stream after it finds the sums (not divided by the number of
  /// ranks) in grads, used() and extras(). Throws CommError naming the rank, the bucket and the step.
  void finish();

  /// (P) f64: how many ranks used each parameter, after finish(). Where it is 0 the optimiser leaves the parameter alone.
  Tensor used() const { return trailer_.slice(0, count()); }
  /// The same on the host: the parameters that no rank used. Waits for the stream.
  std::vector<int> unused_everywhere() const;
  /// (extras) f64: to be written in every step between begin() and finish(), summed after it.
  Tensor extras() const { return trailer_.slice(count(), trailer_.numel()); }

  const Layout& layout() const { return layout_; }
  /// Collectives of a step.
  std::int64_t plan_length() const { return static_cast<std::int64_t>(layout_.buckets.size()) + 1; }

 private:
  enum class Mark : std::uint8_t { none, missing, ready };

  std::int64_t count() const { return static_cast<std::int64_t>(layout_.parameters.size()); }
  void mark(int parameter, Mark mark);
  void expect_in_step(int parameter) const;
  void issue_bucket();
  void issue(const Tensor& tensor, std::int64_t slot, const std::string& what);
  void write_used();

  Communicator* communicator_;
  Layout layout_;
  Tensor grads_, trailer_, sent_;   // sent_: the used bits on the host, as they were copied last
  Event copied_;                    // passed once sent_ may be overwritten
  Stream stream_;
  Milliseconds timeout_;

  std::int64_t step_ = -1;
  bool in_step_ = false;
  std::vector<Mark> marks_;
  std::vector<double> used_;
  std::vector<std::size_t> waiting_;   // by bucket: parameters that are not ready
  std::size_t next_ = 0;               // the bucket that is to be issued next
  std::vector<std::shared_ptr<Work>> works_;
};

}  // namespace detr::dist

#pragma once
#include <memory>
#include <string>
#include <vector>

#include "autograd/statistics.h"
#include "autograd/tape.h"
#include "dist/bucketer.h"
#include "dist/control.h"
#include "train/store.h"

namespace detr::train {

/// The order of the collectives of a step's backward, see Note [One order of collectives] in dist/bucketer.h.
struct CollectivePlan {
  std::vector<int> forward_lengths;       ///< of the exchanges of one forward pass, in f64 values of a rank
  std::vector<int> backward;              ///< the exchanges of one backward pass, each by the number of its layer's exchange in forward
  std::vector<int> exchanges_before;      ///< by bucket
  std::string text() const;               ///< for the manifest
};

/// The ranks of a run, as a step of one of them sees them.
struct StepRanks {
  int size = 1;
  dist::Communicator* communicator = nullptr;   ///< null for one rank, and on a planning stream
  dist::Control* control = nullptr;             ///< is told where the step is; null for one rank
  bool share_statistics = true;                 ///< batch norms that are not frozen use the statistics of all ranks
  dist::BucketCaps caps;                        ///< of gradients in the store's dtype
  bool rank_rules = false;                      ///< the losses are divided by at least `size`: the reference's max(boxes / ranks, 1) before its mean over the ranks
  bool narrow = false;                          ///< gradients are rounded to bf16 for the sum, which rounds at every hop
  dist::Milliseconds timeout{120000};           ///< for the collectives of a step
  CollectivePlan plan;                          ///< needed where statistics are shared
};

/// The layout of a store's gradients: its own order, so that a bucket is a slice of grads().
dist::Layout layout_of(const ParameterStore& store, const dist::BucketCaps& caps);

/// All collectives of training steps: the exchanges of batch norms, the buckets and the trailer, in the order of the plan. Where backward does
/// not come to a layer on this rank (its loss is a constant, say), zeros are exchanged for it, since the other ranks wait.
/// On a planning stream nothing is sent: the order is noted.
class Collectives final : public SharedStatistics {
 public:
  /// extras: values of the trailer besides the used counts. micro_batches: forward passes of a step.
  Collectives(const StepRanks& ranks, ParameterStore& store, const Stream& stream, std::int64_t micro_batches, std::int64_t extras);

  int ranks() const override { return ranks_.size; }
  int gather_forward(const Stream& stream, const Tensor& mine, Tensor& all) override;
  void gather_backward(const Stream& stream, int call, const Tensor& mine, Tensor& all) override;

  /// What a context needs to share statistics; null where they are not shared.
  SharedStatistics* statistics() { return shares_ ? this : nullptr; }

  /// Before a forward pass.
  void begin(std::int64_t step, std::int64_t micro_batch);
  /// Before backward, with what the tape reached: the tape's on_counted. Buckets go out in the last micro-batch of a step only.
  void counted(const Tape& tape);
  /// The tape's on_ready.
  void ready(const Parameter& parameter);
  /// After backward: exchanges what is left of this pass and, in the last micro-batch, sends what is left of the step. After it the stream finds
  /// the sums in the store's gradients and in the bucketer's used() and extras().
  void finish();

  /// Where every rank's batch norms have statistics of their own: the running ones become rank 0's, so that the replicas stay equal.
  void share_buffers(Tensor& buffers);

  /// Called before a bucket is sent, with its index, in the order of the stream.
  std::function<void(int bucket)> before_bucket;

  dist::Bucketer& bucketer() { return bucketer_; }
  const dist::Bucketer& bucketer() const { return bucketer_; }
  std::int64_t buckets() const { return std::ssize(bucketer_.layout().buckets); }
  /// What a planning stream has found, once a step has been planned.
  CollectivePlan plan() const;

 private:
  bool last() const { return micro_batch_ + 1 == micro_batches_; }
  void exchange(const Stream& stream, const Tensor& mine, Tensor& all, bool backward, int call);
  void exchange_backward(const Stream& stream, int call, const Tensor& mine, Tensor& all);
  void skip_to(int call);
  /// Tells the control what the host does, where it may wait for other ranks in it.
  void enter(const char* phase, dist::Waits waits);

  StepRanks ranks_;
  Stream stream_;
  ParameterStore& store_;
  std::int64_t micro_batches_;
  bool shares_, planning_, narrow_;
  Tensor sent_;                  // the buffer that is summed: the store's gradients, or bf16 copies of them
  CollectivePlan found_;
  dist::Bucketer bucketer_;
  std::vector<int> place_;       // by Parameter::index: its place in the layout, -1 for what is not trained
  std::vector<bool> reached_;    // by place, in the micro-batches of this step before the last
  std::int64_t micro_batch_ = 0;
  int forward_ = 0;              // exchanges of this forward pass
  std::size_t backward_ = 0;     // and of this backward pass
};

}  // namespace detr::train

#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/batch.h"
#include "models/detr/criterion.h"
#include "models/detr/rtdetr.h"
#include "train/collectives.h"
#include "train/inputs.h"
#include "train/optimizer.h"
#include "train/records.h"
#include "train/store.h"

namespace detr::train {

/// Of a step over all ranks: the same on each of them, but for `fault`.
struct StepResult {
  double loss = 0;
  NamedValues terms;
  double grad_norm = 0;
  bool applied = true;
  std::string fault;       ///< if the step was skipped: where this rank's first value that is not finite is; empty where all of its own are
  std::string sum_fault;   ///< if the step was skipped: the first parameter whose gradient, summed over the ranks, is not finite
};

struct StepOptions {
  bool graphs = true;                 ///< capture; without effect on the CPU, and where the communicator cannot be captured
  std::int64_t micro_batches = 1;     ///< equal parts of a batch, each with a forward and a backward pass of its own; the gradients are added
  StepRanks ranks = {};
};

/// A gradient value that a rehearsed failure writes before the sum over the ranks.
struct BadValue {
  std::string parameter;
  std::int64_t index = 0;
  double value = 0;
};

/// Failures that a step rehearses on this rank, see runtime/faults.h. Asked while a step is enqueued, so not with graphs.
struct StepFaults {
  std::function<void(const char* phase, std::int64_t step)> at;   ///< the step comes to "forward", "backward", "reduce" or "update"
  std::function<bool(std::int64_t step, std::int64_t micro_batch, const std::string& parameter)> drops;   ///< it gets no contribution
  std::function<bool(std::int64_t step, std::int64_t micro_batch)> constant_loss;
  std::function<std::vector<BadValue>(std::int64_t step)> bad_values;
  std::function<dist::BucketerOptions::Fault(std::int64_t step)> buckets;
};

/// A whole training step: forward, matching, losses, backward, sums over the ranks, clipping, AdamW, moving average. On a GPU it is enqueued
/// without a wait: eagerly for the first batch of a key (sizes of the pictures, box and denoising slots), as captured graphs from the
/// second on. Both do the same work, so it never matters which ran.
class Step {
 public:
  Step(models::RtDetr& model, ParameterStore& store, Optimizer& optimizer, const Stream& stream, const StepOptions& options = {});

  /// batch: this rank's part of the step's; batch.agreed counts the boxes of all. A step whose loss or gradient is not finite changes nothing: no weights, moments, statistics or moving average.
  StepResult run(const data::Batch& batch, double lr_factor);

  /// The two halves of run(): a step is enqueued, at most kInFlight before their results are asked for in the same order. The batch
  /// may go once start() returns.
  void start(const data::Batch& batch, double lr_factor);
  StepResult finish();
  static constexpr std::size_t kInFlight = 2;

  /// Before the first step: how many an earlier process of the run has made. Numbers in messages and those that `faults` is asked with go on from there.
  void count_from(std::int64_t steps);
  /// Before the first step: takes memory for what steps make and drop in one piece, and keeps it. Otherwise it comes bit by bit, and
  /// where steps have several sizes, the pieces of smaller ones are of little use to larger ones.
  void reserve(std::int64_t bytes);
  /// On a planning stream, instead of a step: makes and drops what a step of this key does.
  void plan(const StepKey& key);

  /// After finish(): parameters that no rank's loss reached.
  const std::vector<std::string>& missing() const { return missing_; }
  /// On a planning stream, after plan(): the order of the collectives.
  CollectivePlan collective_plan() const { return collectives_.plan(); }
  std::int64_t micro_batches() const { return options_.micro_batches; }
  /// Bytes of what a step makes and drops, the most so far.
  std::size_t peak_bytes() const { return arena_.allocator().peak_bytes(); }
  /// The stream whose memory a step uses; evaluation between steps may use it too.
  const Stream& stream() const { return arena_; }
  /// The graph of the last started batch's key (of its last micro-batch); undefined if there is none.
  Graph graph() const { return last_ ? last_->graph : Graph(); }
  /// Called while a step is enqueued, after each op ("forward conv2d", "backward conv2d") and each later part ("optimizer"), where it
  /// is set (a measuring aid). Batches whose graph exists are not enqueued again: set it before the first batch.
  std::function<void(const std::string& part)> after_part;
  /// Before the first batch; a step with any of them must not be captured.
  StepFaults faults;

 private:
  /// What is kept for the batches of a key.
  struct Program {
    StepKey key;
    StepInputs inputs;
    Graph graph;
    Tensor report;                        // (...) f64, what finish() reads
    std::vector<Shape> terms;             // of the report's parts, in its order
    std::size_t statuses = 0;
    std::int64_t images = 0, outputs = 0;
  };
  struct Flight {
    std::vector<const Program*> programs;   // of the micro-batches
    std::vector<Tensor> reports;            // on the host
    Event done;
    Upload upload;
    std::optional<std::uint64_t> number;    // of a launched step in the record of collectives
  };

  Program& program_of(const StepKey& key);
  bool last(const Program& program) const { return program.key.micro_batch + 1 == options_.micro_batches; }
  void launch(Program& program, bool is_new);
  void enqueue(Program& program);
  void before_bucket(int index);
  void update(const Tensor& buffers);
  /// What is wrong on this rank in one micro-batch; empty if nothing is.
  std::string diagnose(const Program& program, const double* report) const;
  std::string fault_in(const Program& program, const double* first_bad, const double* statuses, const NamedValues& terms) const;
  std::string bad_gradient(const double* first_bad) const;

  models::RtDetr& model_;
  ParameterStore& store_;
  Optimizer& optimizer_;
  models::Criterion criterion_;
  Stream arena_;
  StepOptions options_;
  std::int64_t values_;                   // of a micro-batch's losses in the trailer
  Collectives collectives_;
  Tape tape_;
  std::optional<SideBranch> side_;        // for gradients of weights; none on the CPU
  Tensor kept_buffers_, reserved_;        // the latter a byte of what reserve() took: it is in use, so the piece is not given back
  Tensor applied_;                        // (1) f64, kApply of the step before
  Tensor bad_gradients_;                  // (buckets) i64, first value that is not finite in this rank's own gradient
  std::map<StepKey, Program> programs_;   // stay for good: as many as keys_of() lists, times micro-batches
  std::map<std::vector<std::int64_t>, Tensor> pictures_;   // by shape
  const Program* last_ = nullptr;
  std::vector<Flight> flights_;           // a ring
  std::size_t started_ = 0, finished_ = 0;
  std::vector<std::string> missing_;
};

}  // namespace detr::train

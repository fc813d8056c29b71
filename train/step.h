#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "data/batch.h"
#include "models/detr/criterion.h"
#include "models/detr/rtdetr.h"
#include "train/inputs.h"
#include "train/optimizer.h"
#include "train/records.h"
#include "train/store.h"

namespace detr::train {

struct StepResult {
  double loss = 0;
  NamedValues terms;
  double grad_norm = 0;
  bool applied = true;
  std::string fault;   ///< where the first value that is not finite is, if the step was skipped
};

/// A whole training step: forward, matching, losses, backward, clipping, AdamW, moving average. On a GPU it is enqueued without a
/// wait: eagerly for the first batch of a key (sizes of the pictures, box and denoising slots), as one captured graph from the
/// second on. Both do the same work, so it never matters which ran.
class Step {
 public:
  /// graphs: capture; without effect on the CPU.
  Step(models::RtDetr& model, ParameterStore& store, Optimizer& optimizer, const Stream& stream, bool graphs = true);

  /// A step whose loss or gradient is not finite changes nothing: no weights, moments, statistics or moving average.
  StepResult run(const data::Batch& batch, double lr_factor);

  /// The two halves of run(): a step is enqueued, at most kInFlight before their results are asked for in the same order. The batch
  /// may go once start() returns.
  void start(const data::Batch& batch, double lr_factor);
  StepResult finish();
  static constexpr std::size_t kInFlight = 2;

  /// Before the first step: takes memory for what steps make and drop in one piece, and keeps it. Otherwise it comes bit by bit, and
  /// where steps have several sizes, the pieces of smaller ones are of little use to larger ones.
  void reserve(std::int64_t bytes);
  /// On a planning stream, instead of a step: makes and drops what a step of this key does.
  void plan(const StepKey& key);

  /// After finish(): parameters that the loss did not reach.
  const std::vector<std::string>& missing() const { return missing_; }
  /// Bytes of what a step makes and drops, the most so far.
  std::size_t peak_bytes() const { return arena_.allocator().peak_bytes(); }
  /// The stream whose memory a step uses; evaluation between steps may use it too.
  const Stream& stream() const { return arena_; }
  /// The graph of the last started batch's key; undefined if there is none.
  Graph graph() const { return last_ ? last_->graph : Graph(); }
  /// Called while a step is enqueued, after each op ("forward conv2d", "backward conv2d") and each later part ("optimizer"), where it
  /// is set (a measuring aid). Batches whose graph exists are not enqueued again: set it before the first batch.
  std::function<void(const std::string& part)> after_part;

 private:
  /// What is kept for the batches of a key.
  struct Program {
    StepKey key;
    StepInputs inputs;
    Graph graph;
    Tensor used, report;                  // (S) u8; (...) f64, what finish() reads
    std::vector<Shape> terms;             // of the report's parts, in its order
    std::size_t statuses = 0;
    std::int64_t images = 0, outputs = 0;
    std::vector<std::string> missing;
  };
  struct Flight {
    const Program* program = nullptr;
    Tensor report;                        // on the host
    Event done;
    Upload upload;
  };

  Program& program_of(const StepKey& key);
  void enqueue(Program& program);
  StepResult read(const Program& program, const Tensor& report) const;
  std::string diagnose(const Program& program, const double* statuses, const Tensor& norms, const double* first_bad, const NamedValues& terms, bool healthy) const;

  models::RtDetr& model_;
  ParameterStore& store_;
  Optimizer& optimizer_;
  models::Criterion criterion_;
  Stream arena_;
  bool graphs_;
  Tape tape_;
  Tensor kept_buffers_, reserved_;        // the latter a byte of what reserve() took: it is in use, so the piece is not given back
  std::map<StepKey, Program> programs_;
  std::map<std::vector<std::int64_t>, Tensor> pictures_;   // by shape
  const Program* last_ = nullptr;
  std::vector<Flight> flights_;           // a ring
  std::size_t started_ = 0, finished_ = 0;
  std::vector<std::string> missing_;
};

}  // namespace detr::train

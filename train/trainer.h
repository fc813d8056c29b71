#pragma once
#include <atomic>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "data/coco.h"
#include "data/loader.h"
#include "models/detr/rtdetr.h"
#include "runtime/faults.h"
#include "train/checkpoint.h"
#include "train/config.h"
#include "train/memory_plan.h"
#include "train/records.h"
#include "train/replicas.h"
#include "train/step.h"

namespace detr::train {

/// One split, read and checked.
struct SplitData {
  std::shared_ptr<const data::CocoData> coco;
  std::filesystem::path images;
};

/// What a run is given besides its configuration.
struct RunOptions {
  SplitData train, val;                  ///< val.coco may be null: then nothing is evaluated
  std::filesystem::path output_dir;
  std::filesystem::path resume;          ///< a checkpoint of ours, or empty
  std::filesystem::path tuning;          ///< weights to start from, or empty
  std::filesystem::path backbone;        ///< weights of the backbone to start from, or empty
  std::string config_json;               ///< resolved, stored in checkpoints
  std::string version;
  bool allow_partial = false;
  std::int64_t max_steps = 0;            ///< global steps in all; 0: as the epochs say
  double time_limit_s = 0;               ///< 0: none
  std::int64_t overfit = 0;              ///< train and evaluate on the first N training images without augmentation; 0: off
  std::int64_t save_every_steps = 0;     ///< besides the epochs' saves; 0: none
  std::vector<std::string> freeze;       ///< expressions searched in parameter names
  std::size_t cache_bytes = 0;           ///< decoded pictures kept in memory by the training loader
  RunRanks ranks;
  Faults faults;                         ///< failures to rehearse
};

enum class RunEnd { finished, already_finished, stopped };

struct RunSummary {
  RunEnd end = RunEnd::finished;
  RunState state;
  double images_per_s = 0;
  std::optional<data::EvalResult> last, best;
  std::string hash;                      ///< state_hash at the end
};

/// The training run: epochs of steps, evaluation, checkpoints, resume. One object runs once. Where a run has several ranks, each has a
/// trainer; rank 0's reads checkpoints, writes and reports, the others' report what concerns them alone.
class Trainer {
 public:
  /// Builds model, store and loaders, meets the other ranks, and restores a checkpoint or weights; reports what it finds. Nothing is written
  /// yet. Throws CommError naming the first difference where the ranks are not of one run.
  Trainer(const RunConfig& config, RunOptions options, const Stream& stream, Reporter& reporter);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// Runs to the end, or until `stop` is set on any rank: then the state is saved after the step in hand (of several ranks, after one that
  /// all of them still make) and the result is `stopped`.
  /// Throws Diverged where more than max_skips steps in a row could not be made, naming step, image ids and first bad tensor.
  RunSummary run(const std::atomic<bool>& stop);

  models::RtDetr& model() { return *model_; }
  ParameterStore& store() { return *store_; }
  std::int64_t steps_per_epoch() const { return train_loader_->steps(); }
  /// Detections of the last evaluation, and the truth they belong to (for pictures and reports).
  const std::vector<data::Detection>& detections() const { return detections_; }
  const SplitData& validation() const { return options_.val; }
  const SplitData& training() const { return options_.train; }

 private:
  void build_loaders();
  /// What the ranks agree on about a step, on the loader's thread.
  data::StepCounts agree(std::int64_t epoch, std::int64_t step, const data::StepCounts& local);
  void meet_ranks();
  /// What follows once the ranks have met.
  void begin(std::int64_t reserve);
  RunSummary run_epochs();
  dist::Manifest manifest() const;
  std::unique_ptr<models::RtDetr> make_model() const;
  MemoryRequest memory_request() const;
  /// On a GPU, before anything is made there: tells what the run needs, and returns the bytes for Step::reserve(); 0 on the CPU.
  /// Throws OutOfMemory where it does not fit.
  std::int64_t plan_memory(const MemoryRequest& request) const;
  /// Of a training picture.
  std::int64_t most_boxes() const;
  void restore();
  /// Rank 0's state from its files.
  void load_state();
  /// Goes on after the pictures of the epoch that the checkpoint has seen, whatever the batch was then.
  void find_place(const CheckpointInfo& info);
  /// Tells which settings are not those of the checkpoint.
  void tell_changes(const CheckpointInfo& info);
  void describe();
  /// Lines that are the same on all ranks.
  void note(const std::string& line) const;
  void warn(const std::string& line) const;
  /// What this rank does, for messages about it.
  void enter(const char* phase, dist::Waits waits = dist::Waits::nobody) const;
  bool next_batch(data::Batch& batch);
  /// Warns of the pictures that the loader could not read, from the `told`-th on.
  void tell_bad(const data::Loader& loader, std::size_t& told);
  void stop_loader();
  /// Rehearsed failures: those inside a step; bits of this replica that flip after a step.
  void arm_step();
  void flip_bits();
  /// Throws ConfigError for one that would hit nothing.
  void check_faults() const;
  /// Steps become graphs, where the device and the engine can.
  bool captures() const;
  /// Whether this rank is asked to stop; the ranks then agree where.
  bool wished() const;
  bool run_epoch(RunSummary& summary);
  void count(const StepResult& result, const std::vector<std::int64_t>& image_ids);
  /// Where and on which rank a step that was skipped is not finite, and the images.
  std::string blame(const StepResult& result, const std::vector<std::int64_t>& image_ids);
  bool finish_epoch(RunSummary& summary, EpochRecord& record);
  void keep_best(const EpochRecord& record);
  /// Nothing where the run is to stop.
  std::optional<data::EvalResult> evaluate(bool ema);
  void save(bool finished);
  /// Rank 0 writes a file of the output folder; on every rank the result is why it could not be written, or nothing.
  std::string written(const std::string& name, const std::function<void(const std::filesystem::path&)>& write);
  /// A save that fails costs nothing but safety, so the run goes on, unless it is the last one or the third in a row. `error`: of written().
  void count_save(const std::string& error, bool last);
  /// Throws CommError naming the ranks whose state differs. Returns its hash.
  std::string check_replicas();
  bool out_of_time() const;
  bool out_of_patience() const;
  /// All steps are made, or the AP has not risen for as long as the run has patience.
  bool done() const;
  CheckpointInfo info() const;
  std::int64_t total_steps() const;
  /// Pictures of an evaluation's batch on a rank.
  std::int64_t val_batch() const;
  /// How the batch is cut, for the line about it.
  std::string parts_text() const;
  /// What an epoch does with pictures that fill no batch.
  std::string tail_text() const;

  RunConfig config_;
  RunOptions options_;
  Stream stream_;
  Reporter& reporter_;
  Replicas replicas_;
  const std::atomic<bool>* stop_ = nullptr;
  std::unique_ptr<dist::Communicator> communicator_;   // before what uses it, so that it goes last
  StepRanks step_ranks_;
  std::unique_ptr<models::RtDetr> model_;
  std::unique_ptr<ParameterStore> store_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Step> step_;
  std::vector<std::int64_t> bad_here_;     // pictures that could not be read, not told to the other ranks yet; of the loader's thread
  std::set<std::int64_t> bad_anywhere_;    // of all ranks; of the loader's thread
  std::unique_ptr<data::Loader> train_loader_, val_loader_;   // after what their threads use
  std::size_t told_train_ = 0, told_val_ = 0;   // of the pictures that each could not read, those that were reported
  std::set<std::string> told_unused_;      // parameters that no loss reached in some step
  std::vector<StepKey> keys_;   // that the training loader's batches can have
  RunState state_;
  std::int64_t warmup_steps_ = 0;
  std::int64_t more_steps_ = 0;            // than epochs of this batch have, done with smaller batches before; negative: fewer
  std::string manifest_hash_;
  std::vector<data::Detection> detections_;
  std::optional<data::EvalResult> best_;
  double started_s_ = 0;
  double saved_at_s_ = 0, save_took_s_ = 0;   ///< end and length of the last save
  int failed_saves_ = 0;                      ///< in a row
  bool stopping_ = false;
};

}  // namespace detr::train

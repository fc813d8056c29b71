#pragma once
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "data/coco.h"
#include "runtime/safetensors.h"
#include "train/optimizer.h"
#include "train/records.h"
#include "train/store.h"

namespace detr::train {

/// Where a run stands; with the tensors it is all that a run needs to go on with the same bits.
struct RunState {
  std::int64_t step = 0;            ///< global steps done, skipped ones included
  std::int64_t epoch = 0;           ///< epoch that the next step belongs to, from 0
  std::int64_t epoch_step = 0;      ///< steps of it that are done
  std::uint64_t seed = 0;
  std::int64_t skipped = 0;         ///< steps without an update, in all
  std::int64_t skips_in_row = 0;
  double best_ap = -2;              ///< -2: not evaluated yet (an AP of -1 is "no ground truth")
  std::int64_t best_epoch = -1;
  std::int64_t evaluations_since_best = 0;
  bool finished = false;

  // Of the epoch in hand, for its line in the log: sums over the steps that were made.
  double epoch_loss = 0;
  NamedValues epoch_terms;
  std::int64_t epoch_counted = 0;
};

/// What a checkpoint carries besides tensors.
struct CheckpointInfo {
  RunState state;
  std::string config = "{}";               ///< resolved JSON
  std::vector<data::Category> classes;     ///< by dense label
  std::int64_t ema_updates = 0;
  std::int64_t warmup_steps = 0;           ///< lengths in force, automatic ones included
  double ema_ramp = 0;
  std::string version;                     ///< of the program that wrote it
  std::int64_t epoch_samples = -1;         ///< pictures of the epoch in hand that were in a step, over all ranks; -1: an older file, that does not say
  std::int64_t ranks = 1;
  std::string manifest;                    ///< hash of what the ranks compared at the start
  std::string state_hash;                  ///< of the run at this step, equal on all ranks when it was written; empty: an older file
  std::string scored = "ema";              ///< "ema" or "model": the weights that `best_ap` belongs to, and that others use by default
};

/// The info as one line of JSON, and back. Throws CommError for anything else: it is how ranks pass it on.
std::string to_text(const CheckpointInfo& info);
CheckpointInfo info_from_text(const std::string& text);

/// Writes the complete state: model.<name>, ema.<name>, optim.exp_avg.<name>, optim.exp_avg_sq.<name>, optim.step.<name>, names,
/// order and shapes as in the reference (convolution weights OIHW). Atomic: see write_safetensors. Throws StorageError.
void save_checkpoint(const std::filesystem::path& file, ParameterStore& store, Optimizer& optimizer, const CheckpointInfo& info, const Moved& moved = {});

/// Weights alone (best.safetensors): model.<name> and ema.<name> with the same metadata.
void save_weights(const std::filesystem::path& file, ParameterStore& store, const CheckpointInfo& info, const Moved& moved = {});

/// Reads the metadata. Throws StorageError if the file is no checkpoint of ours, or a number in it is none that a run can have.
CheckpointInfo read_checkpoint_info(const std::filesystem::path& file);

/// Restores everything that save_checkpoint wrote. Throws StorageError naming the first tensor that is missing, does not fit or has a
/// value that is not finite, or a state that is not complete (a weights-only file: it says -t).
CheckpointInfo load_checkpoint(const std::filesystem::path& file, ParameterStore& store, Optimizer& optimizer, const Moved& moved = {});

/// How much of a model a weights file covered.
struct WeightsReport {
  std::int64_t tensors = 0, matched = 0;          ///< of the model (parameters and buffers); found with equal shape
  std::int64_t values = 0, matched_values = 0;
  std::vector<std::string> missing, reshaped, unused;   ///< not in the file; another shape; in the file only
};

/// Which weights of a checkpoint are meant: those that its metadata names as scored, the moving average, or the raw ones.
enum class WeightsChoice { scored, ema, model };

/// Loads weights by name where the shape fits: from our checkpoints (as `choice` says) or a plain safetensors file with the
/// reference's names. The rest keeps its values. Throws StorageError if the file cannot be read or, unless `allow_partial`, if it
/// covers under 95 % of the values; class-dependent heads do not count.
WeightsReport load_weights(const std::filesystem::path& file, ParameterStore& store, WeightsChoice choice, bool allow_partial, const Moved& moved = {});

/// Loads the backbone alone: names with or without "backbone.", or those of a checkpoint of ours. Throws StorageError if a tensor of
/// the backbone is missing or has another shape.
WeightsReport load_backbone(const std::filesystem::path& file, ParameterStore& store, const Moved& moved = {});

/// The newest valid checkpoint of an output folder for `-r auto`: the highest step among last.safetensors, its previous one and
/// checkpoint*.safetensors that reads and verifies; empty path if there is none. `skipped` gets a line for each that does not.
std::filesystem::path newest_checkpoint(const std::filesystem::path& folder, std::vector<std::string>& skipped, const Moved& moved = {});

/// hash_bytes in hex.
std::string hash_text(std::span<const std::byte> bytes);

/// 64-bit hash of weights, moving average, moments and counters, in hex.
std::string state_hash(ParameterStore& store, Optimizer& optimizer);

}  // namespace detr::train

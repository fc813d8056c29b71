#pragma once
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/augment.h"
#include "data/image.h"
#include "data/loader.h"
#include "models/detr/config.h"
#include "train/optimizer.h"

namespace detr::train {

/// One split of the data set as configured; flags such as --data fill in the paths.
struct SplitConfig {
  std::filesystem::path ann_file, img_folder;
  std::vector<data::TransformOp> transforms;
  data::TransformPolicy policy;               ///< training only
  std::int64_t batch_size = 16;               ///< global
  bool drop_last = true, shuffle = true;
  int num_workers = 4;                        ///< decode threads of a rank
  std::vector<std::int64_t> scales;           ///< training only; empty: always the transforms' size
  std::int64_t scales_stop_epoch = 0;
};

/// How the ranks of a run talk.
struct CommConfig {
  std::string backend = "auto";               ///< engine for sums: nccl, gloo, or auto: NCCL on GPUs, Gloo on CPUs
  double timeout_s = 120;                     ///< after which a rank that others wait for counts as stalled
  double start_timeout_s = 60;                ///< for all ranks to come
  std::int64_t bucket_mib = 25;               ///< gradients that are summed over the ranks as one, in MiB
  std::string bucket_dtype = "f32";           ///< f32 or bf16, see StepRanks::narrow

  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1000)); }
  std::chrono::milliseconds start_timeout() const { return std::chrono::milliseconds(static_cast<std::int64_t>(start_timeout_s * 1000)); }
};

/// Everything that fixes a run, read from a configuration.
struct RunConfig {
  models::ModelConfig model;
  OptimizerConfig optimizer;
  std::int64_t epochs = 72;
  std::optional<std::int64_t> warmup_steps;   ///< unset ("auto"): min(2000, total steps / 5)
  std::optional<std::int64_t> ema_warmups;    ///< unset ("auto"): likewise; else OptimizerConfig::ema_warmups
  std::vector<std::int64_t> milestones = {1000};
  double gamma = 0.1;
  SplitConfig train, val;
  std::int64_t num_top_queries = 300;
  bool sync_bn = true;
  std::int64_t accum = 1;                     ///< micro-batches of a step on a rank
  CommConfig comm;
  bool rank_rules = false;                    ///< the reference's two rules that depend on the ranks, see StepRanks::rank_rules and LoaderOptions::rank_rules

  std::string backbone_weights;               ///< PResNet.pretrained as a path; empty: random
  std::string output_dir;                     ///< empty: runs/<config>-NNN
  std::int64_t print_every = 50, save_every = 1, eval_every = 1;
  std::int64_t patience = 0;                  ///< evaluations without a better AP before stopping; 0: never
  std::uint64_t seed = 0;
  std::string amp = "auto";                   ///< see compute_dtype
  bool graph = true;                          ///< on a GPU: steps as captured graphs
  std::int64_t max_skips = 20;
  data::Exif exif = data::Exif::automatic;
  data::BadImages bad_images = data::BadImages::automatic;
  double max_bad_share = 0.01;
  data::DecodeLimits limits;
  bool drop_empty = false;
};

/// What a model on the stream's device computes in: for "off" f32, for "bf16" bf16, for "auto" bf16 where the device has fast
/// arithmetic for it. Throws ConfigError where there is none and bf16 is asked for.
DType compute_dtype(const std::string& amp, const Stream& stream);

/// Throws ConfigError naming the nearest sizes that fit unless the batch can be cut into equal parts for the micro-batches of all ranks.
void expect_equal_parts(const RunConfig& config, std::int64_t ranks);

/// A value of the resolved configuration and where it came from ("default", a file, "-u", a flag).
struct ConfigOrigin {
  std::string key, origin;
};

/// The leaves of a resolved configuration with their paths, as text, in its order.
std::vector<std::pair<std::string, std::string>> flat_config(const std::string& resolved_json);

/// Whether a leaf is a process's own affair: ranks may differ in it, and a resumed run from what it was, since no result depends on it. It says where
/// files lie (what is in them is compared), how often to print, or how many threads to use.
bool is_local(const std::string& path);

/// One key of the schema, for `detrtrain info keys`.
struct ConfigKey {
  std::string key, type, default_value, help;
};

/// Loads, merges and checks a configuration. The tree is the reference's (PResNet, HybridEncoder, RTDETRTransformerv2,
/// RTDETRCriterionv2, optimizer, train_dataloader, ...); JSON with // comments; `__include__` lists files relative to the including
/// one. Objects merge deeply; lists and scalars are replaced whole; null overrides. Later wins: includes < file < updates.
class Config {
 public:
  /// Defaults alone.
  Config();
  /// Reads a file with its includes, or one of the built-in names r18 r34 r50m r50 r101 tiny (looked up in `builtin_folder`).
  /// Throws ConfigError with file and line for unreadable files, bad JSON, duplicate keys, depth over 64, include cycles or depth
  /// over 16, and for unknown keys with the nearest known one.
  static Config load(const std::string& name_or_file, const std::filesystem::path& builtin_folder);
  /// Reads the resolved JSON of a checkpoint.
  static Config parse(const std::string& resolved_json);

  /// Applies KEY=VALUE (dots descend, numbers index lists); scalars as in YAML, or JSON. Throws ConfigError as load() does.
  void update(const std::string& assignment, const std::string& origin = "-u");
  /// Sets one known key to a JSON value given as text.
  void set(const std::string& key, const std::string& json_value, const std::string& origin);
  /// Sets the number of epochs and moves the recipe's stop epochs (strong augmentation, multi-scale) in proportion, keeping at least
  /// one clean epoch; stop epochs set by -u stay.
  void set_epochs(std::int64_t epochs, const std::string& origin);
  /// Sets the size of both splits' Resize and switches multi-scale off. Multiples of 32.
  void set_image_size(std::int64_t height, std::int64_t width, const std::string& origin);
  /// Whether someone set the key (a file, -u or a flag), rather than its default.
  bool is_set(const std::string& key) const;

  /// The typed configuration. Throws ConfigError naming the key for a value of the wrong type or out of range.
  RunConfig resolve() const;
  /// The whole resolved tree, without includes, stable order.
  std::string to_json(int indent = 2) const;
  std::vector<ConfigOrigin> origins() const;
  /// Remarks on values that are read without effect; at most one line each.
  const std::vector<std::string>& notes() const { return notes_; }
  /// File stem or built-in name, for the default output folder.
  const std::string& name() const { return name_; }

  /// All keys that begin with `prefix`.
  static std::vector<ConfigKey> keys(const std::string& prefix = "");
  /// The known key nearest to a misspelt one (edit distance), for messages.
  static std::string nearest(const std::string& key);

 private:
  struct Tree;                                 // the JSON document and its origins, so that this header stays light
  void adopt(Tree changed);
  std::shared_ptr<const Tree> tree_;           // never changed in place: copies of a Config share it
  std::vector<std::string> notes_;
  std::string name_;
};

}  // namespace detr::train

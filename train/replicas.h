#pragma once
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/coco_eval.h"
#include "dist/communicator.h"
#include "dist/control.h"
#include "dist/manifest.h"
#include "train/checkpoint.h"
#include "train/optimizer.h"
#include "train/store.h"

namespace detr::train {

/// What a run is told about the other ranks.
struct RunRanks {
  std::shared_ptr<dist::Control> control;   ///< null: one rank
  /// Makes the engine for tensors on the stream's device. Called once the ranks have found their manifests equal.
  std::function<std::unique_ptr<dist::Communicator>(const Stream& stream)> connect;
  std::function<void()> closed;             ///< called before what connect() made goes; may be null
  /// Called with what a trainer throws, while the engine is still there: closing it could hang, and would make other ranks blame this one. May
  /// be null, and need not return.
  std::function<void(const std::exception& error)> failed;
  dist::Milliseconds timeout{120000};       ///< longest wait for a peer inside a step
  std::vector<std::pair<std::string, std::string>> settings;   ///< of the engine, for the manifest
  std::int64_t check_every = 1000;          ///< steps between comparisons of the replicas
  bool require_all_used = false;            ///< a parameter that no rank's loss reaches is an error

  int size() const { return control ? control->size() : 1; }
  int rank() const { return control ? control->rank() : 0; }
};

/// For work on files that other ranks wait for: each call is progress of this rank. Empty where there is no control.
Moved progress_of(const std::shared_ptr<dist::Control>& control);

/// What ranks say to each other beside the collectives of steps: that they begin equal, stay equal and go on in the same way. All ranks make
/// the same calls in the same order. For one rank nothing is said.
class Replicas {
 public:
  explicit Replicas(const RunRanks& ranks) : ranks_(ranks) {}

  int size() const { return ranks_.size(); }
  int rank() const { return ranks_.rank(); }
  bool root() const { return rank() == 0; }
  /// Empty, or "rank 2: " where there are several.
  std::string name() const;

  /// Throws CommError with the first difference from rank 0's.
  void expect_equal(const dist::Manifest& manifest);
  /// Every rank's state becomes rank 0's: weights, moving average, moments, counters and the info. Throws CommError if hashes differ after it.
  void share(dist::Communicator& communicator, const Stream& stream, ParameterStore& store, Optimizer& optimizer, CheckpointInfo& info);
  /// Throws CommError naming the minority if the hashes of the replicas differ (both sides where half of them do).
  void expect_equal_hash(const std::string& hash, std::int64_t step);

  /// Rank 0's text, on every rank.
  std::string from_root(const std::string& text, const char* what);
  /// Every rank's text, by rank.
  std::vector<std::string> from_all(const std::string& text, const char* what);
  /// On rank 0 all ranks' detections in the order of image ids, those of one image as they came; elsewhere nothing.
  std::vector<data::Detection> gather(std::vector<data::Detection> detections);
  /// Whether any rank's flag is set.
  bool any(bool flag, const char* what);

 private:
  std::string place(const char* what) { return what + std::string(" ") + std::to_string(exchanges_++); }

  RunRanks ranks_;
  std::int64_t exchanges_ = 0;   // makes the name of each exchange its own
};

/// Everything in a data set that training depends on, in 64 bits.
std::string digest(const data::CocoData& data);

}  // namespace detr::train

#pragma once
#include <string>
#include <vector>

#include "data/denoising.h"
#include "tests/support.h"
#include "tests/tiny_model.h"
#include "train/checkpoint.h"
#include "train/step.h"

namespace detr::test {

/// Model, store, optimiser and step, with the initial values of `seed`.
struct Rig {
  explicit Rig(std::uint64_t seed = 0, const models::ModelConfig& config = tiny_config(), int threads = 1,
               const train::OptimizerConfig& optimizer_config = quick());
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  /// A rate that moves the tiny model within a few steps.
  static train::OptimizerConfig quick();
  /// Hash of weights, buffers, moving average, moments and counters.
  std::string hash() { return train::state_hash(store, optimizer); }
  const Parameter& parameter(const std::string& name) const { return model.parameters().find(name); }

  Stream stream;
  models::RtDetr model;
  train::ParameterStore store;
  train::Optimizer optimizer;
  train::Step step;
};

/// Boxes of one or more pictures, for make_batch.
std::vector<data::ImageTargets> two_pictures();

/// Noisy pictures of side x side pixels, each with its boxes filled in the colour of their class.
data::Batch make_batch(const std::vector<data::ImageTargets>& targets, const models::DecoderConfig& config, std::int64_t side = 64, std::uint64_t seed = 1);

}  // namespace detr::test

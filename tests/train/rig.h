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
  /// On any stream; the model computes in `compute`, weights are f32. `graphs`: see train::Step.
  Rig(const Stream& on, DType compute, bool graphs, std::uint64_t seed = 0, const models::ModelConfig& config = tiny_config(),
      const train::OptimizerConfig& optimizer_config = quick())
      : Rig(on, DType::f32, compute, {.graphs = graphs}, seed, config, optimizer_config) {}
  /// With weights of any dtype, several micro-batches or ranks.
  Rig(const Stream& on, DType dtype, DType compute, const train::StepOptions& options, std::uint64_t seed = 0, const models::ModelConfig& config = tiny_config(),
      const train::OptimizerConfig& optimizer_config = quick());
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  /// A rate that moves the tiny model within a few steps.
  static train::OptimizerConfig quick();
  /// Hash of weights, buffers, moving average, moments and counters.
  std::string hash() { return train::state_hash(store, optimizer); }
  const Parameter& parameter(const std::string& name) const { return model.parameters().find(name); }
  /// Elements of a weight or buffer, wherever it lies.
  std::vector<float> values(const std::string& name);
  void set_values(const std::string& name, const std::vector<float>& values);

  Stream stream;
  models::RtDetr model;
  train::ParameterStore store;
  train::Optimizer optimizer;
  train::Step step;
};

/// A parameter whose elements all become `value`, and what a step then says: the text of its fault, or nothing where it is made.
struct Fault {
  std::string parameter;
  float value;
  std::string text;
};
std::vector<Fault> faults();

/// Boxes of one or more pictures, for make_batch. A crowd has more than 32 boxes, which takes other numbers of slots.
std::vector<data::ImageTargets> two_pictures();
std::vector<data::ImageTargets> crowd();

/// Noisy pictures of side x side pixels, each with its boxes filled in the colour of their class.
data::Batch make_batch(const std::vector<data::ImageTargets>& targets, const models::DecoderConfig& config, std::int64_t side = 64, std::uint64_t seed = 1);

}  // namespace detr::test

#include "tests/train/rig.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace detr::test {

train::OptimizerConfig Rig::quick() {
  train::OptimizerConfig config;
  config.lr = 2e-3;
  config.groups = {{"norm", std::nullopt, 0.0}};
  config.ema_warmups = 10;
  return config;
}

Rig::Rig(std::uint64_t seed, const models::ModelConfig& config, int threads, const train::OptimizerConfig& optimizer_config)
    : Rig(Stream::cpu(threads), DType::f32, true, seed, config, optimizer_config) {}

Rig::Rig(const Stream& on, DType dtype, DType compute, const train::StepOptions& options, std::uint64_t seed, const models::ModelConfig& config,
         const train::OptimizerConfig& optimizer_config)
    : stream(on),
      model(config),
      store(model.parameters(), stream, dtype, compute),
      optimizer(store, stream, optimizer_config),
      step(model, store, optimizer, stream, options) {
  store.initialise(seed);
}

std::vector<float> Rig::values(const std::string& name) {
  const Tensor host = store.on_host(store.weights()), place = store.slice(host, parameter(name));
  return {place.span<float>().begin(), place.span<float>().end()};
}

void Rig::set_values(const std::string& name, const std::vector<float>& values) {
  const Tensor host = store.on_host(store.weights()), place = store.slice(host, parameter(name));
  REQUIRE(static_cast<std::int64_t>(values.size()) == place.numel());
  std::copy(values.begin(), values.end(), place.span<float>().begin());
  store.from_host(host, store.weights());
  store.refresh_shadow();
}

std::vector<Fault> faults() {
  const float inf = std::numeric_limits<float>::infinity();
  return {
      {"backbone.res_layers.1.blocks.0.branch2a.conv.weight", std::nanf(""), "weight backbone.res_layers.1.blocks.0.branch2a.conv.weight"},
      {"decoder.dec_score_head.1.bias", inf, "weight decoder.dec_score_head.1.bias"},
      {"encoder.lateral_convs.0.norm.running_mean", inf, ""},   // a buffer that training does not read: the step is made
      {"backbone.conv1.conv1_1.conv.weight", 3e38f, "input of the norm with backbone.conv1.conv1_1.norm.running_mean"},
      {"decoder.enc_score_head.weight", 3e38f, "decoder.enc_score_head output"},
      {"decoder.dec_score_head.1.weight", 3e38f, "decoder.dec_score_head.1 output"},
  };
}

std::vector<data::ImageTargets> two_pictures() {
  return {{{0, 2}, {{0.3, 0.3, 0.4, 0.3}, {0.7, 0.75, 0.3, 0.4}}}, {{1}, {{0.5, 0.4, 0.5, 0.5}}}};
}

std::vector<data::ImageTargets> crowd() {
  std::vector<data::ImageTargets> pictures = {{}, {{2}, {{0.6, 0.5, 0.3, 0.5}}}};
  for (std::int64_t i = 0; i < 35; ++i) {
    pictures[0].labels.push_back(i % 3);
    pictures[0].boxes.push_back({0.1 + 0.13 * static_cast<double>(i % 7), 0.12 + 0.18 * static_cast<double>(i / 7), 0.12, 0.15});
  }
  return pictures;
}

data::Batch make_batch(const std::vector<data::ImageTargets>& targets, const models::DecoderConfig& config, std::int64_t side, std::uint64_t seed) {
  const auto n = static_cast<std::int64_t>(targets.size());
  data::Batch batch;
  batch.images = host_zeros({n, side, side, 3}, DType::u8);
  batch.size_h = batch.size_w = side;
  RandomSequence draw{RandomKey(seed)};
  std::vector<RandomKey> keys;
  for (std::int64_t i = 0; i < n; ++i) {
    const data::ImageTargets& image = targets[static_cast<std::size_t>(i)];
    for (std::int64_t p = 0; p < side * side; ++p) {
      const double x = (static_cast<double>(p % side) + 0.5) / static_cast<double>(side), y = (static_cast<double>(p / side) + 0.5) / static_cast<double>(side);
      std::int64_t label = -1;
      for (std::size_t b = 0; b < image.boxes.size(); ++b) {
        const auto& box = image.boxes[b];
        if (std::abs(x - box[0]) < box[2] / 2 && std::abs(y - box[1]) < box[3] / 2) label = image.labels[b];
      }
      for (std::int64_t c = 0; c < 3; ++c)
        batch.images.data<std::uint8_t>()[(i * side * side + p) * 3 + c] = static_cast<std::uint8_t>((label >= 0 && label % 3 == c ? 200 : 60) + draw.uniform_int(40));
    }
    keys.push_back(RandomKey(seed).fold(static_cast<std::uint64_t>(i)));
    batch.image_ids.push_back(100 + i);
    batch.orig_width.push_back(side);
    batch.orig_height.push_back(side);
  }
  std::int64_t largest = 0;
  for (const data::ImageTargets& image : targets) largest = std::max(largest, static_cast<std::int64_t>(image.labels.size()));
  batch.targets = data::make_targets(targets, data::box_capacity(largest), DType::f32);
  const data::DenoisingOptions options{config.num_denoising, config.label_noise_ratio, config.box_noise_scale, config.num_classes};
  batch.denoising = data::make_denoising(batch.targets, options, data::keyed_draws(keys, config.num_classes), data::denoising_capacity(config.num_denoising, largest));
  return batch;
}

}  // namespace detr::test

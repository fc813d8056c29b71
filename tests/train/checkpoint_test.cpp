#include "train/checkpoint.h"

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "models/nn/init.h"
#include "runtime/safetensors.h"
#include "tests/train/rig.h"

using namespace detr;
using namespace detr::test;
using namespace detr::train;
namespace fs = std::filesystem;

namespace {

CheckpointInfo some_info(std::int64_t step = 17) {
  CheckpointInfo info;
  info.state.step = step;
  info.state.epoch = 3;
  info.state.epoch_step = 2;
  info.state.seed = 0xfedcba9876543210ULL;
  info.state.skipped = 4;
  info.state.skips_in_row = 1;
  info.state.best_ap = 0.1 + 0.2;   // every bit counts
  info.state.best_epoch = 2;
  info.state.evaluations_since_best = 1;
  info.state.finished = true;
  info.state.epoch_loss = 1.0 / 3;
  info.state.epoch_terms = {{"loss_vfl", 0.7}, {"loss_bbox", 1e-300}};
  info.state.epoch_counted = 2;
  info.config = "{\"a\": \"\\u00e9\"}";
  info.classes = {{3, "cat"}, {90, "dog \"x\""}};
  info.ema_updates = 13;
  info.warmup_steps = 20;
  info.ema_ramp = 21.5;
  info.version = "1.2.3";
  info.epoch_samples = 34;
  info.ranks = 3;
  info.manifest = "0123456789abcdef";
  info.state_hash = "fedcba9876543210";
  info.scored = "model";
  return info;
}

/// Trains for a few steps, so that every tensor of the state is its own.
void train_a_little(Rig& rig, int steps = 2) {
  const data::Batch batch = make_batch(two_pictures(), rig.model.config().decoder);
  for (int i = 0; i < steps; ++i) REQUIRE(rig.step.run(batch, 1).applied);
}

void save(const fs::path& file, Rig& rig, std::int64_t step) {
  CheckpointInfo info = some_info(step);
  info.ema_updates = rig.optimizer.ema_updates();
  save_checkpoint(file, rig.store, rig.optimizer, info);
}

void flip_last_byte(const fs::path& file) {
  std::string bytes = read_text(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_text(file, bytes);
}

models::ModelConfig other_width() {
  models::ModelConfig config = tiny_config();
  config.encoder.hidden_dim = 24;
  return config;
}

}  // namespace

TEST_CASE("checkpoint: load restores every bit", "[cpu]") {
  const TempDir dir;
  Rig saved(1), loaded(2);
  train_a_little(saved);
  save(dir / "a.safetensors", saved, 17);
  const CheckpointInfo info = load_checkpoint(dir / "a.safetensors", loaded.store, loaded.optimizer);
  CHECK(loaded.hash() == saved.hash());
  CHECK(loaded.optimizer.ema_updates() == 2);
  train_a_little(saved);
  train_a_little(loaded);
  CHECK(loaded.hash() == saved.hash());

  CHECK(info.state.step == 17);
  CHECK(info.ema_updates == 2);
  // Saving what was loaded gives the same file.
  Rig again(3);
  load_checkpoint(dir / "a.safetensors", again.store, again.optimizer);
  save_checkpoint(dir / "b.safetensors", again.store, again.optimizer, info);
  CHECK(read_text(dir / "a.safetensors") == read_text(dir / "b.safetensors"));
}

TEST_CASE("checkpoint: metadata goes out and in", "[cpu]") {
  const TempDir dir;
  Rig rig;
  save_checkpoint(dir / "a.safetensors", rig.store, rig.optimizer, some_info());
  const CheckpointInfo got = read_checkpoint_info(dir / "a.safetensors"), wanted = some_info();
  CHECK(got.state.step == wanted.state.step);
  CHECK(got.state.epoch == wanted.state.epoch);
  CHECK(got.state.epoch_step == wanted.state.epoch_step);
  CHECK(got.state.seed == wanted.state.seed);
  CHECK(got.state.skipped == wanted.state.skipped);
  CHECK(got.state.skips_in_row == wanted.state.skips_in_row);
  CHECK(got.state.best_ap == wanted.state.best_ap);
  CHECK(got.state.best_epoch == wanted.state.best_epoch);
  CHECK(got.state.evaluations_since_best == wanted.state.evaluations_since_best);
  CHECK(got.state.finished);
  CHECK(got.state.epoch_loss == wanted.state.epoch_loss);
  CHECK(got.state.epoch_terms == wanted.state.epoch_terms);
  CHECK(got.state.epoch_counted == wanted.state.epoch_counted);
  CHECK(got.config == wanted.config);
  REQUIRE(got.classes.size() == 2);
  CHECK(got.classes[1].id == 90);
  CHECK(got.classes[1].name == wanted.classes[1].name);
  CHECK(got.ema_updates == 13);
  CHECK(got.warmup_steps == 20);
  CHECK(got.ema_ramp == 21.5);
  CHECK(got.version == "1.2.3");
  CHECK(got.epoch_samples == 34);
  CHECK(got.ranks == 3);
  CHECK(got.manifest == wanted.manifest);
  CHECK(got.state_hash == wanted.state_hash);
  CHECK(got.scored == "model");
}

TEST_CASE("checkpoint: names, order and shapes are the reference's", "[cpu]") {
  const TempDir dir;
  Rig rig;
  save(dir / "a.safetensors", rig, 1);
  const SafetensorsFile file(dir / "a.safetensors");
  const Parameter& stem = rig.parameter("backbone.conv1.conv1_1.conv.weight");
  REQUIRE(stem.shape() == Shape{4, 3, 3, 3});   // (out, kh, kw, in)
  const Tensor theirs = file.read("model.backbone.conv1.conv1_1.conv.weight");
  CHECK(theirs.shape() == Shape{4, 3, 3, 3});   // (out, in, kh, kw)
  for (std::int64_t o = 0; o < 4; ++o)
    for (std::int64_t i = 0; i < 3; ++i)
      for (std::int64_t y = 0; y < 3; ++y)
        for (std::int64_t x = 0; x < 3; ++x) CHECK(theirs.data<float>()[((o * 3 + i) * 3 + y) * 3 + x] == stem.value().data<float>()[((o * 3 + y) * 3 + x) * 3 + i]);
  CHECK(file.shape("ema.backbone.res_layers.0.blocks.0.short.conv.weight") == Shape{4, 8, 1, 1});
  CHECK(file.shape("optim.exp_avg_sq.decoder.enc_score_head.weight") == Shape{3, 16});
  CHECK(file.shape("optim.step.decoder.enc_score_head.weight") == Shape{});
  CHECK_FALSE(file.contains("optim.exp_avg.backbone.conv1.conv1_1.norm.running_mean"));
}

TEST_CASE("checkpoint: the newest that is whole", "[cpu]") {
  const TempDir dir;
  std::vector<std::string> skipped;
  CHECK(newest_checkpoint(dir / "none", skipped).empty());
  CHECK(newest_checkpoint(dir.path(), skipped).empty());
  CHECK(skipped.empty());

  Rig rig;
  save(dir / "checkpoint0001.safetensors", rig, 5);
  save(dir / "last.safetensors", rig, 10);
  save(dir / "last.safetensors", rig, 15);   // the one before is kept
  save(dir / "best.safetensors", rig, 99);   // none to resume from
  CHECK(newest_checkpoint(dir.path(), skipped) == dir / "last.safetensors");
  CHECK(skipped.empty());

  SECTION("torn") { fs::resize_file(dir / "last.safetensors", fs::file_size(dir / "last.safetensors") / 2); }
  SECTION("torn within the header") { fs::resize_file(dir / "last.safetensors", 100); }
  SECTION("empty") { fs::resize_file(dir / "last.safetensors", 0); }
  SECTION("a damaged tensor") { flip_last_byte(dir / "last.safetensors"); }
  SECTION("no checkpoint of ours") { write_safetensors(dir / "last.safetensors", {}, {}); }
  CHECK(newest_checkpoint(dir.path(), skipped) == dir / "last.safetensors.previous");
  REQUIRE(skipped.size() == 1);
  CHECK(skipped[0].find("last.safetensors: ") != std::string::npos);
  skipped.clear();
  flip_last_byte(dir / "last.safetensors.previous");
  CHECK(newest_checkpoint(dir.path(), skipped) == dir / "checkpoint0001.safetensors");
  CHECK(skipped.size() == 2);
}

TEST_CASE("checkpoint: another model is refused by name", "[cpu]") {
  const TempDir dir;
  Rig rig, wider(0, other_width());
  save(dir / "a.safetensors", rig, 1);
  expect_throws<StorageError>([&] { load_checkpoint(dir / "a.safetensors", wider.store, wider.optimizer); },
                              "model.encoder.input_proj.0.conv.weight is (16, 8, 1, 1), wanted (24, 8, 1, 1): it belongs to another model");
  models::ModelConfig deeper = tiny_config(), shallower = tiny_config();
  deeper.decoder.num_layers = 3;
  Rig deep(0, deeper);
  expect_throws<StorageError>([&] { load_checkpoint(dir / "a.safetensors", deep.store, deep.optimizer); },
                              "model.decoder.decoder.layers.2.self_attn.in_proj_weight is missing: it belongs to another model");
  shallower.decoder.num_layers = 1;
  Rig shallow(0, shallower);
  expect_throws<StorageError>([&] { load_checkpoint(dir / "a.safetensors", shallow.store, shallow.optimizer); }, "is no tensor of this model");

  save_weights(dir / "weights.safetensors", rig.store, some_info());
  expect_throws<StorageError>([&] { load_checkpoint(dir / "weights.safetensors", rig.store, rig.optimizer); }, "the file holds weights alone: -t starts a new run from them");
  write_safetensors(dir / "other.safetensors", {}, {});
  expect_throws<StorageError>([&] { read_checkpoint_info(dir / "other.safetensors"); }, "is no checkpoint of detrtrain; -t takes weights of others");
  write_safetensors(dir / "future.safetensors", {}, {{"checkpoint", "9"}});
  expect_throws<StorageError>([&] { read_checkpoint_info(dir / "future.safetensors"); }, "checkpoint format 9, this build knows 1");
  write_safetensors(dir / "half.safetensors", {}, {{"checkpoint", "1"}, {"state", "{}"}});
  expect_throws<StorageError>([&] { read_checkpoint_info(dir / "half.safetensors"); }, "metadata is not complete");
}

TEST_CASE("checkpoint: numbers that no run has are refused", "[cpu]") {
  const TempDir dir;
  Rig rig(1), loaded(2);
  train_a_little(rig);
  save(dir / "a.safetensors", rig, 17);
  const SafetensorsFile whole(dir / "a.safetensors");
  std::map<std::string, std::string> metadata;   // without the hashes, as another program would write it
  for (const auto& [key, value] : whole.metadata()) {
    if (!key.starts_with("hash")) metadata[key] = value;
  }
  const auto refused = [&](const std::string& name, const Tensor& tensor, const std::string& text) {
    std::vector<NamedTensor> tensors;
    for (const std::string& other : whole.names()) tensors.push_back({other, other == name ? tensor : whole.read(other)});
    write_safetensors(dir / "b.safetensors", tensors, metadata);
    expect_throws<StorageError>([&] { load_checkpoint(dir / "b.safetensors", loaded.store, loaded.optimizer); }, "b.safetensors: " + name + text);
  };
  const std::string bias = "decoder.enc_score_head.bias", step = "optim.step." + bias;
  refused(step, host_zeros({0}, DType::i64), " is (0), wanted one number");
  refused(step, host_tensor<float>({}, {1}), " is f32, wanted i64");
  refused(step, host_tensor<std::int64_t>({}, {-1}), " is -1, wanted 0 to the run's 17 steps");
  refused(step, host_tensor<std::int64_t>({}, {18}), " is 18, wanted 0 to the run's 17 steps");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const char* kind : {"model.", "ema.", "optim.exp_avg.", "optim.exp_avg_sq."}) {
    refused(kind + bias, host_tensor<float>({3}, {0, nan, 0}), " has a value that is not finite");
    refused(kind + bias, host_tensor<std::int64_t>({3}, {0, 1, 0}), " is i64, wanted numbers with a fraction");
    refused(kind + bias, host_tensor<std::uint8_t>({3}, {0, 1, 0}), " is u8, wanted numbers with a fraction");
  }
  // The same for weights alone, of ours and of others.
  for (const Tensor& values : {host_tensor<float>({3}, {0, std::numeric_limits<float>::infinity(), 0}), host_tensor<std::int64_t>({3}, {0, 1, 0})}) {
    write_safetensors(dir / "c.safetensors", std::vector<NamedTensor>{{bias, values}}, {});
    expect_throws<StorageError>([&] { load_weights(dir / "c.safetensors", loaded.store, WeightsChoice::scored, true); }, "c.safetensors: " + bias);
  }
}

TEST_CASE("checkpoint: counters that no run has are refused", "[cpu]") {
  const TempDir dir;
  Rig rig;
  save(dir / "a.safetensors", rig, 17);
  const std::map<std::string, std::string> good = SafetensorsFile(dir / "a.safetensors").metadata();
  const auto refused = [&](const std::string& key, const std::string& value, const std::string& text) {
    std::map<std::string, std::string> metadata;
    for (const auto& [name, old] : good) {
      if (!name.starts_with("hash")) metadata[name] = old;
    }
    if (key == "ema_updates" || key == "scored") {
      metadata[key] = value;
    } else {
      nlohmann::json state = nlohmann::json::parse(metadata.at("state"));
      REQUIRE(state.contains(key));
      state[key] = nlohmann::json::parse(value);
      metadata["state"] = state.dump();
    }
    write_safetensors(dir / "b.safetensors", {}, metadata);
    INFO(key << " " << value);
    expect_throws<StorageError>([&] { read_checkpoint_info(dir / "b.safetensors"); }, "b.safetensors: metadata is not complete or not possible: " + text);
  };
  for (const char* key : {"step", "epoch_step", "skipped", "skips_in_row", "evaluations_since_best", "epoch_counted", "warmup_steps"}) {
    for (const char* value : {"-1", "1.5", "9007199254740993", "18446744073709551615", "\"1\"", "null", "1e300"})
      refused(key, value, concat(key, " is ", nlohmann::json::parse(value).dump(), ", wanted a whole number from 0 to "));
  }
  refused("epoch_samples", "-2", "epoch_samples is -2, wanted a whole number from -1 to ");
  refused("ranks", "0", "ranks is 0, wanted a whole number from 1 to ");
  refused("best_epoch", "-2", "best_epoch is -2, wanted a whole number from -1 to ");
  refused("seed", "-1", "seed is -1");
  refused("best_ap", "1.5", "best_ap is 1.5, wanted a number from -2 to 1");
  refused("best_ap", "null", "best_ap is null");
  refused("epoch_loss", "null", "epoch_loss is null");
  refused("ema_ramp", "-1.5", "ema_ramp is -1.5, wanted a number from 0 to ");
  refused("finished", "1", "");
  refused("ema_updates", "-1", "ema_updates is -1, wanted a whole number from 0 to 17");
  refused("ema_updates", "18", "ema_updates is 18");
  refused("ema_updates", "3 and more", "");
  refused("scored", "both", "scored is 'both'");
}

TEST_CASE("checkpoint: no bit of a header flips unnoticed, and no part of a file is a whole one", "[cpu]") {
  const TempDir dir;
  ParameterList list;
  list.add("a", {2, 1}, models::init::uniform(1));
  list.add_buffer("b", {1}, models::init::constant(3));
  const auto store_of = [&](std::uint64_t seed) {
    auto store = std::make_unique<ParameterStore>(list, Stream::cpu(1), DType::f32);
    store->initialise(seed);
    return store;
  };
  const fs::path path = dir / "a.safetensors", changed = dir / "b.safetensors";
  {
    const auto store = store_of(1);
    Optimizer optimizer(*store, Stream::cpu(1), {});
    CheckpointInfo info = some_info();
    info.ema_updates = 0;
    save_checkpoint(path, *store, optimizer, info);
  }
  const auto store = store_of(2);
  Optimizer optimizer(*store, Stream::cpu(1), {});
  load_checkpoint(path, *store, optimizer);
  const std::string before = state_hash(*store, optimizer);
  const std::string whole = read_text(path);
  const auto refused = [&](const std::string& bytes) {
    write_text(changed, bytes);
    try {
      load_checkpoint(changed, *store, optimizer);
      return false;
    } catch (const StorageError&) {
      return true;
    }
  };
  for (std::size_t size = 0; size < whole.size(); ++size) {
    INFO("the first " << size << " of " << whole.size() << " bytes");
    REQUIRE(refused(whole.substr(0, size)));
  }
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string bytes = whole;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    INFO("bit " << bit % 8 << " of byte " << bit / 8);
    REQUIRE(refused(bytes));
  }
  CHECK(state_hash(*store, optimizer) == before);
}

TEST_CASE("weights: which ones, and across class counts", "[cpu]") {
  const TempDir dir;
  Rig rig(1);
  train_a_little(rig, 3);
  CheckpointInfo info = some_info();
  info.scored = "model";
  save_weights(dir / "a.safetensors", rig.store, info);
  for (const WeightsChoice choice : {WeightsChoice::scored, WeightsChoice::ema, WeightsChoice::model}) {
    Rig other(2);
    const WeightsReport report = load_weights(dir / "a.safetensors", other.store, choice, false);
    CHECK(report.matched == report.tensors);
    CHECK(report.matched_values == report.values);
    CHECK(report.missing.empty());
    CHECK(report.unused.empty());
    expect_same_bits(other.store.weights(), choice == WeightsChoice::ema ? rig.store.ema() : rig.store.weights());
  }
  info.scored = "ema";
  save_weights(dir / "a.safetensors", rig.store, info);
  Rig averaged(2);
  load_weights(dir / "a.safetensors", averaged.store, WeightsChoice::scored, false);
  expect_same_bits(averaged.store.weights(), rig.store.ema());

  models::ModelConfig more = tiny_config();
  more.decoder.num_classes = 5;
  Rig five(2, more), fresh(2, more);
  const WeightsReport report = load_weights(dir / "a.safetensors", five.store, WeightsChoice::model, false);
  CHECK(report.reshaped == std::vector<std::string>{"decoder.denoising_class_embed.weight", "decoder.enc_score_head.weight", "decoder.enc_score_head.bias",
                                                    "decoder.dec_score_head.0.weight", "decoder.dec_score_head.0.bias", "decoder.dec_score_head.1.weight", "decoder.dec_score_head.1.bias"});
  CHECK(report.matched + 7 == report.tensors);
  expect_same_bits(five.parameter("decoder.enc_score_head.weight").value(), fresh.parameter("decoder.enc_score_head.weight").value());
  expect_same_bits(five.parameter("encoder.lateral_convs.0.conv.weight").value(), rig.parameter("encoder.lateral_convs.0.conv.weight").value());
}

TEST_CASE("weights: files of others", "[cpu]") {
  const TempDir dir;
  Rig rig(1), other(2);
  std::vector<NamedTensor> tensors;
  for (const Parameter& p : rig.model.parameters().all()) {
    if (p.shape().rank() != 4) tensors.push_back({p.name(), p.value()});
  }
  tensors.push_back({"decoder.anchors", host_zeros({1}, DType::f32)});
  write_safetensors(dir / "a.safetensors", tensors, {});
  expect_throws<StorageError>([&] { load_weights(dir / "a.safetensors", other.store, WeightsChoice::scored, false); }, "--allow-partial takes what fits");
  const WeightsReport report = load_weights(dir / "a.safetensors", other.store, WeightsChoice::scored, true);
  CHECK(report.matched + 1 == static_cast<std::int64_t>(tensors.size()));
  CHECK(report.unused == std::vector<std::string>{"decoder.anchors"});
  CHECK(report.missing.front() == "backbone.conv1.conv1_1.conv.weight");
  expect_same_bits(other.parameter("decoder.enc_score_head.weight").value(), rig.parameter("decoder.enc_score_head.weight").value());

  Rig wider(0, other_width());
  save_weights(dir / "b.safetensors", rig.store, some_info());
  expect_throws<StorageError>([&] { load_weights(dir / "b.safetensors", wider.store, WeightsChoice::model, false); }, "it belongs to another configuration");
  expect_throws<StorageError>([&] { load_weights(dir / "none.safetensors", rig.store, WeightsChoice::model, false); }, "none.safetensors");
}

TEST_CASE("weights: the backbone alone", "[cpu]") {
  const TempDir dir;
  Rig rig(1);
  train_a_little(rig);
  save(dir / "ours.safetensors", rig, 1);
  Rig from_ours(2);
  const WeightsReport report = load_backbone(dir / "ours.safetensors", from_ours.store);
  CHECK(report.tensors == report.matched);
  for (const Parameter& p : rig.model.parameters().all()) {
    const Parameter& loaded = from_ours.parameter(p.name());
    if (p.name().starts_with("backbone.")) expect_same_bits(loaded.value(), rig.store.slice(rig.store.ema(), p));
    else if (p.name().ends_with("in_proj_weight")) CHECK(values_of(loaded.value()) != values_of(p.value()));
  }

  // A release: names relative to the backbone, convolutions as (out, in, kh, kw).
  const SafetensorsFile ours(dir / "ours.safetensors");
  const std::string prefix = "ema.backbone.";
  std::vector<NamedTensor> tensors;
  for (const std::string& name : ours.names()) {
    if (name.starts_with(prefix)) tensors.push_back({name.substr(prefix.size()), ours.read(name)});
  }
  write_safetensors(dir / "release.safetensors", tensors, {});
  Rig from_release(3);
  load_backbone(dir / "release.safetensors", from_release.store);
  expect_same_bits(from_release.parameter("backbone.conv1.conv1_2.conv.weight").value(), from_ours.parameter("backbone.conv1.conv1_2.conv.weight").value());

  tensors.pop_back();
  write_safetensors(dir / "short.safetensors", tensors, {});
  expect_throws<StorageError>([&] { load_backbone(dir / "short.safetensors", from_release.store); }, "it is no backbone of this configuration");
  models::ModelConfig config = tiny_config();
  config.backbone.stem_width = 2;
  Rig narrow(0, config);
  expect_throws<StorageError>([&] { load_backbone(dir / "release.safetensors", narrow.store); }, "conv1.conv1_1.conv.weight is (4, 3, 3, 3), wanted (2, 3, 3, 3)");
}

#include <cmath>

#include "models/reference_layout.h"
#include "tests/models/model_values.h"

using namespace detr;
using namespace detr::test;
using namespace detr::models;

namespace {

struct Counts {
  std::int64_t tensors = 0, values = 0, trainable = 0, backbone = 0, encoder = 0, decoder = 0;
};

Counts count(const ParameterList& list) {
  Counts counts;
  for (const Parameter& p : list.all()) {
    if (p.is_buffer()) continue;
    const std::int64_t n = p.shape().numel();
    ++counts.tensors;
    counts.values += n;
    counts.trainable += p.trainable() ? n : 0;
    (p.name().starts_with("backbone.") ? counts.backbone : p.name().starts_with("encoder.") ? counts.encoder : counts.decoder) += n;
  }
  return counts;
}

void expect_shape(const RtDetr& model, const std::string& name, const Shape& reference) {
  INFO(name);
  REQUIRE(model.parameters().contains(name));
  CHECK(reference_shape(model.parameters().find(name).shape()) == reference);
}

}  // namespace

TEST_CASE("model: parameter counts of the published variants", "[cpu]") {
  const std::vector<std::pair<std::string, Counts>> variants = {
      {"r18", {326, 20184464, 20184464, 11199968, 4965120, 4019376}},    {"r34", {404, 31441668, 31441668, 21308128, 4965120, 5168420}},
      {"r50m", {402, 36593772, 36565260, 23474016, 5653248, 7466508}},   {"r50", {390, 42891372, 42862860, 23474016, 11950848, 7466508}},
      {"r101", {441, 76556268, 76527756, 42413920, 26577536, 7564812}},
  };
  for (const auto& [variant, wanted] : variants) {
    CAPTURE(variant);
    const RtDetr model(variant_config(variant));
    const Counts got = count(model.parameters());
    CHECK(got.tensors == wanted.tensors);
    CHECK(got.values == wanted.values);
    CHECK(got.trainable == wanted.trainable);
    CHECK(got.backbone == wanted.backbone);
    CHECK(got.encoder == wanted.encoder);
    CHECK(got.decoder == wanted.decoder);
  }
  expect_throws<ConfigError>([] { variant_config("r19"); }, "unknown variant 'r19'; there are r18, r34, r50m, r50 and r101");
}

TEST_CASE("model: names and shapes of r18", "[cpu]") {
  const RtDetr model(variant_config("r18"));
  expect_shape(model, "backbone.conv1.conv1_1.conv.weight", {32, 3, 3, 3});
  expect_shape(model, "backbone.conv1.conv1_3.conv.weight", {64, 32, 3, 3});
  for (const char* part : {"weight", "bias", "running_mean", "running_var"}) expect_shape(model, concat("backbone.conv1.conv1_2.norm.", part), {32});
  expect_shape(model, "backbone.res_layers.0.blocks.1.branch2b.conv.weight", {64, 64, 3, 3});
  expect_shape(model, "backbone.res_layers.0.blocks.0.short.conv.weight", {64, 64, 1, 1});
  expect_shape(model, "backbone.res_layers.0.blocks.0.short.norm.weight", {64});
  expect_shape(model, "backbone.res_layers.2.blocks.0.branch2a.conv.weight", {256, 128, 3, 3});
  expect_shape(model, "backbone.res_layers.3.blocks.0.short.conv.conv.weight", {512, 256, 1, 1});
  expect_shape(model, "backbone.res_layers.3.blocks.0.short.conv.norm.running_var", {512});
  CHECK_FALSE(model.parameters().contains("backbone.res_layers.1.blocks.1.short.conv.conv.weight"));
  const std::string aifi = "encoder.encoder.0.layers.0";
  expect_shape(model, "encoder.input_proj.2.conv.weight", {256, 512, 1, 1});
  expect_shape(model, aifi + ".self_attn.in_proj_weight", {768, 256});
  expect_shape(model, aifi + ".self_attn.in_proj_bias", {768});
  expect_shape(model, aifi + ".self_attn.out_proj.bias", {256});
  expect_shape(model, aifi + ".linear1.weight", {1024, 256});
  expect_shape(model, aifi + ".norm2.bias", {256});
  expect_shape(model, "encoder.lateral_convs.1.conv.weight", {256, 256, 1, 1});
  expect_shape(model, "encoder.downsample_convs.0.conv.weight", {256, 256, 3, 3});
  expect_shape(model, "encoder.fpn_blocks.1.conv2.conv.weight", {128, 512, 1, 1});
  expect_shape(model, "encoder.pan_blocks.0.bottlenecks.2.conv1.conv.weight", {128, 128, 3, 3});
  expect_shape(model, "encoder.pan_blocks.0.bottlenecks.2.conv2.conv.weight", {128, 128, 1, 1});
  expect_shape(model, "encoder.fpn_blocks.0.conv3.norm.bias", {256});
  const std::string layer = "decoder.decoder.layers.2";
  expect_shape(model, "decoder.input_proj.0.conv.weight", {256, 256, 1, 1});
  expect_shape(model, layer + ".self_attn.out_proj.weight", {256, 256});
  expect_shape(model, layer + ".norm3.weight", {256});
  expect_shape(model, layer + ".cross_attn.num_points_scale", {12});
  expect_shape(model, layer + ".cross_attn.sampling_offsets.weight", {192, 256});
  expect_shape(model, layer + ".cross_attn.attention_weights.bias", {96});
  expect_shape(model, layer + ".cross_attn.value_proj.weight", {256, 256});
  expect_shape(model, layer + ".cross_attn.output_proj.bias", {256});
  expect_shape(model, layer + ".linear2.weight", {256, 1024});
  expect_shape(model, "decoder.denoising_class_embed.weight", {81, 256});
  expect_shape(model, "decoder.query_pos_head.layers.0.weight", {512, 4});
  expect_shape(model, "decoder.enc_output.proj.weight", {256, 256});
  expect_shape(model, "decoder.enc_output.norm.bias", {256});
  expect_shape(model, "decoder.enc_score_head.weight", {80, 256});
  expect_shape(model, "decoder.enc_bbox_head.layers.2.weight", {4, 256});
  expect_shape(model, "decoder.dec_score_head.2.bias", {80});
  expect_shape(model, "decoder.dec_bbox_head.0.layers.1.weight", {256, 256});
  CHECK_FALSE(model.parameters().contains("decoder.decoder.layers.3.norm1.weight"));

  const RtDetr r50(variant_config("r50")), r101(variant_config("r101"));
  expect_shape(r50, "backbone.res_layers.0.blocks.0.branch2c.conv.weight", {256, 64, 1, 1});
  expect_shape(r50, "backbone.res_layers.2.blocks.0.branch2a.conv.weight", {256, 512, 1, 1});
  expect_shape(r50, "backbone.res_layers.3.blocks.0.short.conv.conv.weight", {2048, 1024, 1, 1});
  CHECK_FALSE(r50.parameters().contains("encoder.fpn_blocks.0.conv3.conv.weight"));
  expect_shape(r101, "backbone.res_layers.2.blocks.22.branch2b.conv.weight", {256, 256, 3, 3});
  expect_shape(r101, aifi + ".self_attn.in_proj_weight", {1152, 384});
  expect_shape(r101, "decoder.input_proj.1.conv.weight", {256, 384, 1, 1});
}

TEST_CASE("model: freezing", "[cpu]") {
  const auto frozen = [](std::int64_t freeze_at, bool freeze_norm) {
    ModelConfig config = tiny_config();
    config.backbone.freeze_at = freeze_at;
    config.backbone.freeze_norm = freeze_norm;
    const RtDetr model(config);
    std::vector<std::string> names;
    for (const Parameter& p : model.parameters().all()) {
      if (!p.is_buffer() && !p.trainable()) names.push_back(p.name());
    }
    return names;
  };
  CHECK(frozen(-1, false).empty());
  CHECK(frozen(-1, true).empty());   // frozen norms are buffers
  CHECK(frozen(0, true) == std::vector<std::string>{"backbone.conv1.conv1_1.conv.weight", "backbone.conv1.conv1_2.conv.weight", "backbone.conv1.conv1_3.conv.weight"});
  CHECK(frozen(0, false).size() == 9);
  CHECK(frozen(1, true) == std::vector<std::string>{"backbone.conv1.conv1_1.conv.weight", "backbone.conv1.conv1_2.conv.weight", "backbone.conv1.conv1_3.conv.weight",
                                                    "backbone.res_layers.0.blocks.0.short.conv.weight", "backbone.res_layers.0.blocks.0.branch2a.conv.weight",
                                                    "backbone.res_layers.0.blocks.0.branch2b.conv.weight"});
  for (const std::string& name : frozen(4, true)) CHECK(name.starts_with("backbone."));
  CHECK(frozen(4, true).size() == 3 + 4 * 3);
}

TEST_CASE("model: frozen norms stay, others follow the batch", "[cpu]") {
  for (const bool freeze : {false, true}) {
    CAPTURE(freeze);
    ModelConfig config = tiny_config();
    config.backbone.freeze_norm = freeze;
    RtDetr model(config);
    give_values(model.parameters(), 1, DType::f32);
    for (const bool training : {false, true}) {
      Tape tape;
      Context ctx(Stream::cpu(1), training ? &tape : nullptr, training);
      model.forward(ctx, Variable(noise_pictures(2, 64, 64, DType::f32)));
      const std::vector<double> mean = values_of(model.parameters().find("backbone.conv1.conv1_1.norm.running_mean").value());
      CHECK((mean == std::vector<double>(4, 0)) == (freeze || !training));
      const std::vector<double> encoder = values_of(model.parameters().find("encoder.input_proj.0.norm.running_mean").value());
      CHECK((encoder == std::vector<double>(16, 0)) == !training);
    }
  }
}

TEST_CASE("model: shapes of the features", "[cpu]") {
  RtDetr model(tiny_config());
  give_values(model.parameters(), 1, DType::f32);
  model.keep_features = true;
  Context ctx(Stream::cpu(1), nullptr, false);
  const DecoderOutput output = model.forward(ctx, Variable(noise_pictures(2, 64, 96, DType::f32)));
  REQUIRE(model.backbone_features().size() == 3);
  CHECK(model.backbone_features()[0].shape() == Shape{2, 8, 12, 8});
  CHECK(model.backbone_features()[1].shape() == Shape{2, 4, 6, 8});
  CHECK(model.backbone_features()[2].shape() == Shape{2, 2, 3, 12});
  CHECK(model.encoder_features()[0].shape() == Shape{2, 8, 12, 16});
  CHECK(model.encoder_features()[2].shape() == Shape{2, 2, 3, 16});
  CHECK(output.logits.back().shape() == Shape{2, 12, 3});
  CHECK(output.boxes.back().shape() == Shape{2, 12, 4});

  const auto refused = [&](const Shape& shape, const std::string& text) { expect_throws<InvalidArgument>([&] { model.forward(ctx, Variable(host_zeros(shape, DType::f32))); }, text); };
  refused({1, 64, 65, 3}, "model: image height and width must be multiples of 32, got f32(1, 64, 65, 3)");
  refused({1, 0, 64, 3}, "model: image height and width must be multiples of 32");
  refused({1, 64, 64, 1}, "model: images must be (N, H, W, 3)");
  refused({64, 64, 3}, "model: images must be (N, H, W, 3)");
}

TEST_CASE("encoder: position table", "[cpu]") {
  const std::vector<float> table = position_table(20, 20, 256, 10000);
  const auto at = [&](std::int64_t p, std::int64_t k) { return static_cast<double>(table[static_cast<std::size_t>(p * 256 + k)]); };
  CHECK(table.size() == 400 * 256);
  // p = 1: a = 0, b = 1; p = 20: a = 1, b = 0.
  const std::vector<double> one = {0, 1, 0.841471, 0.540302}, twenty = {0.841471, 0.540302, 0, 1};
  for (std::size_t i = 0; i < 4; ++i) {
    expect_close(at(1, static_cast<std::int64_t>(i) * 64), one[i], 0, 1e-6);
    expect_close(at(20, static_cast<std::int64_t>(i) * 64), twenty[i], 0, 1e-6);
  }
  expect_close(at(20, 1), 0.761720, 0, 1e-6);           // sin of omega_1 = 0.865964
  expect_close(std::asin(at(20, 63)), 1.154782e-4, 1e-5);
  // Not square: row p stands for column p / h and row p mod h.
  const std::vector<float> narrow = position_table(2, 3, 4, 10000);
  for (std::int64_t p = 0; p < 6; ++p) {
    expect_close(static_cast<double>(narrow[static_cast<std::size_t>(p * 4)]), std::sin(static_cast<double>(p / 2)), 0, 1e-6);
    expect_close(static_cast<double>(narrow[static_cast<std::size_t>(p * 4 + 2)]), std::sin(static_cast<double>(p % 2)), 0, 1e-6);
  }
}

TEST_CASE("model: configurations that make no model", "[cpu]") {
  const auto refused = [](const std::function<void(ModelConfig&)>& change, const std::string& text) {
    ModelConfig config = tiny_config();
    change(config);
    expect_throws<ConfigError>([&] { RtDetr{config}; }, text);
  };
  refused([](ModelConfig& c) { c.backbone.depth = 19; }, "PResNet.depth must be 18, 34, 50 or 101");
  refused([](ModelConfig& c) { c.backbone.blocks = {}; }, "PResNet.blocks must have four entries where depth is 0");
  refused([](ModelConfig& c) { c.backbone.blocks = {1, 1}; }, "PResNet.blocks must have four entries");
  refused([](ModelConfig& c) { c.backbone.blocks = {1, 0, 1, 1}; }, "PResNet.blocks: each stage needs a block, got 0");
  refused([](ModelConfig& c) { c.backbone.widths = {4}; }, "PResNet.widths must have four entries");
  refused([](ModelConfig& c) { c.backbone.freeze_at = 5; }, "PResNet.freeze_at must be -1 to 4, got 5");
  refused([](ModelConfig& c) { c.encoder.hidden_dim = 18; }, "HybridEncoder.hidden_dim must be a multiple of 4, got 18");
  refused([](ModelConfig& c) { c.encoder.nhead = 3; }, "HybridEncoder.nhead must divide hidden_dim 16, got 3");
  refused([](ModelConfig& c) { c.encoder.expansion = 0; }, "HybridEncoder.expansion must be positive");
  refused([](ModelConfig& c) { c.decoder.nhead = 5; }, "RTDETRTransformerv2.nhead must divide hidden_dim 16, got 5");
  refused([](ModelConfig& c) { c.decoder.num_points = {4}; }, "RTDETRTransformerv2.num_points must have one entry for each of the 3 levels");
  refused([](ModelConfig& c) { c.decoder.eval_idx = 2; }, "RTDETRTransformerv2.eval_idx 2 is no layer of 2");
  refused([](ModelConfig& c) { c.decoder.cross_attn_method = "nearest"; }, "RTDETRTransformerv2.cross_attn_method must be default or discrete, got nearest");
  refused([](ModelConfig& c) { c.decoder.num_classes = 0; }, "num_classes must be at least 1, got 0");
}

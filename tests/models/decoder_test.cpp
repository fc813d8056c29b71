#include "models/detr/decoder.h"

#include <algorithm>
#include <cmath>

#include "tests/models/model_values.h"

using namespace detr;
using namespace detr::test;
using namespace detr::models;

namespace {

using Levels = std::vector<std::array<std::int64_t, 2>>;

Levels levels_of(std::int64_t size) { return {{size / 8, size / 8}, {size / 16, size / 16}, {size / 32, size / 32}}; }

std::int64_t valid_cells(const std::vector<std::uint8_t>& valid) { return std::count(valid.begin(), valid.end(), 1); }

/// Names of the parameters that a seed of ones in `of` reaches.
std::vector<std::string> reached(RtDetr& model, const std::function<Variable(const DecoderOutput&)>& of) {
  give_values(model.parameters(), 3, DType::f64, 0.05);
  Tape tape;
  Context ctx(Stream::cpu(1), &tape, true);
  const Variable y = of(model.forward(ctx, Variable(noise_pictures(1, 64, 64, DType::f64))));
  tape.backward(ctx, y, host_tensor(y.shape(), std::vector<double>(static_cast<std::size_t>(y.shape().numel()), 1)));
  std::vector<std::string> names;
  for (const Parameter& p : model.parameters().all()) {
    if (tape.reached(p)) names.push_back(p.name());
  }
  return names;
}

bool any_starts_with(const std::vector<std::string>& names, const std::string& prefix) {
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return name.starts_with(prefix); });
}

}  // namespace

TEST_CASE("decoder: anchors", "[cpu]") {
  const Anchors<float> anchors = make_anchors<float>(levels_of(640));
  REQUIRE(anchors.valid.size() == 8400);
  CHECK(valid_cells(anchors.valid) == 8084);   // without the outermost ring of level 0
  const auto logit = [&](std::int64_t token, std::int64_t k) { return static_cast<double>(anchors.logits[static_cast<std::size_t>(token * 4 + k)]); };
  const std::int64_t second = 81, level1 = 6400, level2 = 8000;   // cell (1, 1) of level 0, the first ones of the others
  CHECK(std::isinf(logit(0, 0)));
  CHECK(std::isinf(logit(79, 3)));
  expect_close(logit(second, 0), -3.957634, 1e-6);
  expect_close(logit(second, 1), -3.957634, 1e-6);
  expect_close(logit(level1, 0), -4.369448, 1e-6);
  expect_close(logit(level2, 1), -3.663562, 1e-6);
  expect_close(logit(second, 2), -2.944439, 1e-6);
  expect_close(logit(level1, 3), -2.197225, 1e-6);
  expect_close(logit(level2, 2), -1.386294, 1e-6);
  CHECK(logit(83, 0) > logit(82, 0));   // x runs along the row
  CHECK(logit(83, 1) == logit(82, 1));

  const std::vector<std::pair<std::int64_t, std::size_t>> tokens = {{480, 4725}, {512, 5376}, {544, 6069}, {576, 6804}, {608, 7581}, {672, 9261},
                                                                   {704, 10164}, {736, 11109}, {768, 12096}, {800, 13125}};
  for (const auto& [size, count] : tokens) {
    const Anchors<float> sized = make_anchors<float>(levels_of(size));
    CHECK(sized.valid.size() == count);
    const std::int64_t ring0 = 4 * (size / 8 - 1), ring1 = size == 800 ? 4 * (size / 16 - 1) : 0;   // 0.5 / 50 is 0.01 and not above
    CHECK(valid_cells(sized.valid) == static_cast<std::int64_t>(count) - ring0 - ring1);
    CHECK(make_anchors<double>(levels_of(size)).valid == sized.valid);
  }
  // Height and width are not mixed up.
  const Anchors<double> wide = make_anchors<double>({{2, 4}});
  expect_close(wide.logits[0], std::log(0.125 / 0.875), 1e-12);
  expect_close(wide.logits[1], std::log(0.25 / 0.75), 1e-12);
}

TEST_CASE("decoder: initial values", "[cpu]") {
  ModelConfig config = tiny_config();
  config.decoder.num_layers = 3;
  config.decoder.nhead = 8;
  config.decoder.num_points = {4, 2, 1};
  RtDetr model(config);
  give_values(model.parameters(), 5, DType::f64);
  const auto values = [&](const std::string& name) { return values_of(model.parameters().find(name).value()); };
  const auto within = [](const std::vector<double>& v, double bound) { return std::all_of(v.begin(), v.end(), [=](double x) { return std::abs(x) <= bound; }); };
  const auto all = [](const std::vector<double>& v, double value) { return std::all_of(v.begin(), v.end(), [=](double x) { return x == value; }); };

  const std::string first = "decoder.decoder.layers.0.";
  for (const Parameter& p : model.parameters().all()) {
    if (!p.name().starts_with(first)) continue;
    for (const char* other : {"decoder.decoder.layers.1.", "decoder.decoder.layers.2."}) CHECK(values(p.name()) == values(other + p.name().substr(first.size())));
  }
  CHECK(values("decoder.dec_score_head.0.weight") != values("decoder.dec_score_head.1.weight"));
  CHECK(values("decoder.dec_bbox_head.0.layers.0.weight") != values("decoder.dec_bbox_head.1.layers.0.weight"));

  for (const char* head : {"decoder.enc_score_head", "decoder.dec_score_head.0", "decoder.dec_score_head.2"}) {
    for (const double b : values(concat(head, ".bias"))) expect_close(b, -4.59511985, 1e-8);
    CHECK(within(values(concat(head, ".weight")), 0.25));   // 1 / sqrt(16)
    CHECK_FALSE(all(values(concat(head, ".weight")), 0));
  }
  for (const char* head : {"decoder.enc_bbox_head", "decoder.dec_bbox_head.0", "decoder.dec_bbox_head.2"}) {
    CHECK(all(values(concat(head, ".layers.2.weight")), 0));
    CHECK(all(values(concat(head, ".layers.2.bias")), 0));
    CHECK_FALSE(all(values(concat(head, ".layers.1.weight")), 0));
    CHECK(within(values(concat(head, ".layers.1.bias")), 0.25));
  }
  CHECK(all(values(first + "cross_attn.sampling_offsets.weight"), 0));
  CHECK(all(values(first + "cross_attn.attention_weights.weight"), 0));
  CHECK(all(values(first + "cross_attn.attention_weights.bias"), 0));
  CHECK(all(values(first + "cross_attn.value_proj.bias"), 0));
  CHECK(within(values(first + "cross_attn.value_proj.weight"), std::sqrt(6.0 / 32)));
  CHECK_FALSE(within(values(first + "cross_attn.value_proj.weight"), 0.3));   // wider than the default 1 / 4
  CHECK(within(values(first + "linear1.weight"), std::sqrt(6.0 / 40)));
  CHECK(within(values(first + "self_attn.in_proj_weight"), std::sqrt(6.0 / 64)));
  CHECK(all(values(first + "self_attn.in_proj_bias"), 0));
  CHECK(all(values(first + "norm2.weight"), 1));
  CHECK(within(values("backbone.conv1.conv1_1.conv.weight"), 1 / std::sqrt(27.0)));

  // Head directions at equal angles on the unit square; slot j of a level reaches j + 1 times as far: layout [head][slot][xy].
  const std::vector<std::array<double, 2>> directions = {{1, 0}, {1, 1}, {0, 1}, {-1, 1}, {-1, 0}, {-1, -1}, {0, -1}, {1, -1}};
  const std::vector<double> reach = {1, 2, 3, 4, 1, 2, 1};
  const std::vector<double> bias = values(first + "cross_attn.sampling_offsets.bias");
  REQUIRE(bias.size() == 8 * 7 * 2);
  for (std::size_t m = 0; m < 8; ++m)
    for (std::size_t k = 0; k < 7; ++k)
      for (std::size_t c = 0; c < 2; ++c) expect_close(bias[(m * 7 + k) * 2 + c], directions[m][c] * reach[k], 0, 1e-12);
  CHECK(values(first + "cross_attn.num_points_scale") == std::vector<double>{0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 1});

  const std::vector<double> embedding = values("decoder.denoising_class_embed.weight");
  CHECK(all(std::vector<double>(embedding.end() - 16, embedding.end()), 0));   // the padding row
  double squares = 0;
  for (const double v : embedding) squares += v * v;
  CHECK(squares / 48 > 0.4);
  CHECK(squares / 48 < 2);
}

TEST_CASE("decoder: evaluation reads one layer", "[cpu]") {
  const auto evaluate = [](std::int64_t layers, std::int64_t eval_idx) {
    ModelConfig config = tiny_config();
    config.decoder.num_layers = layers;
    config.decoder.eval_idx = eval_idx;
    RtDetr model(config);
    give_values(model.parameters(), 2, DType::f64, 0.05);
    Context ctx(Stream::cpu(1), nullptr, false);
    const DecoderOutput output = model.forward(ctx, Variable(noise_pictures(1, 64, 64, DType::f64)));
    CHECK(output.logits.size() == 1);
    CHECK(output.boxes.size() == 1);
    for (const double v : values_of(output.boxes[0].value())) CHECK((v > 0 && v <= 1));
    return std::pair(output.logits[0].value(), output.boxes[0].value());
  };
  const auto second = evaluate(3, 1), same = evaluate(3, -2), only = evaluate(2, -1), third = evaluate(3, -1);
  expect_same_bits(second.first, same.first);
  expect_same_bits(second.second, only.second);
  expect_same_bits(second.first, only.first);
  CHECK(values_of(third.first) != values_of(second.first));
}

TEST_CASE("decoder: training runs every layer and selects by falling score", "[cpu]") {
  RtDetr model(tiny_config());
  give_values(model.parameters(), 2, DType::f64, 0.05);
  Tape tape;
  Context ctx(Stream::cpu(1), &tape, true);
  const Variable images(noise_pictures(2, 64, 64, DType::f64));
  const DecoderOutput output = model.forward(ctx, images);
  CHECK(output.logits.size() == 2);
  CHECK(output.logits[0].shape() == Shape{2, 12, 3});
  CHECK(output.enc_boxes.shape() == Shape{2, 12, 4});
  REQUIRE(output.selected.shape() == Shape{2, 12});
  const std::vector<double> scores = values_of(output.enc_logits.value());
  for (std::int64_t n = 0; n < 2; ++n) {
    double before = 1e300;
    std::vector<double> tokens;
    for (std::int64_t q = 0; q < 12; ++q) {
      const double* row = scores.data() + (n * 12 + q) * 3;
      const double best = *std::max_element(row, row + 3);
      CHECK(best <= before);
      before = best;
      tokens.push_back(static_cast<double>(output.selected.data<std::int64_t>()[n * 12 + q]));
    }
    std::sort(tokens.begin(), tokens.end());
    CHECK(std::adjacent_find(tokens.begin(), tokens.end()) == tokens.end());
  }
  // An imposed selection is taken as it is.
  const Tensor imposed = host_tensor<std::int64_t>({2, 12}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 83, 82, 81, 80, 79, 78, 77, 76, 75, 74, 73, 72});
  Tape other;
  Context again(Stream::cpu(1), &other, true);
  expect_same_bits(model.forward(again, images, {}, imposed).selected, imposed);

  ModelConfig config = tiny_config();
  config.decoder.num_queries = 85;
  RtDetr greedy(config);
  give_values(greedy.parameters(), 2, DType::f64);
  expect_throws<InvalidArgument>([&] { greedy.forward(again, images); }, "decoder: 85 queries need as many feature cells, got 84; use a larger image or fewer queries");
}

TEST_CASE("decoder: which parameters an output depends on", "[cpu]") {
  ModelConfig config = tiny_config();
  config.decoder.num_layers = 3;
  RtDetr model(config);
  const auto enc = reached(model, [](const DecoderOutput& o) { return o.enc_boxes; });
  CHECK(any_starts_with(enc, "decoder.enc_bbox_head"));
  CHECK(any_starts_with(enc, "decoder.enc_output"));
  CHECK(any_starts_with(enc, "backbone."));
  CHECK_FALSE(any_starts_with(enc, "decoder.enc_score_head"));
  CHECK_FALSE(any_starts_with(enc, "decoder.decoder.layers"));
  CHECK_FALSE(any_starts_with(enc, "decoder.query_pos_head"));

  // A layer's box also reaches the head of the layer before ("look forward twice"), and no other.
  const auto boxes = reached(model, [](const DecoderOutput& o) { return o.boxes[2]; });
  CHECK(any_starts_with(boxes, "decoder.dec_bbox_head.2"));
  CHECK(any_starts_with(boxes, "decoder.dec_bbox_head.1"));
  CHECK_FALSE(any_starts_with(boxes, "decoder.dec_bbox_head.0"));
  CHECK_FALSE(any_starts_with(boxes, "decoder.enc_"));
  CHECK_FALSE(any_starts_with(boxes, "decoder.dec_score_head"));
  CHECK(any_starts_with(boxes, "decoder.decoder.layers.0"));
  CHECK(any_starts_with(boxes, "encoder."));

  const auto logits = reached(model, [](const DecoderOutput& o) { return o.logits[1]; });
  CHECK(any_starts_with(logits, "decoder.dec_score_head.1"));
  CHECK(any_starts_with(logits, "decoder.query_pos_head"));
  CHECK_FALSE(any_starts_with(logits, "decoder.dec_score_head.0"));
  CHECK_FALSE(any_starts_with(logits, "decoder.dec_bbox_head"));
  CHECK_FALSE(any_starts_with(logits, "decoder.decoder.layers.2"));

  config.decoder.cross_attn_method = "discrete";
  RtDetr discrete(config);
  CHECK_FALSE(discrete.parameters().find("decoder.decoder.layers.1.cross_attn.sampling_offsets.bias").trainable());
  const auto sampled = reached(discrete, [](const DecoderOutput& o) { return o.logits[2]; });
  CHECK_FALSE(any_starts_with(sampled, "decoder.decoder.layers.1.cross_attn.sampling_offsets"));
  CHECK(any_starts_with(sampled, "decoder.decoder.layers.1.cross_attn.attention_weights"));
}

#include "models/detr/criterion.h"

#include <cmath>
#include <limits>

#include "kernels/attention.h"
#include "tests/models/model_values.h"

using namespace detr;
using namespace detr::test;
using namespace detr::models;

namespace {

Tensor number(double value) { return host_tensor<double>({1}, {value}); }

/// One picture, one class, two queries: a near one and a far one, the same in each layer and for the encoder.
DecoderOutput two_queries(std::size_t layers, double second_logit = -4.59512) {
  const Variable logits(host_tensor<double>({1, 2, 1}, {std::log(0.3 / 0.7), second_logit}));
  const Variable boxes(host_tensor<double>({1, 2, 4}, {0.5, 0.5, 0.4, 0.4, 0.1, 0.1, 0.1, 0.1}));
  DecoderOutput output;
  output.logits.assign(layers, logits);
  output.boxes.assign(layers, boxes);
  output.enc_logits = logits;
  output.enc_boxes = boxes;
  return output;
}

TargetInputs one_box(double num_boxes = 1) {
  TargetInputs targets;
  targets.labels = host_tensor<std::int64_t>({1, 2}, {0, 0});
  targets.boxes = host_tensor<double>({1, 2, 4}, {0.6, 0.5, 0.4, 0.2, 0, 0, 0, 0});
  targets.counts = host_tensor<std::int64_t>({1}, {1});
  targets.num_boxes = number(num_boxes);
  return targets;
}

/// Truth of two pictures with two boxes and one, and two groups of denoising queries, padded to gcap and qcap. What is in the
/// padding is legal and not zero.
struct PaddedBatch {
  DenoisingInputs denoising;
  TargetInputs targets;

  PaddedBatch(std::int64_t gcap, std::int64_t qcap) {
    const std::int64_t n = 2, m = 2, groups = 2, slots = 2 * m * groups;
    const std::vector<std::vector<std::int64_t>> labels = {{0, 2}, {1}};
    const std::vector<std::vector<std::array<double, 4>>> boxes = {{{0.3, 0.3, 0.4, 0.3}, {0.7, 0.75, 0.3, 0.4}}, {{0.5, 0.4, 0.5, 0.5}}};
    std::vector<std::int64_t> all_labels, classes, match, group;
    std::vector<double> all_boxes, dn_boxes;
    for (std::size_t i = 0; i < 2; ++i) {
      const auto count = static_cast<std::int64_t>(labels[i].size());
      for (std::int64_t g = 0; g < gcap; ++g) {
        const bool real = g < count;
        all_labels.push_back(real ? labels[i][static_cast<std::size_t>(g)] : 2);
        for (std::size_t k = 0; k < 4; ++k) all_boxes.push_back(real ? boxes[i][static_cast<std::size_t>(g)][k] : 0.45);
      }
      for (std::int64_t p = 0; p < qcap; ++p) {
        const std::int64_t j = p % m, side = p / m % 2;
        const bool slot = p < slots, real = slot && j < count;
        classes.push_back(real ? labels[i][static_cast<std::size_t>(j)] : slot ? 3 : 1);
        match.push_back(real && side == 0 ? j : -1);
        for (std::size_t k = 0; k < 4; ++k) dn_boxes.push_back(real ? boxes[i][static_cast<std::size_t>(j)][k] + 0.01 * static_cast<double>(p) : slot ? 1e-5 : 0.35);
      }
    }
    for (std::int64_t p = 0; p < qcap; ++p) group.push_back(p < slots ? p / (2 * m) : kernels::kPaddingSlot);
    denoising = {host_tensor({n, qcap}, classes), host_tensor({n, qcap, 4}, dn_boxes), host_tensor({qcap}, group)};
    targets.labels = host_tensor({n, gcap}, all_labels);
    targets.boxes = host_tensor({n, gcap, 4}, all_boxes);
    targets.counts = host_tensor<std::int64_t>({n}, {2, 1});
    targets.num_boxes = number(3);
    targets.dn_match = host_tensor({n, qcap}, match);
    targets.dn_num_boxes = number(6);
  }
};

}  // namespace

TEST_CASE("criterion: one box worked by hand", "[cpu]") {
  Context ctx(Stream::cpu(1), nullptr, true);
  const CriterionOutput loss = Criterion({}).forward(ctx, two_queries(1), {}, one_box());
  REQUIRE(loss.matches.size() == 2);
  for (const Tensor& match : loss.matches) CHECK(values_of(match) == std::vector<double>{0, -1});
  for (const Tensor& status : loss.match_status) CHECK(values_of(status) == std::vector<double>{-1});
  // IoU 1/3, GIoU 0.2333333, L1 0.3; the positive's weight is its IoU: 1/3 (softplus(x) - x/3); the negative gives 7.5e-7.
  const double x = std::log(0.3 / 0.7), vfl = (std::log1p(std::exp(x)) - x / 3) / 3 + 7.537752e-7;
  const auto terms = named_losses(loss);
  REQUIRE(terms.size() == 6);
  const std::vector<std::pair<std::string, double>> wanted = {{"loss_vfl", vfl}, {"loss_bbox", 1.5}, {"loss_giou", 2 * (1 - 0.2333333333333)}, {"loss_vfl_enc_0", vfl},
                                                              {"loss_bbox_enc_0", 1.5}, {"loss_giou_enc_0", 2 * (1 - 0.2333333333333)}};
  double total = 0;
  for (std::size_t i = 0; i < 6; ++i) {
    CHECK(terms[i].first == wanted[i].first);
    expect_close(terms[i].second, wanted[i].second, 1e-10);
    total += terms[i].second;
  }
  expect_close(loss.total.value().data<double>()[0], total, 1e-14);

  const auto halves = named_losses(Criterion({}).forward(ctx, two_queries(1), {}, one_box(2)));
  for (std::size_t i = 0; i < 6; ++i) expect_close(halves[i].second, terms[i].second / 2, 1e-14);
  CriterionConfig weights;
  weights.weight_vfl = 10;
  weights.weight_bbox = 1;
  weights.weight_giou = 0;
  const auto weighted = named_losses(Criterion(weights).forward(ctx, two_queries(1), {}, one_box()));
  expect_close(weighted[0].second, 10 * vfl, 1e-10);
  expect_close(weighted[1].second, 0.3, 1e-12);
  CHECK(weighted[2].second == 0);
}

TEST_CASE("criterion: names and order of the terms", "[cpu]") {
  Context ctx(Stream::cpu(1), nullptr, true);
  std::vector<std::string> names;
  for (const auto& [name, value] : named_losses(Criterion({}).forward(ctx, two_queries(3), {}, one_box()))) names.push_back(name);
  CHECK(names == std::vector<std::string>{"loss_vfl", "loss_bbox", "loss_giou", "loss_vfl_aux_0", "loss_bbox_aux_0", "loss_giou_aux_0", "loss_vfl_aux_1", "loss_bbox_aux_1", "loss_giou_aux_1",
                                          "loss_vfl_enc_0", "loss_bbox_enc_0", "loss_giou_enc_0"});
}

TEST_CASE("criterion: named losses of values in any dtype", "[cpu]") {
  const std::vector<Tensor> layers = {host_tensor<double>({2, 3}, {1, 2, 3, 4, 5, 6}), host_tensor<float>({2, 3}, {7, 8, 9, 10, 11, 12}), host_tensor<float>({1, 3}, {13, 14, 15})};
  const std::vector<std::pair<std::string, double>> wanted = {
      {"loss_vfl", 7}, {"loss_bbox", 8}, {"loss_giou", 9}, {"loss_vfl_aux_0", 1}, {"loss_bbox_aux_0", 2}, {"loss_giou_aux_0", 3}, {"loss_vfl_dn_0", 4}, {"loss_bbox_dn_0", 5},
      {"loss_giou_dn_0", 6}, {"loss_vfl_dn_1", 10}, {"loss_bbox_dn_1", 11}, {"loss_giou_dn_1", 12}, {"loss_vfl_enc_0", 13}, {"loss_bbox_enc_0", 14}, {"loss_giou_enc_0", 15}};
  CHECK(named_losses(layers) == wanted);
  CriterionOutput output;
  for (const Tensor& terms : layers) output.terms.emplace_back(terms);
  CHECK(named_losses(output) == wanted);
}

TEST_CASE("criterion: each layer has its own matching", "[cpu]") {
  Context ctx(Stream::cpu(1), nullptr, true);
  DecoderOutput output = two_queries(3);
  output.boxes[1] = Variable(host_tensor<double>({1, 2, 4}, {0.1, 0.1, 0.1, 0.1, 0.6, 0.5, 0.4, 0.2}));   // the second query, exactly
  const CriterionOutput loss = Criterion({}).forward(ctx, output, {}, one_box());
  REQUIRE(loss.matches.size() == 4);   // last layer, layers 0 and 1, encoder
  CHECK(values_of(loss.matches[0]) == std::vector<double>{0, -1});
  CHECK(values_of(loss.matches[1]) == std::vector<double>{0, -1});
  CHECK(values_of(loss.matches[2]) == std::vector<double>{-1, 0});
  CHECK(values_of(loss.matches[3]) == std::vector<double>{0, -1});
  const auto terms = named_losses(loss);
  expect_close(terms[7].second, 0, 0, 1e-12);   // loss_bbox_aux_1
  expect_close(terms[8].second, 0, 0, 1e-12);
}

TEST_CASE("criterion: more boxes than queries, none, and costs that are not finite", "[cpu]") {
  Context ctx(Stream::cpu(1), nullptr, true);
  TargetInputs targets = one_box(3);
  targets.labels = host_tensor<std::int64_t>({1, 3}, {0, 0, 0});
  targets.boxes = host_tensor<double>({1, 3, 4}, {0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.5, 0.5, 0.4, 0.4});
  targets.counts = host_tensor<std::int64_t>({1}, {3});
  CriterionOutput loss = Criterion({}).forward(ctx, two_queries(1), {}, targets);
  CHECK(values_of(loss.matches[0]) == std::vector<double>{2, 1});
  targets.counts = host_tensor<std::int64_t>({1}, {0});
  loss = Criterion({}).forward(ctx, two_queries(1), {}, targets);
  CHECK(values_of(loss.matches[0]) == std::vector<double>{-1, -1});
  const auto terms = named_losses(loss);
  CHECK(terms[0].second > 0);
  CHECK(terms[1].second == 0);
  CHECK(terms[2].second == 0);
  loss = Criterion({}).forward(ctx, two_queries(1, std::numeric_limits<double>::quiet_NaN()), {}, one_box());
  CHECK(values_of(loss.match_status[0]) == std::vector<double>{1});   // box 0, query 1
  CHECK(std::isnan(loss.total.value().data<double>()[0]));
}

TEST_CASE("criterion: padding changes no loss and no gradient", "[cpu]") {
  RtDetr model(tiny_config());
  const Tensor pictures = noise_pictures(2, 64, 64, DType::f64);
  const auto step = [&](std::int64_t gcap, std::int64_t qcap) {
    give_values(model.parameters(), 4, DType::f64, 0.05);
    const PaddedBatch batch(gcap, qcap);
    Tape tape;
    Context ctx(Stream::cpu(2), &tape, true);
    const DecoderOutput output = model.forward(ctx, Variable(pictures), batch.denoising);
    const CriterionOutput loss = Criterion(model.config().criterion).forward(ctx, output, batch.denoising, batch.targets);
    tape.backward(ctx, loss.total);
    std::pair<std::vector<std::pair<std::string, double>>, std::vector<Tensor>> result{named_losses(loss), {}};
    for (const Parameter& p : model.parameters().all()) {
      if (!p.trainable() || p.is_buffer()) continue;
      CHECK(tape.reached(p));
      result.second.push_back(p.grad());   // give_values gives the next run other memory
    }
    for (const Tensor& match : loss.matches) result.second.push_back(match);
    return result;
  };
  const auto plain = step(2, 8);
  REQUIRE(plain.first.size() == 15);
  const std::vector<std::pair<std::int64_t, std::int64_t>> paddings = {{32, 8}, {128, 8}, {2, 9}, {32, 16}, {128, 40}};
  for (const auto& [gcap, qcap] : paddings) {
    CAPTURE(gcap, qcap);
    const auto padded = step(gcap, qcap);
    for (std::size_t i = 0; i < plain.first.size(); ++i) expect_close(padded.first[i].second, plain.first[i].second, 1e-12);
    REQUIRE(padded.second.size() == plain.second.size());
    for (std::size_t i = 0; i < plain.second.size(); ++i) expect_close(padded.second[i], plain.second[i], 1e-9, 1e-12);
  }
}

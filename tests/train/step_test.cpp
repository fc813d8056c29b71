#include "train/step.h"

#include <cmath>
#include <limits>

#include "tests/train/rig.h"

using namespace detr;
using namespace detr::test;
using train::StepResult;

TEST_CASE("step: a tiny model overfits one batch", "[cpu]") {
  Rig rig;
  const data::Batch batch = make_batch(two_pictures(), rig.model.config().decoder);
  double first = 0, last = 0;
  for (int i = 0; i < 60; ++i) {
    const StepResult result = rig.step.run(batch, 1);
    REQUIRE(result.applied);
    CHECK(result.grad_norm > 0);
    if (i == 0) {
      first = result.loss;
      REQUIRE(result.terms.size() == 15);   // three each of the last layer, one earlier, two denoising sets and the encoder
      double sum = 0;
      for (const auto& [name, value] : result.terms) sum += value;
      expect_close(sum, result.loss, 1e-5);
      CHECK(result.terms.front().first == "loss_vfl");
      CHECK(result.terms.back().first == "loss_giou_enc_0");
      CHECK(rig.step.missing().empty());
    }
    last = result.loss;
  }
  CAPTURE(first, last);
  CHECK(last < 0.6 * first);
  CHECK(rig.optimizer.ema_updates() == 60);
}

TEST_CASE("step: the same bits for any number of threads", "[cpu]") {
  std::string wanted;
  for (const int threads : {1, 2, 3}) {
    Rig rig(3, tiny_config(), threads);
    const data::Batch batch = make_batch(two_pictures(), rig.model.config().decoder);
    for (int i = 0; i < 3; ++i) rig.step.run(batch, 1);
    if (wanted.empty()) wanted = rig.hash();
    CHECK(rig.hash() == wanted);
  }
}

TEST_CASE("step: what is not finite changes nothing and is named", "[cpu]") {
  struct Fault {
    std::string parameter;
    float value;
    std::string text;   // of the fault
  };
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<Fault> faults = {
      {"backbone.res_layers.1.blocks.0.branch2a.conv.weight", std::nanf(""), "weight backbone.res_layers.1.blocks.0.branch2a.conv.weight"},
      {"decoder.dec_score_head.1.bias", inf, "weight decoder.dec_score_head.1.bias"},
      {"encoder.lateral_convs.0.norm.running_mean", inf, ""},   // a buffer that training does not read: the step is made
      {"backbone.conv1.conv1_1.conv.weight", 3e38f, "input of the norm with backbone.conv1.conv1_1.norm.running_mean"},
      {"decoder.enc_score_head.weight", 3e38f, "decoder.enc_score_head output"},
      {"decoder.dec_score_head.1.weight", 3e38f, "decoder.dec_score_head.1 output"},
  };
  for (const Fault& fault : faults) {
    CAPTURE(fault.parameter);
    Rig rig;
    const data::Batch batch = make_batch(two_pictures(), rig.model.config().decoder);
    REQUIRE(rig.step.run(batch, 1).applied);
    const Tensor values = rig.parameter(fault.parameter).value();
    const std::vector<float> kept(values.span<float>().begin(), values.span<float>().end());
    for (float& v : values.span<float>()) v = fault.value;
    const std::string before = rig.hash();
    const StepResult result = rig.step.run(batch, 1);
    CHECK(result.applied == fault.text.empty());
    CHECK(result.fault == fault.text);
    if (fault.text.empty()) continue;
    CHECK(rig.hash() == before);
    CHECK(rig.optimizer.ema_updates() == 1);
    // With the value put right, training goes on as if the step had not been tried.
    std::copy(kept.begin(), kept.end(), values.span<float>().begin());
    Rig straight;
    REQUIRE(straight.step.run(batch, 1).applied);
    CHECK(rig.step.run(batch, 1).applied);
    CHECK(straight.step.run(batch, 1).applied);
    CHECK(rig.hash() == straight.hash());
  }
}

TEST_CASE("step: parameters that no loss reaches are listed and stay", "[cpu]") {
  Rig rig;
  models::DecoderConfig without = rig.model.config().decoder;
  without.num_denoising = 0;
  const data::Batch batch = make_batch(two_pictures(), without);
  const Tensor embedding = rig.parameter("decoder.denoising_class_embed.weight").value();
  const std::vector<double> before = values_of(embedding);
  const StepResult result = rig.step.run(batch, 1);
  CHECK(result.applied);
  CHECK(result.terms.size() == 9);
  CHECK(rig.step.missing() == std::vector<std::string>{"decoder.denoising_class_embed.weight"});
  CHECK(values_of(embedding) == before);
}

TEST_CASE("step: pictures without boxes", "[cpu]") {
  Rig rig;
  const data::Batch batch = make_batch({{}, {}}, rig.model.config().decoder);
  const StepResult result = rig.step.run(batch, 1);
  CHECK(result.applied);
  CHECK(rig.step.missing().empty());
  for (const auto& [name, value] : result.terms) {
    if (name.find("vfl") == std::string::npos) CHECK(value == 0);
    else CHECK(value > 0);
  }
}

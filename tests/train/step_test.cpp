#include "train/step.h"

#include <cmath>

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
  for (const Fault& fault : faults()) {
    CAPTURE(fault.parameter);
    Rig rig;
    const data::Batch batch = make_batch(two_pictures(), rig.model.config().decoder);
    REQUIRE(rig.step.run(batch, 1).applied);
    const std::vector<float> kept = rig.values(fault.parameter);
    rig.set_values(fault.parameter, std::vector<float>(kept.size(), fault.value));
    const std::string before = rig.hash();
    const StepResult result = rig.step.run(batch, 1);
    CHECK(result.applied == fault.text.empty());
    CHECK(result.fault == fault.text);
    if (fault.text.empty()) continue;
    CHECK(rig.hash() == before);
    CHECK(rig.optimizer.ema_updates() == 1);
    // With the value put right, training goes on as if the step had not been tried.
    rig.set_values(fault.parameter, kept);
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

TEST_CASE("step: two in flight are the same as one after the other", "[cpu]") {
  Rig rig, straight;
  const data::Batch first = make_batch(two_pictures(), rig.model.config().decoder), second = make_batch(crowd(), rig.model.config().decoder, 96);
  rig.step.start(first, 1);
  rig.step.start(second, 0.5);
  expect_throws<InvalidArgument>([&] { rig.step.start(first, 1); }, "step: 2 steps are in flight");
  for (const auto& [batch, factor] : {std::pair{&first, 1.0}, std::pair{&second, 0.5}}) {
    const StepResult result = rig.step.finish(), wanted = straight.step.run(*batch, factor);
    CHECK(result.applied);
    CHECK(result.loss == wanted.loss);
    CHECK(result.terms == wanted.terms);
    CHECK(result.grad_norm == wanted.grad_norm);
  }
  CHECK(rig.hash() == straight.hash());
  expect_throws<InvalidArgument>([&] { rig.step.finish(); }, "step: finish() without start()");
}

TEST_CASE("step: a run that goes on counts from where it stopped, and computes the same", "[cpu]") {
  std::string wanted;
  for (const std::int64_t made : {0, 7}) {
    Rig rig;
    if (made > 0) rig.step.count_from(made);
    std::vector<std::int64_t> steps;
    rig.step.faults.at = [&](const char* phase, std::int64_t step) {
      if (std::string(phase) == "forward") steps.push_back(step);
    };
    const data::Batch batch = make_batch(two_pictures(), rig.model.config().decoder);
    for (int i = 0; i < 3; ++i) REQUIRE(rig.step.run(batch, 1).applied);
    CHECK(steps == std::vector<std::int64_t>{made, made + 1, made + 2});
    if (wanted.empty()) wanted = rig.hash();
    CHECK(rig.hash() == wanted);
    CHECK_THROWS_WITH(rig.step.count_from(9), Catch::Contains("before the first one"));
  }
}

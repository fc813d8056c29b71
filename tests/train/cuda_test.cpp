// A whole step on a GPU: graphs against single kernels, runs against runs, and the CPU.
#include <algorithm>
#include <cmath>

#include "tests/gpu.h"
#include "tests/train/rig.h"
#include "train/inputs.h"

using namespace detr;
using namespace detr::test;
using train::StepResult;

namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16};
constexpr bool kGraphs = true, kSingleKernels = false;

const models::DecoderConfig& decoder() {
  static const models::ModelConfig config = tiny_config();
  return config.decoder;
}

/// Six batches of two keys (sizes of the pictures, box and denoising slots), mixed: with graphs each key has one step of single kernels,
/// then a capture, then a launch. No batch comes twice.
const std::vector<data::Batch>& six_batches() {
  static const std::vector<data::Batch> batches = [] {
    const auto small = [](std::uint64_t seed) { return make_batch(two_pictures(), decoder(), 64, seed); };
    const auto large = [](std::uint64_t seed) { return make_batch(crowd(), decoder(), 96, seed); };
    return std::vector<data::Batch>{small(1), large(2), small(3), small(4), large(5), large(6)};
  }();
  return batches;
}

/// Another one for each step, so that a factor frozen at capture would show.
double factor(std::size_t step) { return 1 / (1 + 0.25 * static_cast<double>(step)); }

/// Steps [begin, end) over six_batches().
std::vector<StepResult> run(Rig& rig, std::size_t begin = 0, std::size_t end = 6) {
  std::vector<StepResult> results;
  for (std::size_t i = begin; i < end; ++i) {
    INFO("step " << i);
    results.push_back(rig.step.run(six_batches()[i], factor(i)));
    CHECK(results.back().fault == "");
    REQUIRE(results.back().applied);
  }
  return results;
}

void expect_same(const std::vector<StepResult>& got, const std::vector<StepResult>& wanted) {
  REQUIRE(got.size() == wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO("step " << i);
    CHECK(got[i].loss == wanted[i].loss);
    CHECK(got[i].terms == wanted[i].terms);
    CHECK(got[i].grad_norm == wanted[i].grad_norm);
  }
}

/// A rate at which two devices stay together for a few steps: AdamW's first steps are as large as the rate where a gradient is nothing but
/// rounding noise, whose sign is anybody's.
train::OptimizerConfig slow() {
  train::OptimizerConfig config = Rig::quick();
  config.lr = 1e-4;
  return config;
}

/// Scores (N, Q, C) of the moving average, on the host in f64.
Tensor averaged_scores(Rig& rig, const data::Batch& batch) {
  const train::ParameterStore::UseEma scope(rig.store);
  Context ctx(rig.step.stream(), nullptr, false);
  const models::DecoderOutput output = rig.model.forward(ctx, Variable(train::pictures_to_device(rig.step.stream(), batch, rig.store.compute_dtype())));
  return from_gpu(output.logits.back().value());
}

void expect_losses_of_the_cpu(const data::Batch& batch, std::size_t terms, const std::vector<std::string>& missing) {
  Rig cpu(0, tiny_config(), 2, slow()), cuda(gpu(), DType::f32, kGraphs, 0, tiny_config(), slow());
  for (int i = 0; i < 3; ++i) {   // single kernels, capture, launch
    INFO("step " << i);
    const StepResult wanted = cpu.step.run(batch, 1), got = cuda.step.run(batch, 1);
    CHECK(got.fault == "");
    REQUIRE(got.applied);
    expect_close(got.loss, wanted.loss, 1e-4);
    REQUIRE(got.terms.size() == terms);
    for (std::size_t t = 0; t < terms; ++t) {
      INFO(got.terms[t].first);
      CHECK(got.terms[t].first == wanted.terms[t].first);
      if (wanted.terms[t].second == 0) CHECK(got.terms[t].second == 0);
    }
    CHECK(cuda.step.missing() == missing);
  }
}

}  // namespace

TEST_CASE("step on CUDA: graphs and single kernels give the same bits, in every run", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  REQUIRE(train::key_of(six_batches()[0]) == train::key_of(six_batches()[3]));
  REQUIRE(train::key_of(six_batches()[0]) != train::key_of(six_batches()[1]));
  for (const DType dtype : kDTypes) {
    INFO(dtype);
    Rig graphs(gpu(), dtype, kGraphs), again(gpu(), dtype, kGraphs), single(gpu(), dtype, kSingleKernels);
    const std::string initial = graphs.hash();
    const std::vector<StepResult> results = run(graphs);
    CHECK(graphs.step.graph().defined());
    CHECK(graphs.step.graph().kernels() > 100);
    CHECK(graphs.hash() != initial);
    expect_same(run(again), results);
    CHECK(again.hash() == graphs.hash());
    expect_same(run(single), results);
    CHECK_FALSE(single.step.graph().defined());
    CHECK(single.hash() == graphs.hash());
    CHECK(graphs.optimizer.ema_updates() == 6);
  }
}

TEST_CASE("step on CUDA: gradients of weights beside the rest of backward have the bits of those in turn", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : kDTypes) {
    INFO(dtype);
    Rig beside(gpu(), dtype, kGraphs), in_turn(gpu(), dtype, kGraphs);
    in_turn.step.after_part = [](const std::string&) {};   // marks are of one queue
    expect_same(run(beside), run(in_turn));
    CHECK(beside.hash() == in_turn.hash());
  }
}

TEST_CASE("step on CUDA: in f32 the losses of the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  Rig cpu(0, tiny_config(), 2, slow()), cuda(gpu(), DType::f32, kGraphs, 0, tiny_config(), slow()), narrow(gpu(), DType::bf16, kGraphs);
  const std::vector<StepResult> wanted = run(cpu, 0, 4), got = run(cuda, 0, 4);
  for (std::size_t i = 0; i < 4; ++i) {
    INFO("step " << i);
    expect_close(got[i].loss, wanted[i].loss, 1e-4);
  }
  REQUIRE(got[0].terms.size() == wanted[0].terms.size());
  for (std::size_t t = 0; t < wanted[0].terms.size(); ++t) {
    CHECK(got[0].terms[t].first == wanted[0].terms[t].first);
    expect_close(got[0].terms[t].second, wanted[0].terms[t].second, 1e-4);
  }
  expect_close(got[0].grad_norm, wanted[0].grad_norm, 1e-3);
  // Weights rounded to bf16 move the loss by a percent or so, and more where another query is selected or matched.
  expect_close(run(narrow, 0, 1)[0].loss, wanted[0].loss, 0.1);
}

TEST_CASE("step on CUDA: frozen norms, which are folded into convolutions", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  models::ModelConfig config = tiny_config();
  config.backbone.freeze_norm = true;
  config.backbone.freeze_at = 0;
  for (const DType dtype : kDTypes) {
    INFO(dtype);
    Rig graphs(gpu(), dtype, kGraphs, 0, config), single(gpu(), dtype, kSingleKernels, 0, config);
    expect_same(run(graphs), run(single));
    CHECK(graphs.hash() == single.hash());
    expect_same_bits(averaged_scores(graphs, six_batches()[0]), averaged_scores(single, six_batches()[0]));
  }
  Rig cpu(0, config, 2, slow()), cuda(gpu(), DType::f32, kGraphs, 0, config, slow());
  const std::vector<StepResult> wanted = run(cpu, 0, 4), got = run(cuda, 0, 4);
  for (std::size_t i = 0; i < 4; ++i) expect_close(got[i].loss, wanted[i].loss, 1e-4);
}

TEST_CASE("step on CUDA: a stop and a resume change no bit", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const TempDir dir;
  for (const DType dtype : kDTypes) {
    INFO(dtype);
    Rig straight(gpu(), dtype, kGraphs), stopped(gpu(), dtype, kGraphs), resumed(gpu(), dtype, kGraphs, 5);   // other initial values
    const std::vector<StepResult> wanted = run(straight);
    run(stopped, 0, 3);
    train::CheckpointInfo info;
    info.config = "{}";
    info.state.step = 3;
    info.ema_updates = stopped.optimizer.ema_updates();
    train::save_checkpoint(dir / "a.safetensors", stopped.store, stopped.optimizer, info);
    CHECK(train::load_checkpoint(dir / "a.safetensors", resumed.store, resumed.optimizer).ema_updates == 3);
    CHECK(resumed.hash() == stopped.hash());
    expect_same(run(resumed, 3, 6), {wanted.begin() + 3, wanted.end()});
    CHECK(resumed.hash() == straight.hash());
    // A checkpoint goes from one device to the other.
    Rig cpu;
    train::load_checkpoint(dir / "a.safetensors", cpu.store, cpu.optimizer);
    CHECK(cpu.hash() == stopped.hash());
  }
}

TEST_CASE("step on CUDA: what is not finite changes nothing and is named", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : kDTypes) {
    const data::Batch& batch = six_batches()[0];
    for (const Fault& fault : faults()) {
      INFO(fault.parameter << " = " << fault.value << ", " << dtype);
      // Products that overflow may cancel in what tensor cores keep of them, so in bf16 nobody can say what such a weight does.
      if (dtype == DType::bf16 && std::isfinite(fault.value)) continue;
      Rig rig(gpu(), dtype, kGraphs), straight(gpu(), dtype, kGraphs);
      REQUIRE(rig.step.run(batch, 1).applied);
      const std::vector<float> kept = rig.values(fault.parameter);
      rig.set_values(fault.parameter, std::vector<float>(kept.size(), fault.value));
      const std::string before = rig.hash();
      for (int i = 0; i < 2; ++i) {   // captured, and launched again
        const StepResult result = rig.step.run(batch, 1);
        CHECK(result.applied == fault.text.empty());
        CHECK(result.fault == fault.text);
      }
      if (fault.text.empty()) continue;
      CHECK(rig.hash() == before);
      CHECK(rig.optimizer.ema_updates() == 1);
      rig.set_values(fault.parameter, kept);
      for (int i = 0; i < 2; ++i) REQUIRE(straight.step.run(batch, 1).applied);
      CHECK(rig.step.run(batch, 1).applied);
      CHECK(rig.hash() == straight.hash());
    }
  }
}

TEST_CASE("step on CUDA: pictures without boxes, and steps without denoising", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  models::DecoderConfig without = decoder();
  without.num_denoising = 0;
  expect_losses_of_the_cpu(make_batch({{}, {}}, decoder()), 15, {});
  expect_losses_of_the_cpu(make_batch(two_pictures(), without), 9, {"decoder.denoising_class_embed.weight"});
  // Keys with and without denoising, one after the other: what the loss does not reach sits out its own key's steps alone.
  Rig graphs(gpu(), DType::bf16, kGraphs), single(gpu(), DType::bf16, kSingleKernels);
  const std::vector<data::Batch> batches = {make_batch(two_pictures(), decoder()), make_batch(two_pictures(), without), make_batch({{}, {}}, decoder())};
  for (int round = 0; round < 3; ++round) {
    for (const data::Batch& batch : batches) {
      const std::vector<float> embedding = graphs.values("decoder.denoising_class_embed.weight");
      CHECK(graphs.step.run(batch, 1).loss == single.step.run(batch, 1).loss);
      CHECK((graphs.values("decoder.denoising_class_embed.weight") == embedding) == (batch.denoising.groups == 0));
    }
  }
  CHECK(graphs.hash() == single.hash());
}

TEST_CASE("step on CUDA: two in flight are the same as one after the other", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : kDTypes) {
    INFO(dtype);
    Rig rig(gpu(), dtype, kGraphs), straight(gpu(), dtype, kGraphs);
    std::vector<StepResult> results;
    for (std::size_t i = 0; i < 6; ++i) {
      data::Batch batch = six_batches()[i];
      batch.images = host_tensor<std::uint8_t>(batch.images.shape(), std::span<const std::uint8_t>(batch.images.span<std::uint8_t>()));
      rig.step.start(batch, factor(i));
      std::ranges::fill(batch.images.span<std::uint8_t>(), std::uint8_t{255});   // the step has what it needs
      if (i > 0) results.push_back(rig.step.finish());
    }
    results.push_back(rig.step.finish());
    expect_same(results, run(straight));
    CHECK(rig.hash() == straight.hash());
  }
}

TEST_CASE("step on CUDA: evaluation of the moving average between steps leaves the run as it is", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : kDTypes) {
    INFO(dtype);
    Rig evaluated(gpu(), dtype, kGraphs), single(gpu(), dtype, kSingleKernels), straight(gpu(), dtype, kGraphs);
    const std::vector<StepResult> wanted = run(straight);
    const data::Batch& batch = six_batches()[0];
    Tensor before = averaged_scores(evaluated, batch);   // of the initial values; before any step as well
    expect_same_bits(averaged_scores(single, batch), before);
    for (std::size_t i = 0; i < 6; ++i) {
      INFO("step " << i);
      expect_same(run(evaluated, i, i + 1), {wanted[i]});
      run(single, i, i + 1);
      const Tensor scores = averaged_scores(evaluated, batch);
      expect_same_bits(averaged_scores(single, batch), scores);
      CHECK(values_of(scores) != values_of(before));
      before = scores;
      for (const data::Batch& other : {six_batches()[1], six_batches()[4]}) averaged_scores(evaluated, other);   // of another size
    }
    CHECK(evaluated.hash() == straight.hash());
  }
}

TEST_CASE("step on CUDA: the bf16 copy follows the weights", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  Rig rig(gpu(), DType::bf16, kGraphs);
  run(rig);
  std::size_t narrow = 0;
  for (const Parameter& p : rig.model.parameters().all()) {
    INFO(p.name());
    const Tensor master = host_tensor<float>(p.shape(), rig.values(p.name())), used = from_gpu(p.value());
    const DType dtype = p.value().dtype();
    CHECK(dtype == (p.state().wide ? DType::f32 : DType::bf16));
    expect_same_bits(used, rounded(master, dtype));
    narrow += dtype == DType::bf16 ? 1 : 0;
  }
  CHECK(narrow > 50);
}

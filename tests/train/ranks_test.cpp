// Steps of several ranks against one process on the joined batch.
#include <cmath>

#include "dist/build.h"
#include "runtime/faults.h"
#include "tests/dist/ranks.h"
#include "tests/train/rig.h"
#include "train/memory_plan.h"

using namespace detr;
using namespace detr::test;
using train::StepOptions;
using train::StepResult;

namespace {

/// At this rate rounding does not grow from step to step.
train::OptimizerConfig slow() {
  train::OptimizerConfig config = Rig::quick();
  config.lr = 1e-5;
  return config;
}

/// A training run in one or several processes.
struct Run {
  models::ModelConfig config = tiny_config();
  DType dtype = DType::f64;
  std::vector<data::ImageTargets> pictures = {};   ///< of a step, of all ranks
  std::int64_t steps = 3;
  std::int64_t micro_batches = 1;             ///< of a rank
  train::StepFaults faults = {};              ///< asked with the step and the part of the joined batch as micro-batch
  std::function<bool(std::int64_t step)> without_denoising = {};
  bool share_statistics = true, narrow = false;
  train::OptimizerConfig optimizer = slow();
  int constant_on = -1, bad_on = -1;          ///< the rank (or part) whose loss is a constant; the only rank with faults.bad_values
  bool rank_rules = false;                    ///< and each part of a batch has the denoising queries of its own pictures
  bool one_picture = false;                   ///< all pictures have the first one's pixels, so that every part of a batch has its statistics
};

models::ModelConfig frozen_norms() {
  models::ModelConfig config = tiny_config();
  config.backbone.freeze_norm = true;
  return config;
}

/// Values of a weight in a copy of a store's weights, and before the first step.
std::vector<double> values_in(const Run& run, const std::vector<double>& weights, const std::string& name) {
  const Rig rig(Stream::cpu(1), run.dtype, run.dtype, {}, 5, run.config, run.optimizer);
  const Parameter& p = rig.parameter(name);
  const auto begin = weights.begin() + rig.store.offset(p);
  return {begin, begin + p.shape().numel()};
}
std::vector<double> initial_values(const Run& run, const std::string& name) {
  const Rig rig(Stream::cpu(1), run.dtype, run.dtype, {}, 5, run.config, run.optimizer);
  return values_of(rig.parameter(name).value());
}

data::Batch joined_batch(const Run& run, std::int64_t step) {
  models::DecoderConfig decoder = run.config.decoder;
  if (run.without_denoising && run.without_denoising(step)) decoder.num_denoising = 0;
  data::Batch batch = make_batch(run.pictures, decoder, 64, static_cast<std::uint64_t>(step + 1));
  if (run.dtype == DType::f64) {
    const auto wide = [](const Tensor& x) {
      if (!x.defined()) return x;
      Tensor y = host_zeros(x.shape(), DType::f64);
      for (std::int64_t i = 0; i < x.numel(); ++i) y.data<double>()[i] = static_cast<double>(x.data<float>()[i]);
      return y;
    };
    batch.targets.boxes = wide(batch.targets.boxes);
    batch.denoising.boxes = wide(batch.denoising.boxes);
  }
  for (std::int64_t i = 1; run.one_picture && i < batch.images.dim(0); ++i) {
    Tensor image = batch.images.slice(i, i + 1);
    Stream::cpu(1).copy(batch.images.slice(0, 1), image);
  }
  batch.agreed = {std::ssize(run.pictures), batch.targets.total, batch.targets.largest, 0};
  return batch;
}

/// The denoising queries of one of `of` parts of a batch as its pictures alone have them, in the batch's slots.
data::Denoising own_denoising(const Run& run, const data::Batch& joined, std::int64_t step, std::int64_t part, std::int64_t of) {
  const models::DecoderConfig& decoder = run.config.decoder;
  const std::int64_t count = std::ssize(run.pictures) / of;
  const std::vector<data::ImageTargets> own(run.pictures.begin() + part * count, run.pictures.begin() + (part + 1) * count);
  std::vector<RandomKey> keys;
  for (std::int64_t i = part * count; i < (part + 1) * count; ++i) keys.push_back(RandomKey(static_cast<std::uint64_t>(step + 1)).fold(static_cast<std::uint64_t>(i)));
  const data::DenoisingOptions options{decoder.num_denoising, decoder.label_noise_ratio, decoder.box_noise_scale, decoder.num_classes};
  return data::make_denoising(data::make_targets(own, joined.targets.labels.dim(1), run.dtype), options, data::keyed_draws(keys, decoder.num_classes), joined.denoising.classes.dim(1));
}

/// What a run leaves.
struct Left {
  std::vector<std::vector<double>> gradients;   // by step
  std::vector<double> weights, trained;   // all of them, and those that are trained
  std::vector<std::int64_t> updates;
  std::vector<double> losses, norms;
  std::vector<std::vector<std::string>> missing;
  std::vector<bool> applied;
  std::vector<std::string> faults, sum_faults;
  std::string hash;
};

std::vector<double> doubles(const Tensor& x) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < x.numel(); ++i) values.push_back(x.dtype() == DType::f64 ? x.data<double>()[i] : static_cast<double>(x.data<float>()[i]));
  return values;
}

/// `parts` of each joined batch, from part `first` on, are this process's.
Left train_on(const Run& run, const StepOptions& options, std::int64_t first, std::int64_t parts, std::int64_t all_parts, bool keep_gradients) {
  Rig rig(Stream::cpu(1), run.dtype, run.dtype, options, 5, run.config, run.optimizer);
  rig.step.faults = run.faults;
  if (run.bad_on >= 0 && run.bad_on != first) rig.step.faults.bad_values = nullptr;
  if (run.constant_on >= 0) rig.step.faults.constant_loss = [&, base = first](std::int64_t, std::int64_t micro) { return base + micro == run.constant_on; };
  if (run.faults.drops) {
    rig.step.faults.drops = [&, base = first](std::int64_t step, std::int64_t micro, const std::string& name) { return run.faults.drops(step, base + micro, name); };
  }
  Left left;
  for (std::int64_t step = 0; step < run.steps; ++step) {
    const data::Batch joined = joined_batch(run, step);
    const std::int64_t own = first / parts;
    data::Batch batch = train::part_of(joined, own, all_parts / parts);
    if (run.rank_rules) batch.denoising = own_denoising(run, joined, step, own, all_parts / parts);
    const StepResult result = rig.step.run(batch, 1);
    left.losses.push_back(result.loss);
    left.norms.push_back(result.grad_norm);
    left.missing.push_back(rig.step.missing());
    left.applied.push_back(result.applied);
    left.faults.push_back(result.fault);
    left.sum_faults.push_back(result.sum_fault);
    if (keep_gradients) left.gradients.push_back(doubles(rig.store.grads()));
  }
  left.weights = doubles(rig.store.weights());
  left.trained = doubles(rig.store.trained_weights());
  const Tensor updates = rig.optimizer.steps();
  left.updates.assign(updates.span<std::int64_t>().begin(), updates.span<std::int64_t>().end());
  left.hash = rig.hash();
  return left;
}

/// The same run on `ranks` ranks; every rank's result.
std::vector<Left> train_on_ranks(const Run& run, int ranks, bool keep_gradients = true) {
  std::vector<Left> left(static_cast<std::size_t>(ranks));
  const dist::Milliseconds patience(60000);
  const std::vector<std::string> thrown = dist::test::run_ranks(ranks, [&](const dist::Meeting& meeting) {
    const auto control = dist::test::meet(meeting);
    const auto communicator = dist::test::communicator_of(control, patience);
    StepOptions options;
    options.micro_batches = run.micro_batches;
    options.ranks.size = ranks;
    options.ranks.share_statistics = run.share_statistics;
    options.ranks.narrow = run.narrow;
    options.ranks.rank_rules = run.rank_rules;
    options.ranks.caps = {4096, 16384};   // several buckets in a tiny model
    train::MemoryRequest request;
    request.make_model = [&] { return std::make_unique<models::RtDetr>(run.config); };
    request.optimizer = run.optimizer;
    request.compute = run.dtype;
    request.device = Device::cpu();
    request.step = options;
    train::StepKey key = train::key_of(train::part_of(joined_batch(run, 0), 0, ranks * run.micro_batches));
    request.keys = {key};
    options.ranks.plan = train::plan_collectives(request);
    options.ranks.communicator = communicator.get();
    options.ranks.control = control.get();
    left[static_cast<std::size_t>(meeting.rank)] = train_on(run, options, meeting.rank * run.micro_batches, run.micro_batches, ranks * run.micro_batches, keep_gradients);
    communicator->barrier(patience, "end");
  }, patience);
  for (const std::string& text : thrown) REQUIRE(text == "");
  return left;
}

Left train_alone(const Run& run, std::int64_t micro_batches = 1, bool keep_gradients = true) {
  StepOptions options;
  options.micro_batches = micro_batches;
  return train_on(run, options, 0, micro_batches, micro_batches, keep_gradients);
}

double relative_error(const std::vector<double>& got, const std::vector<double>& wanted) {
  REQUIRE(got.size() == wanted.size());
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - wanted[i]) * (got[i] - wanted[i]);
    norm += wanted[i] * wanted[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

/// The error in units of the tolerance, so that a failure shows it.
void expect_within(const std::vector<double>& got, const std::vector<double>& wanted, double tolerance) { CHECK(relative_error(got, wanted) / tolerance < 1); }

/// All ranks hold the same bits, and they are those of one process up to rounding.
void expect_equal_to(const std::vector<Left>& ranks, const Left& alone, double tolerance) {
  for (const Left& rank : ranks) {
    CHECK(rank.hash == ranks[0].hash);
    CHECK(rank.losses == ranks[0].losses);
    CHECK(rank.missing == alone.missing);
    CHECK(rank.updates == alone.updates);
    REQUIRE(rank.gradients.size() == alone.gradients.size());
    for (std::size_t s = 0; s < alone.gradients.size(); ++s) expect_within(rank.gradients[s], alone.gradients[s], tolerance);
    expect_within(rank.weights, alone.weights, tolerance);
    expect_within(rank.losses, alone.losses, tolerance);
    expect_within(rank.norms, alone.norms, tolerance);
  }
}

double tolerance_of(DType dtype) { return dtype == DType::f64 ? 1e-12 : 1e-5; }

data::ImageTargets picture(int i) {
  return {{i % 3, (i + 1) % 3}, {{0.3 + 0.03 * i, 0.4, 0.3, 0.4}, {0.6, 0.7 - 0.04 * i, 0.2 + 0.02 * i, 0.3}}};
}

std::vector<data::ImageTargets> pictures(int count) {
  std::vector<data::ImageTargets> all;
  for (int i = 0; i < count; ++i) all.push_back(picture(i));
  return all;
}

}  // namespace

TEST_CASE("ranks: gradients, losses and weights are those of one process on the joined batch", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  for (const DType dtype : {DType::f64, DType::f32}) {
    for (const int ranks : {2, 3, 4}) {
      CAPTURE(dtype, ranks);
      Run run;
      run.dtype = dtype;
      run.pictures = pictures(2 * ranks);
      expect_equal_to(train_on_ranks(run, ranks), train_alone(run), tolerance_of(dtype));
    }
  }
}

TEST_CASE("ranks: each rank in turn without boxes, and all of them", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  for (const bool frozen : {false, true}) {
    for (int empty = 0; empty <= 3; ++empty) {
      CAPTURE(frozen, empty);
      Run run;
      if (frozen) run.config = frozen_norms();
      run.pictures = pictures(3);
      for (int r = 0; r < 3; ++r) {
        if (empty == 3 || empty == r) run.pictures[static_cast<std::size_t>(r)] = {};
      }
      expect_equal_to(train_on_ranks(run, 3), train_alone(run), 1e-12);
    }
  }
}

TEST_CASE("ranks: fewer boxes than ranks", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  Run run;
  run.pictures = {{}, {}, {{1}, {{0.5, 0.5, 0.4, 0.4}}}, {}};
  expect_equal_to(train_on_ranks(run, 4), train_alone(run), 1e-12);
}

TEST_CASE("ranks: the reference's two rules are kept where they are asked for", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  // Three boxes here and one there, which gives each rank other groups; one box for two ranks, where the divisor is no longer the number of boxes.
  const data::ImageTargets three{{0, 1, 2}, {{0.3, 0.3, 0.2, 0.3}, {0.6, 0.7, 0.3, 0.3}, {0.7, 0.2, 0.3, 0.2}}}, one{{1}, {{0.5, 0.5, 0.4, 0.4}}};
  for (const auto& [pictures, boxes] : {std::pair(std::vector{three, one}, 4), std::pair(std::vector{one, data::ImageTargets()}, 1), std::pair(std::vector<data::ImageTargets>(2), 0)}) {
    CAPTURE(boxes);
    Run run;
    run.pictures = pictures;
    run.steps = 1;
    run.share_statistics = false;
    run.optimizer.clip_max_norm = 0;
    const Left usual = train_on_ranks(run, 2)[0];
    run.rank_rules = true;
    const std::vector<Left> ranks = train_on_ranks(run, 2);
    CHECK(ranks[0].hash == ranks[1].hash);
    // The mean over the ranks of losses divided by max(boxes / 2, 1). One process divides by max(boxes, 1).
    const double scale = std::max(boxes, 1) / (2 * std::max(boxes / 2.0, 1.0));
    std::vector<double> wanted;
    double loss = 0;
    for (const std::int64_t rank : {0, 1}) {
      const Left alone = train_on(run, StepOptions(), rank, 1, 2, true);
      wanted.resize(alone.gradients[0].size());
      for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] += scale * alone.gradients[0][i];
      loss += scale * alone.losses[0];
    }
    expect_within(ranks[0].gradients[0], wanted, 1e-12);
    expect_within(ranks[0].losses, {loss}, 1e-12);
    CHECK(relative_error(usual.gradients[0], wanted) > 1e-3);
  }
}

TEST_CASE("ranks: accumulation of four micro-batches is the joined batch", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  Run run;
  run.pictures = pictures(8);
  run.pictures[3] = {};
  run.steps = 1;            // running statistics are updated by each micro-batch
  run.one_picture = true;
  const Left joined = train_alone(run);
  const auto expect = [&](const Left& got) {
    expect_within(got.gradients[0], joined.gradients[0], 1e-12);
    expect_within(got.losses, joined.losses, 1e-12);
    expect_within(got.norms, joined.norms, 1e-12);
    CHECK(got.updates == joined.updates);
    expect_within(got.trained, joined.trained, 1e-12);
  };
  expect(train_alone(run, 4));
  run.micro_batches = 4;
  const std::vector<Left> ranks = train_on_ranks(run, 2);
  CHECK(ranks[0].hash == ranks[1].hash);
  for (const Left& rank : ranks) expect(rank);
}

/// 30 % of the parameters dropped on each of three ranks, other ones in each step.
void train_with_drops(std::int64_t steps) {
  Run run;
  run.pictures = pictures(3);
  run.share_statistics = false;   // else what one rank drops changes the others' gradients
  run.steps = steps;
  run.optimizer.lr = 1e-9;        // so that after any number of steps only rounding differs
  const std::string never = "decoder.query_pos_head.layers.1.bias", late = "decoder.query_pos_head.layers.0.bias";
  std::vector<Faults> faults;
  for (int r = 0; r < 3; ++r) faults.emplace_back("drop:p=0.3,seed=7", r, 3);
  run.faults.drops = [&](std::int64_t step, std::int64_t part, const std::string& name) {
    return name == never || (name == late && step < 50) || (name != late && faults[static_cast<std::size_t>(part)].drop(step)(name));
  };
  const Left alone = train_alone(run, 3);
  const std::vector<Left> ranks = train_on_ranks(run, 3);
  const train::ParameterStore& store = Rig().store;
  bool varied = false;
  for (const Left& rank : ranks) {
    CHECK(rank.hash == ranks[0].hash);
    CHECK(rank.missing == alone.missing);
    CHECK(rank.updates == alone.updates);
    // Among a thousand batches there is one or the other whose gradient is badly conditioned.
    std::size_t rough = 0;
    for (std::size_t step = 0; step < alone.gradients.size(); ++step) {
      const double error = relative_error(rank.gradients[step], alone.gradients[step]);
      CHECK(error < 1e-11);
      if (error >= 1e-12) ++rough;
    }
    CHECK(rough <= alone.gradients.size() / 100);
    expect_within(rank.trained, alone.trained, 1e-12);
  }
  for (std::size_t i = 0; i < store.trainable().size(); ++i) {
    const std::int64_t updates = ranks[0].updates[i];
    if (store.trainable()[i].name() == never) CHECK(updates == 0);
    else if (store.trainable()[i].name() == late) CHECK(updates == steps - 50);   // its count begins with its first use
    else varied = varied || updates < steps;
  }
  CHECK(varied);
  const std::vector<double> before = initial_values(run, never), after = values_in(run, ranks[0].weights, never);
  CHECK(before == after);   // no decay, no moments
}

TEST_CASE("ranks: random sets of parameters dropped on each rank are summed as in one process", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  train_with_drops(60);
}

TEST_CASE("ranks: a thousand steps with random sets of parameters dropped", "[slow]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  train_with_drops(1000);
}

TEST_CASE("ranks: a rank whose loss is a constant, and steps without denoising", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  for (const bool shared : {true, false}) {
    Run run;
    run.pictures = pictures(3);
    run.steps = 4;
    run.share_statistics = shared;
    run.without_denoising = [](std::int64_t step) { return step % 2 == 1; };
    run.constant_on = 1;
    const std::vector<Left> ranks = train_on_ranks(run, 3);
    for (const Left& rank : ranks) CHECK(rank.hash == ranks[0].hash);
    CHECK(ranks[0].missing[0].empty());
    CHECK(ranks[0].missing[1] == std::vector<std::string>{"decoder.denoising_class_embed.weight"});
    if (shared) continue;
    Run others = run;   // one process on the other ranks' parts gets the same gradients
    expect_within(ranks[0].gradients[0], train_alone(others, 3).gradients[0], 1e-12);
  }
}

TEST_CASE("ranks: buckets in bf16 differ by rounding alone, and are the same on all ranks", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  for (const int ranks : {2, 4}) {
    Run run;
    run.dtype = DType::f32;
    run.pictures = pictures(4);
    run.steps = 2;
    run.narrow = true;
    const std::vector<Left> left = train_on_ranks(run, ranks);
    const Left alone = train_alone(run);
    for (const Left& rank : left) {
      CHECK(rank.hash == left[0].hash);
      const double error = relative_error(rank.gradients[0], alone.gradients[0]);
      CHECK(error < 4e-3 * std::sqrt(static_cast<double>(ranks)));   // half a unit of 2^-8 a hop, at random
      CHECK(error > 1e-4);
    }
  }
}

TEST_CASE("ranks: a gradient that is not finite on one rank is skipped by all and named there", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  const std::string name = "decoder.dec_score_head.0.bias";
  Run run;
  run.pictures = pictures(3);
  run.bad_on = 2;
  run.faults.bad_values = [&](std::int64_t step) { return step == 1 ? std::vector<train::BadValue>{{name, 1, std::nan("")}} : std::vector<train::BadValue>(); };
  const std::vector<Left> ranks = train_on_ranks(run, 3);
  for (const Left& rank : ranks) {
    CHECK(rank.hash == ranks[0].hash);
    CHECK(rank.applied == std::vector<bool>{true, false, true});
    for (const std::int64_t updates : rank.updates) CHECK(updates == 2);
  }
  CHECK(ranks[0].faults == std::vector<std::string>(3));
  CHECK(ranks[1].faults == std::vector<std::string>(3));
  CHECK(ranks[2].faults == std::vector<std::string>{"", "gradient of decoder.dec_score_head.0.bias[1]", ""});
  CHECK(ranks[0].sum_faults[1] == "gradient of decoder.dec_score_head.0.bias");
}

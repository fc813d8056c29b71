#include "train/optimizer.h"

#include <cmath>
#include <limits>

#include "kernels/optimizer.h"
#include "models/nn/init.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;
using namespace detr::train;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Two parameters of f64 values, "a.weight" (2) and "b.norm.weight" (1), and a buffer, all ones.
struct Small {
  ParameterList list;
  Parameter a, b, buffer;
  Stream stream = Stream::cpu(1);
  std::unique_ptr<ParameterStore> store;

  Small() {
    a = list.add("a.weight", {2}, models::init::constant(1));
    b = list.add("b.norm.weight", {1}, models::init::constant(1));
    buffer = list.add_buffer("b.norm.running_mean", {1}, models::init::constant(1));
    store = std::make_unique<ParameterStore>(list, stream, DType::f64);
    store->initialise(0);
  }
  void set_gradients(double a0, double a1, double b0) {
    a.grad().data<double>()[0] = a0;
    a.grad().data<double>()[1] = a1;
    b.grad().data<double>()[0] = b0;
  }
  /// The element of a buffer that belongs to a parameter.
  double at(const Tensor& of, const Parameter& p, std::int64_t i = 0) { return store->slice(of, p).data<double>()[i]; }
};

OptimizerConfig plain() {
  OptimizerConfig config;
  config.lr = 0.1;
  config.weight_decay = 0.01;
  config.clip_max_norm = 0;
  return config;
}

const std::vector<bool> kAll = {true, true};

}  // namespace

TEST_CASE("optimizer: two steps of AdamW worked by hand", "[cpu]") {
  Small s;
  Optimizer optimizer(*s.store, s.stream, plain());
  s.set_gradients(0.5, 0, 0.5);
  REQUIRE(optimizer.step(1, kAll));
  // m = 0.05, v = 0.00025; corrected 0.5 and 0.25: 1 * (1 - 0.001) - 0.1 * 0.5 / (0.5 + 1e-8)
  expect_close(s.at(s.store->weights(), s.a), 0.8990000019999999, 1e-15);
  expect_close(s.at(s.store->exp_avg(), s.a), 0.05, 1e-15);
  expect_close(s.at(s.store->exp_avg_sq(), s.a), 0.00025, 1e-12);
  CHECK(s.at(s.store->weights(), s.a, 1) == 0.999);   // a zero gradient still decays
  s.set_gradients(-1, 0, -1);
  REQUIRE(optimizer.step(1, kAll));
  // m = -0.055, v = 0.00124975; corrected by 0.19 and 0.001999
  expect_close(s.at(s.store->weights(), s.a), 0.9347113542385652, 1e-14);
  expect_close(s.at(s.store->weights(), s.b), 0.9347113542385652, 1e-14);
  expect_close(s.at(s.store->exp_avg(), s.a), -0.055, 1e-14);
  expect_close(s.at(s.store->exp_avg_sq(), s.a), 0.00124975, 1e-12);
  CHECK(values_of(optimizer.steps()) == std::vector<double>{2, 2});
  CHECK(s.buffer.value().data<double>()[0] == 1);
}

TEST_CASE("optimizer: the schedule's factor scales step and decay", "[cpu]") {
  Small s;
  Optimizer optimizer(*s.store, s.stream, plain());
  s.set_gradients(0.5, 0, 0);
  REQUIRE(optimizer.step(0.5, kAll));
  expect_close(s.at(s.store->weights(), s.a), 1 - 0.0005 - 0.05 * 0.5 / (0.5 + 1e-8), 1e-15);
}

TEST_CASE("optimizer: a parameter that the loss did not reach is left alone", "[cpu]") {
  Small s;
  Optimizer optimizer(*s.store, s.stream, plain());
  s.set_gradients(0.5, 0.5, kNan);
  REQUIRE(s.store->trainable()[0].name() == "b.norm.weight");
  REQUIRE(optimizer.step(1, {false, true}));
  CHECK(s.at(s.store->weights(), s.b) == 1);   // no decay either
  CHECK(s.at(s.store->exp_avg(), s.b) == 0);
  CHECK(s.at(s.store->exp_avg_sq(), s.b) == 0);
  CHECK(values_of(optimizer.steps()) == std::vector<double>{0, 1});
  expect_close(optimizer.gradient_norm(), std::sqrt(0.5), 1e-15);
  CHECK(optimizer.first_bad_parameter() == nullptr);
  // Its first update is corrected as a first update.
  s.set_gradients(0.5, 0.5, 0.5);
  REQUIRE(optimizer.step(1, kAll));
  expect_close(s.at(s.store->weights(), s.b), 0.8990000019999999, 1e-15);
  CHECK(values_of(optimizer.steps()) == std::vector<double>{1, 2});
  expect_throws<InvalidArgument>([&] { optimizer.step(1, {true}); }, "optimizer: 1 used bits for 2 parameters");
}

TEST_CASE("optimizer: the gradient is clipped to its global norm", "[cpu]") {
  Small s;
  OptimizerConfig config = plain();
  config.clip_max_norm = 0.1;
  Optimizer optimizer(*s.store, s.stream, config);
  s.set_gradients(3, 0, 4);
  REQUIRE(optimizer.step(1, kAll));
  CHECK(optimizer.gradient_norm() == 5);
  const double clip = 0.1 / (5 + 1e-6);
  expect_close(s.at(s.store->exp_avg(), s.a), 0.1 * 3 * clip, 1e-14);
  expect_close(s.at(s.store->exp_avg(), s.b), 0.1 * 4 * clip, 1e-14);
  s.set_gradients(0.03, 0, 0.04);   // within the limit: as it is
  REQUIRE(optimizer.step(1, kAll));
  expect_close(s.at(s.store->exp_avg(), s.b), 0.9 * 0.1 * 4 * clip + 0.1 * 0.04, 1e-12);
}

TEST_CASE("optimizer: a gradient that is not finite changes nothing and is named", "[cpu]") {
  for (const double bad : {kNan, std::numeric_limits<double>::infinity()}) {
    Small s;
    Optimizer optimizer(*s.store, s.stream, plain());
    s.set_gradients(0.5, 0.5, 0.5);
    REQUIRE(optimizer.step(1, kAll));
    const std::vector<double> weights = values_of(s.store->weights()), ema = values_of(s.store->ema()), m = values_of(s.store->exp_avg()), v = values_of(s.store->exp_avg_sq());
    s.set_gradients(0.5, 0.5, bad);
    CHECK_FALSE(optimizer.step(1, kAll));
    REQUIRE(optimizer.first_bad_parameter());
    CHECK(optimizer.first_bad_parameter()->name() == "b.norm.weight");
    s.set_gradients(0.5, bad, bad);
    CHECK_FALSE(optimizer.step(1, kAll));
    CHECK(optimizer.first_bad_parameter()->name() == "a.weight");   // the earlier layer
    CHECK(values_of(s.store->weights()) == weights);
    CHECK(values_of(s.store->ema()) == ema);
    CHECK(values_of(s.store->exp_avg()) == m);
    CHECK(values_of(s.store->exp_avg_sq()) == v);
    CHECK(values_of(optimizer.steps()) == std::vector<double>{1, 1});
    CHECK(optimizer.ema_updates() == 1);
    s.set_gradients(0.5, 0.5, 0.5);
    CHECK(optimizer.step(1, kAll));
    CHECK_FALSE(optimizer.step(1, kAll, false));   // not allowed
    CHECK(values_of(optimizer.steps()) == std::vector<double>{2, 2});
  }
}

TEST_CASE("check_step: a loss that is not finite or an unsolved matching stops the step", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const auto statuses = [](const std::vector<std::int64_t>& values) { return host_tensor(Shape{std::ssize(values)}, values); };
  const auto applied = [&](const Tensor& total, const std::vector<Tensor>& status, double apply) {
    Tensor scalars = host_tensor<double>({kernels::kScalars}, std::vector<double>(kernels::kScalars, apply));
    kernels::check_step(stream, total, status, scalars);
    for (int i = 0; i < kernels::kScalars; ++i) CHECK((i == kernels::kApply || scalars.data<double>()[i] == apply));
    return scalars.data<double>()[kernels::kApply];
  };
  const Tensor loss = host_tensor<double>({1}, {5}), single = host_tensor<float>({1}, {5}), healthy = statuses({-1, -1, -1});
  CHECK(applied(loss, {}, 1) == 1);
  CHECK(applied(loss, {healthy, statuses({}), healthy.reshape({3, 1})}, 1) == 1);
  CHECK(applied(single, {healthy}, 1) == 1);
  CHECK(applied(loss, {healthy}, 0) == 0);   // a step that is called off stays so
  CHECK(applied(loss, {healthy, statuses({-1, -1, 0})}, 1) == 0);
  CHECK(applied(loss, {statuses({7, -1})}, 1) == 0);
  for (const double bad : {kNan, std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()}) {
    CHECK(applied(host_tensor<double>({1}, {bad}), {healthy}, 1) == 0);
    CHECK(applied(host_tensor<float>({1}, {static_cast<float>(bad)}), {}, 1) == 0);
  }
  CHECK(applied(loss, std::vector<Tensor>(kernels::kMaxStatuses, healthy), 1) == 1);
  expect_throws<InvalidArgument>([&] { applied(loss, std::vector<Tensor>(kernels::kMaxStatuses + 1, healthy), 1); }, "check_step: at most 16 statuses, got 17");
  expect_throws<InvalidArgument>([&] { applied(host_zeros({2}, DType::f64), {}, 1); }, "check_step: total must be f64(1)");
  expect_throws<InvalidArgument>([&] { applied(loss, {loss}, 1); }, "check_step: status must be i64(1)");
  Tensor few = host_zeros({2}, DType::f64);
  expect_throws<InvalidArgument>([&] { kernels::check_step(stream, loss, {}, few); }, "check_step: scalars must be f64(5)");
}

TEST_CASE("check_votes: a step is made by all ranks or by none", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const auto applied = [&](const std::vector<double>& votes, double wanted, double apply) {
    Tensor scalars = host_tensor<double>({kernels::kScalars}, std::vector<double>(kernels::kScalars, apply));
    kernels::check_votes(stream, host_tensor(Shape{std::ssize(votes)}, votes), wanted, scalars);
    for (int i = 0; i < kernels::kScalars; ++i) CHECK((i == kernels::kApply || scalars.data<double>()[i] == apply));
    return scalars.data<double>()[kernels::kApply];
  };
  CHECK(applied({3}, 3, 1) == 1);
  CHECK(applied({3, 3}, 3, 1) == 1);
  CHECK(applied({3, 3}, 3, 0) == 0);
  CHECK(applied({3, 2}, 3, 1) == 0);
  CHECK(applied({0, 3}, 3, 1) == 0);
  CHECK(applied({kNan}, 1, 1) == 0);
  expect_throws<InvalidArgument>([&] { applied({}, 1, 1); }, "check_votes: votes (n) f64");
}

TEST_CASE("restore_unless_applied: statistics of a step that is not made", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  Tensor scalars = host_zeros({kernels::kScalars}, DType::f64);
  for (const double apply : {0.0, 1.0}) {
    scalars.data<double>()[kernels::kApply] = apply;
    const Tensor kept = host_tensor<float>({3}, {1, 2, 3});
    Tensor buffers = host_tensor<float>({3}, {4, 5, 6}), none = host_zeros({0}, DType::f64);
    kernels::restore_unless_applied(stream, scalars, kept, buffers);
    CHECK(values_of(buffers) == (apply == 1 ? std::vector<double>{4, 5, 6} : std::vector<double>{1, 2, 3}));
    CHECK(values_of(kept) == std::vector<double>{1, 2, 3});
    kernels::restore_unless_applied(stream, scalars, host_zeros({0}, DType::f64), none);
    expect_throws<InvalidArgument>([&] { kernels::restore_unless_applied(stream, scalars, host_zeros({2}, DType::f32), buffers); },
                                   "restore_unless_applied: kept must be f32(3), got f32(2)");
    expect_throws<InvalidArgument>([&] { kernels::restore_unless_applied(stream, kept, kept, buffers); }, "restore_unless_applied: scalars must be f64(5)");
  }
}

TEST_CASE("optimizer: decay of the moving average", "[cpu]") {
  const std::vector<std::pair<std::int64_t, double>> recorded = {{1, 4.998250e-4}, {10, 4.987022e-3}, {100, 0.04876570}, {1000, 0.39342999}, {2000, 0.63205735}, {10000, 0.99316273}};
  for (const auto& [updates, decay] : recorded) {
    Small s;
    Optimizer optimizer(*s.store, s.stream, plain());
    for (double& v : s.store->ema().span<double>()) v = 0;
    optimizer.set_ema_updates(updates - 1);
    REQUIRE(optimizer.step(0, kAll));   // weights stay at one, so the average becomes 1 - decay, in the buffer too
    CHECK(optimizer.ema_updates() == updates);
    expect_close(1 - s.at(s.store->ema(), s.a), decay, 2e-7);
    expect_close(1 - s.at(s.store->ema(), s.buffer), decay, 2e-7);
  }
  Small s;
  Optimizer ramp(*s.store, s.stream, plain());
  for (double& v : s.store->ema().span<double>()) v = 0;
  ramp.set_ema_ramp(1);
  REQUIRE(ramp.step(0, kAll));
  expect_close(1 - s.at(s.store->ema(), s.a), 0.9999 * (1 - std::exp(-1.0)), 1e-12);

  Small still;
  OptimizerConfig config = plain();
  config.use_ema = false;
  Optimizer without(*still.store, still.stream, config);
  still.set_gradients(1, 1, 1);
  REQUIRE(without.step(1, kAll));
  CHECK(still.at(still.store->ema(), still.a) == 1);
  CHECK(without.ema_updates() == 0);
}

TEST_CASE("optimizer: groups", "[cpu]") {
  Small s;
  OptimizerConfig config = plain();
  config.groups = {{"norm", std::nullopt, 0.0}, {"^none", 0.5, std::nullopt}};
  Optimizer optimizer(*s.store, s.stream, config);
  CHECK(optimizer.group_sizes() == std::vector<std::int64_t>{1, 0, 1});
  CHECK(optimizer.group_lr() == std::vector<double>{0.1, 0.5, 0.1});
  REQUIRE(optimizer.step(1, kAll));
  CHECK(s.at(s.store->weights(), s.b) == 1);
  CHECK(s.at(s.store->weights(), s.a) == 0.999);

  config.groups = {{"weight", std::nullopt, std::nullopt}, {"norm", std::nullopt, std::nullopt}};
  expect_throws<ConfigError>([&] { Optimizer(*s.store, s.stream, config); }, "optimizer.params: b.norm.weight is in groups 0 and 1; groups must not overlap");
  config.groups = {{"weight", std::nullopt, std::nullopt}, {"(", std::nullopt, std::nullopt}};
  expect_throws<ConfigError>([&] { Optimizer(*s.store, s.stream, config); }, "optimizer.params.1.params: '(' is no regular expression");
}

TEST_CASE("optimizer: schedule", "[cpu]") {
  expect_close(1e-4 * warmup_factor(0, 2000), 5e-8, 1e-15);
  expect_close(1e-4 * warmup_factor(999, 2000), 5e-5, 1e-15);
  CHECK(warmup_factor(1999, 2000) == 1);
  CHECK(warmup_factor(5000, 2000) == 1);
  CHECK(warmup_factor(0, 0) == 1);
  CHECK(multistep_factor(999, {1000}, 0.1) == 1);
  CHECK(multistep_factor(1000, {1000}, 0.1) == 0.1);
  CHECK(multistep_factor(7, {7, 3, 9}, 0.5) == 0.25);
}

#include "train/store.h"

#include "models/nn/init.h"
#include "models/nn/layers.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;
using train::ParameterStore;

namespace {

/// Three parameters, one of them frozen, and a buffer.
struct Four {
  ParameterList list;
  Parameter first, frozen, buffer, last;
  Four() {
    first = list.add("first", {3, 2}, models::init::uniform(1));
    frozen = list.add("frozen", {5}, models::init::constant(2));
    buffer = list.add_buffer("buffer", {2}, models::init::constant(3));
    last = list.add("last", {70}, models::init::uniform(1));
    models::freeze(frozen);
  }
};

}  // namespace

TEST_CASE("store: trainable parameters first, in reverse order, at multiples of 256 bytes", "[cpu]") {
  for (const DType dtype : {DType::f32, DType::f64}) {
    Four four;
    ParameterStore store(four.list, Stream::cpu(1), dtype);
    REQUIRE(store.trainable().size() == 2);
    CHECK(store.trainable()[0].name() == "last");
    CHECK(store.trainable()[1].name() == "first");
    CHECK(store.trainable_values() == 76);
    const std::int64_t unit = 256 / size_of(dtype), last = dtype == DType::f32 ? 2 * unit : 3 * unit;
    CHECK(store.offset(four.last) == 0);
    CHECK(store.offset(four.first) == last);
    CHECK(store.offset(four.frozen) == last + unit);
    CHECK(store.offset(four.buffer) == last + 2 * unit);
    CHECK(store.weights().numel() == last + 3 * unit);
    CHECK(store.ema().numel() == store.weights().numel());
    for (const Tensor* t : {&store.grads(), &store.exp_avg(), &store.exp_avg_sq()}) CHECK(t->numel() == last + unit);
    CHECK(store.trained_weights().numel() == store.grads().numel());
    CHECK(store.dtype() == dtype);
  }
}

TEST_CASE("store: parameters are slices of the buffers", "[cpu]") {
  Four four;
  ParameterStore store(four.list, Stream::cpu(1), DType::f64);
  store.initialise(7);
  CHECK(four.first.value().shape() == Shape{3, 2});
  CHECK(four.first.value().raw() == store.slice(store.weights(), four.first).raw());
  CHECK(four.first.grad().raw() == store.slice(store.grads(), four.first).raw());
  CHECK_FALSE(four.frozen.grad().defined());
  CHECK_FALSE(four.buffer.grad().defined());
  CHECK(values_of(four.frozen.value()) == std::vector<double>(5, 2));
  CHECK(values_of(four.buffer.value()) == std::vector<double>(2, 3));
  four.first.value().data<double>()[0] = 42;
  CHECK(store.weights().data<double>()[store.offset(four.first)] == 42);

  // Everything between the slices is zero.
  double outside = 0, inside = 0;
  for (const double v : values_of(store.weights())) outside += std::abs(v);
  for (const Parameter& p : four.list.all()) {
    for (const double v : values_of(p.value())) inside += std::abs(v);
  }
  expect_close(outside, inside, 1e-14);
}

TEST_CASE("store: initial values follow the seed and the name alone", "[cpu]") {
  Four a, b, other;
  ParameterStore first(a.list, Stream::cpu(1), DType::f32), same(b.list, Stream::cpu(2), DType::f32), different(other.list, Stream::cpu(1), DType::f32);
  first.initialise(5);
  same.initialise(5);
  different.initialise(6);
  expect_same_bits(first.weights(), same.weights());
  CHECK(values_of(a.first.value()) != values_of(other.first.value()));

  // A parameter more changes no other; tensors that share an init_name start equal.
  Four more;
  const Parameter extra = more.list.add("extra", {6}, models::init::uniform(1));
  extra.state().init_name = "first";
  ParameterStore larger(more.list, Stream::cpu(1), DType::f32);
  larger.initialise(5);
  expect_same_bits(a.first.value(), more.first.value());
  CHECK(values_of(extra.value()) == values_of(more.first.value()));
}

TEST_CASE("store: moving average, gradients and their reset", "[cpu]") {
  Four four;
  ParameterStore store(four.list, Stream::cpu(1), DType::f32);
  store.initialise(1);
  expect_same_bits(store.weights(), store.ema());
  four.last.value().data<float>()[3] = 9;
  {
    const ParameterStore::UseEma scope(store);
    CHECK(four.last.value().raw() == store.slice(store.ema(), four.last).raw());
    CHECK(four.last.value().data<float>()[3] != 9);
  }
  CHECK(four.last.value().data<float>()[3] == 9);
  store.reset_ema();
  expect_same_bits(store.weights(), store.ema());

  four.first.grad().data<float>()[1] = 4;
  four.first.state().written = {{0, 3}};
  store.clear_gradients();
  CHECK(values_of(store.grads()) == std::vector<double>(static_cast<std::size_t>(store.grads().numel()), 0));
  CHECK(four.first.state().written.empty());
}

TEST_CASE("store: other types are refused", "[cpu]") {
  Four four;
  expect_throws<InvalidArgument>([&] { ParameterStore(four.list, Stream::cpu(1), DType::bf16); }, "parameter store: f32 or f64, got bf16");
}

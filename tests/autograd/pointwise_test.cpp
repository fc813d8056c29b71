#include "autograd/pointwise.h"

#include "tests/autograd/expect_threads.h"

using namespace detr;
using namespace detr::test;
using kernels::Activation;

namespace {

Variable add_op(Context& ctx, Inputs in) { return add(ctx, in[0], in[1]); }
Variable sum_op(Context& ctx, Inputs in) { return sum(ctx, in); }

}  // namespace

TEST_CASE("activation: gradients", "[cpu]") {
  for (const Activation kind : {Activation::relu, Activation::silu, Activation::gelu, Activation::sigmoid}) {
    const Op op = [kind](Context& ctx, Inputs in) { return activation(ctx, in[0], kind); };
    INFO("activation " << static_cast<int>(kind));
    expect_gradients(op, {normal({3, 7})});
    expect_gradient_subsets(op, {normal({3, 7})});
    expect_same_on_threads(op, {normal({3, 17001})});
  }
}

TEST_CASE("activation: none is the variable itself", "[cpu]") {
  Tape tape;
  Context ctx(Stream::cpu(1), &tape, true);
  const Variable x = tape.input(normal(Shape{3}));
  const Variable y = activation(ctx, x, Activation::none);
  CHECK(y.node() == x.node());
  CHECK(y.value().raw() == x.value().raw());
  CHECK(tape.size() == 1);
}

TEST_CASE("add: gradients of equal shapes and of a repeated table", "[cpu]") {
  expect_gradients(add_op, {normal({2, 3}, 1), normal({2, 3}, 2)});
  expect_gradient_subsets(add_op, {normal({2, 3}, 1), normal({2, 3}, 2)});
  expect_gradients(add_op, {normal({2, 3, 2}, 1), normal({3, 2}, 2)});
  expect_gradient_subsets(add_op, {normal({2, 3, 2}, 1), normal({3, 2}, 2)});
  expect_same_on_threads(add_op, {normal({40, 1001}, 1), normal(Shape{1001}, 2)});
}

TEST_CASE("sum: gradients", "[cpu]") {
  expect_gradients(sum_op, {normal({2, 3}), normal(Shape{}), normal(Shape{4})});
  expect_gradient_subsets(sum_op, {normal({2, 3}), normal(Shape{}), normal(Shape{4})});
  Context ctx(Stream::cpu(1), nullptr, true);
  expect_throws<InvalidArgument>([&] { sum(ctx, {}); }, "sum: there must be at least one input");
}

TEST_CASE("cast: the variable itself where the dtype is the same, else a gradient in the input's dtype", "[cpu]") {
  Tape tape;
  Context ctx(Stream::cpu(1), &tape, true);
  const Variable x = tape.input(host_tensor<float>({3}, {1, 2.5F, -3}));
  const Variable same = cast(ctx, x, DType::f32);
  CHECK(same.node() == x.node());
  CHECK(same.value().raw() == x.value().raw());
  CHECK(tape.size() == 1);
  const Variable y = cast(ctx, x, DType::f64);
  CHECK(y.value().dtype() == DType::f64);
  CHECK(values_of(y.value()) == std::vector<double>{1, 2.5, -3});
  tape.backward(ctx, y, host_tensor<double>({3}, {0.1, 2, 1e-3}));
  REQUIRE(tape.gradient(x).dtype() == DType::f32);
  CHECK(values_of(tape.gradient(x)) == std::vector<double>{static_cast<double>(0.1F), 2, static_cast<double>(1e-3F)});
}

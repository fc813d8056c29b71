#include "autograd/conv2d.h"

#include "autograd/pointwise.h"
#include "autograd/spatial.h"
#include "tests/autograd/expect_gradients.h"

using namespace detr;
using namespace detr::test;
using kernels::Conv2dOptions;

namespace {

Op op(const Conv2dOptions& options) {
  return [options](Context& ctx, Inputs in) { return conv2d(ctx, in[0], in[1], options); };
}

/// y and the gradients of x and weight.
std::vector<Tensor> results(int threads, const Tensor& map, const Tensor& kernel, const Conv2dOptions& options, const Tensor& dy) {
  Tape tape;
  Context ctx(Stream::cpu(threads), &tape, true);
  const Variable x = tape.input(map), weight = tape.input(kernel), y = conv2d(ctx, x, weight, options);
  tape.backward(ctx, y, dy);
  return {y.value(), tape.gradient(x), tape.gradient(weight)};
}

}  // namespace

TEST_CASE("conv2d: gradients", "[cpu]") {
  const Tensor x = normal({2, 5, 4, 2});
  for (const Conv2dOptions options : {Conv2dOptions{1, 1}, Conv2dOptions{2, 1}, Conv2dOptions{3, 0}}) {
    INFO("stride " << options.stride << ", padding " << options.padding);
    expect_gradients(op(options), {x, normal({3, 3, 3, 2})});
    expect_gradient_subsets(op(options), {x, normal({3, 3, 3, 2})});
  }
  for (const std::int64_t stride : {1, 2}) {
    expect_gradients(op({stride, 0}), {x, normal({3, 1, 1, 2})});
    expect_gradient_subsets(op({stride, 0}), {x, normal({3, 1, 1, 2})});
  }
}

TEST_CASE("conv2d: shape, and no node for constants", "[cpu]") {
  Tape tape;
  Context ctx(Stream::cpu(1), &tape, true);
  const Variable x(normal({1, 5, 4, 2}));
  CHECK(conv2d(ctx, x, Variable(normal({3, 3, 3, 2})), {2, 1}).shape() == Shape{1, 3, 2, 3});
  CHECK(tape.size() == 0);
  expect_throws<InvalidArgument>([&] { conv2d(ctx, x, Variable(normal({3, 3, 3, 1})), {1, 1}); }, "conv2d: weight must be (O, kh, kw, 2)");
}

TEST_CASE("conv2d: same bits for any number of threads through the tape", "[cpu]") {
  const Tensor x = normal({2, 33, 34, 3}, 1), weight = normal({5, 3, 3, 3}, 2);
  for (const std::int64_t stride : {1, 2}) {
    const Conv2dOptions options{stride, 1};
    const Tensor dy = normal(kernels::conv2d_shape(x.shape(), weight.shape(), options), 3);
    const std::vector<Tensor> one = results(1, x, weight, options, dy);
    for (const int threads : {2, 3}) {
      const std::vector<Tensor> more = results(threads, x, weight, options, dy);
      for (std::size_t i = 0; i < one.size(); ++i) expect_same_bits(more[i], one[i]);
    }
  }
}

TEST_CASE("conv2d_norm: gradients", "[cpu]") {
  const Tensor gamma = uniform(Shape{3}, 0.5, 1.5, 3), beta = normal(Shape{3}, 4), mean = normal(Shape{3}, 5), var = uniform(Shape{3}, 0.5, 1.5, 6);
  for (const kernels::Activation activation : {kernels::Activation::none, kernels::Activation::relu}) {
    const Op op = [&](Context& ctx, Inputs in) {
      return conv2d_norm(ctx, in[0], in[1], in[1].value(), {gamma, beta, mean, var, 1e-5}, in[2], activation, {2, 1});
    };
    const std::vector<Tensor> inputs = {normal({2, 5, 4, 2}, 1), normal({3, 3, 3, 2}, 2), normal({2, 3, 2, 3}, 7)};
    expect_gradients(op, inputs);
    expect_gradient_subsets(op, inputs);
    const Op without = [&](Context& ctx, Inputs in) { return conv2d_norm(ctx, in[0], in[1], in[1].value(), {gamma, beta, mean, var, 1e-5}, Variable(), activation, {1, 1}); };
    expect_gradients(without, {inputs[0], inputs[1]});
    expect_gradient_subsets(without, {inputs[0], inputs[1]});
  }
}

TEST_CASE("conv2d_norm: gradients through blocks whose ReLUs are taken back by the convolutions behind them", "[cpu]") {
  const Tensor gamma = uniform(Shape{3}, 0.5, 1.5, 3), beta = normal(Shape{3}, 4), mean = normal(Shape{3}, 5), var = uniform(Shape{3}, 0.5, 1.5, 6);
  const auto layer = [&](Context& ctx, const Variable& x, const Variable& weight, const Variable& residual, std::int64_t stride) {
    return conv2d_norm(ctx, x, weight, weight.value(), {gamma, beta, mean, var, 1e-5}, residual, kernels::Activation::relu, {stride, (weight.dim(1) - 1) / 2});
  };
  // The second block is used by ops of other kinds, before and after its first convolution; the third's residual comes from one of them, and the
  // fourth's is its own input.
  const Op op = [&](Context& ctx, Inputs in) {
    const Variable first = layer(ctx, in[0], in[1], {}, 1);
    const Variable a = layer(ctx, first, in[2], {}, 1), second = layer(ctx, a, in[1], first, 1);
    const Variable b = layer(ctx, second, in[1], {}, 2), pooled = avg_pool(ctx, second), third = layer(ctx, b, in[2], pooled, 1);
    const Variable fourth = layer(ctx, third, in[2], third, 1);
    return add(ctx, fourth, avg_pool(ctx, add(ctx, second, conv2d(ctx, second, in[2], {1, 0}))));
  };
  const std::vector<Tensor> inputs = {normal({2, 4, 6, 3}, 1), normal({3, 3, 3, 3}, 2), normal({3, 1, 1, 3}, 7)};
  expect_gradients(op, inputs);
  expect_gradient_subsets(op, inputs);
}

TEST_CASE("conv2d: gradients of an input that several ops share", "[cpu]") {
  const Op op = [](Context& ctx, Inputs in) {
    const Variable a = conv2d(ctx, in[0], in[1], {1, 1}), b = conv2d(ctx, in[0], in[2], {1, 0});
    return add(ctx, add(ctx, a, b), reshape(ctx, conv2d(ctx, reshape(ctx, in[0], in[0].shape()), in[1], {1, 1}), a.shape()));
  };
  expect_gradients(op, {normal({1, 4, 3, 2}, 1), normal({2, 3, 3, 2}, 2), normal({2, 1, 1, 2}, 3)});
  expect_gradient_subsets(op, {normal({1, 4, 3, 2}, 1), normal({2, 3, 3, 2}, 2), normal({2, 1, 1, 2}, 3)});
}

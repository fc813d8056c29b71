#include "autograd/norm.h"

#include "autograd/pointwise.h"
#include "tests/autograd/expect_threads.h"

using namespace detr;
using namespace detr::test;
using kernels::Activation;

namespace {

/// x, weight, bias and, if there is a fourth, residual. Fresh running statistics for each call.
Op batch_norm_op(Activation activation, bool batch_statistics) {
  return [=](Context& ctx, Inputs in) {
    const Shape channels = in[1].shape();
    const RunningStats running{normal(channels, 11), uniform(channels, 0.5, 2, 12)};
    return batch_norm(ctx, in[0], in[1], in[2], in.size() > 3 ? in[3] : Variable(), activation, 1e-5, 0.1, batch_statistics, running);
  };
}

std::vector<Tensor> batch_norm_inputs(bool residual, const Shape& shape) {
  std::vector<Tensor> inputs = {normal(shape, 1), normal(Shape{shape[-1]}, 2), normal(Shape{shape[-1]}, 3)};
  if (residual) inputs.push_back(normal(shape, 4));
  return inputs;
}

Variable layer_norm_op(Context& ctx, Inputs in) {
  return layer_norm(ctx, in[0], in.size() > 3 ? in[3] : Variable(), in[1], in[2], 1e-5);
}

}  // namespace

TEST_CASE("batch_norm: gradients, and all subsets of them", "[cpu]") {
  for (const Activation activation : {Activation::none, Activation::relu, Activation::silu}) {
    for (const bool batch_statistics : {true, false}) {
      for (const bool residual : {true, false}) {
        INFO("activation " << static_cast<int>(activation) << ", batch statistics " << batch_statistics << ", residual " << residual);
        const Op op = batch_norm_op(activation, batch_statistics);
        const std::vector<Tensor> inputs = batch_norm_inputs(residual, {2, 1, 3, 3});
        expect_gradients(op, inputs);
        expect_gradient_subsets(op, inputs);
      }
    }
  }
}

TEST_CASE("batch_norm: subsets and threads over many blocks", "[cpu]") {
  for (const Activation activation : {Activation::none, Activation::relu, Activation::silu}) {
    const Op op = batch_norm_op(activation, true);
    expect_gradient_subsets(op, batch_norm_inputs(true, {1, 30, 31, 37}));
    expect_same_on_threads(op, batch_norm_inputs(true, {1, 60, 31, 37}));
  }
}

TEST_CASE("batch_norm: running statistics move in training alone", "[cpu]") {
  Context ctx(Stream::cpu(1), nullptr, true);
  const Variable x(normal({2, 2, 2, 1})), one(uniform({1}, 1, 1)), zero(uniform({1}, 0, 0));
  const RunningStats running{uniform({1}, 7, 7), uniform({1}, 3, 3)};
  batch_norm(ctx, x, one, zero, Variable(), Activation::none, 1e-5, 0.5, false, running);
  CHECK(running.mean.data<double>()[0] == 7);
  CHECK(running.var.data<double>()[0] == 3);
  batch_norm(ctx, x, one, zero, Variable(), Activation::none, 1e-5, 0.5, true, running);
  double mean = 0, squares = 0;
  for (const double v : values_of(x.value())) mean += v / 8;
  for (const double v : values_of(x.value())) squares += (v - mean) * (v - mean);
  expect_close(running.mean.data<double>()[0], 3.5 + mean / 2, 1e-14);
  expect_close(running.var.data<double>()[0], 1.5 + squares / 7 / 2, 1e-14);
}

TEST_CASE("batch_norm: x as its own residual gets both gradients", "[cpu]") {
  const Op op = [](Context& ctx, Inputs in) {
    return batch_norm(ctx, in[0], in[1], in[2], in[0], Activation::silu, 1e-5, 0.1, true, {normal(Shape{3}), uniform({3}, 1, 2)});
  };
  expect_gradients(op, batch_norm_inputs(false, {2, 1, 3, 3}));
}

TEST_CASE("layer_norm: gradients, and all subsets of them", "[cpu]") {
  const std::vector<Tensor> plain = {normal({3, 5}, 1), normal(Shape{5}, 2), normal(Shape{5}, 3)};
  const std::vector<Tensor> with_residual = {normal({2, 2, 17}, 1), normal(Shape{17}, 2), normal(Shape{17}, 3), normal({2, 2, 17}, 4)};
  for (const auto& inputs : {plain, with_residual}) {
    expect_gradients(layer_norm_op, inputs);
    expect_gradient_subsets(layer_norm_op, inputs);
  }
}

TEST_CASE("layer_norm: same bits for any number of threads", "[cpu]") {
  expect_same_on_threads(layer_norm_op, {normal({300, 130}, 1), normal(Shape{130}, 2), normal(Shape{130}, 3), normal({300, 130}, 4)});
}

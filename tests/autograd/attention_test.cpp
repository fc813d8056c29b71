#include "autograd/attention.h"

#include "kernels/attention.h"
#include "tests/autograd/expect_gradients.h"

using namespace detr;
using namespace detr::test;
using kernels::DeformableOptions;
using kernels::kOrdinaryQuery;
using kernels::kPaddingSlot;
using kernels::Sampling;

namespace {

Op attention_op(std::int64_t heads, const Tensor& groups = {}) {
  return [heads, groups](Context& ctx, Inputs in) { return attention(ctx, in[0], in[1], in[2], heads, groups); };
}

Op deformable_op(const DeformableOptions& options, const Tensor& reference) {
  return [options, reference](Context& ctx, Inputs in) { return deformable_attention(ctx, in[0], in[1], in[2], reference, options); };
}

/// Samples in general position, far from grid lines compared with the step of the differences; some lie outside the maps.
std::vector<Tensor> deformable_inputs(std::int64_t tokens, std::int64_t queries, std::int64_t heads, std::int64_t points, std::int64_t depth) {
  return {normal({2, tokens, heads * depth}), uniform({2, queries, heads * points * 2}, -4, 4), normal({2, queries, heads * points})};
}

/// Gradients of all inputs on so many threads, with the output's values as their seed.
std::vector<Tensor> gradients(const Op& op, const std::vector<Tensor>& inputs, int threads) {
  Tape tape;
  Context ctx(Stream::cpu(threads), &tape, true);
  std::vector<Variable> variables;
  for (const Tensor& x : inputs) variables.push_back(tape.input(x));
  const Variable y = op(ctx, variables);
  tape.backward(ctx, y, y.value());
  std::vector<Tensor> result{y.value()};
  for (const Variable& x : variables) result.push_back(tape.gradient(x));
  return result;
}

void expect_same_on_threads(const Op& op, const std::vector<Tensor>& inputs) {
  const std::vector<Tensor> one = gradients(op, inputs, 1);
  for (const int threads : {2, 3}) {
    const std::vector<Tensor> many = gradients(op, inputs, threads);
    for (std::size_t i = 0; i < one.size(); ++i) expect_same_bits(many[i], one[i]);
  }
}

}  // namespace

TEST_CASE("attention: gradients", "[cpu]") {
  const std::vector<Tensor> inputs{normal({2, 3, 6}, 1), normal({2, 5, 6}, 2), normal({2, 5, 6}, 3)};
  expect_gradients(attention_op(2), inputs);
  expect_gradient_subsets(attention_op(2), inputs);
}

TEST_CASE("attention: gradients under the denoising mask, with padding slots", "[cpu]") {
  const Tensor groups = host_tensor<std::int64_t>({7}, {0, 0, kPaddingSlot, 1, kPaddingSlot, kOrdinaryQuery, kOrdinaryQuery});
  const std::vector<Tensor> inputs{normal({2, 7, 6}, 1), normal({2, 7, 6}, 2), normal({2, 7, 6}, 3)};
  expect_gradients(attention_op(3, groups), inputs);
  expect_gradient_subsets(attention_op(3, groups), inputs);
}

TEST_CASE("attention: gradients over several blocks of queries", "[cpu]") {
  const std::vector<Tensor> inputs{normal({1, 70, 1}, 1), normal({1, 18, 1}, 2), normal({1, 18, 1}, 3)};
  expect_gradients(attention_op(1), inputs);
  expect_gradient_subsets(attention_op(1), inputs);
}

TEST_CASE("attention: one variable in all places", "[cpu]") {
  expect_gradients([](Context& ctx, Inputs in) { return attention(ctx, in[0], in[0], in[0], 2, Tensor()); }, {normal({1, 5, 4})});
}

TEST_CASE("attention: same bits for any number of threads", "[cpu]") {
  expect_same_on_threads(attention_op(4), {normal({2, 70, 8}, 1), normal({2, 33, 8}, 2), normal({2, 33, 8}, 3)});
}

TEST_CASE("attention: errors", "[cpu]") {
  Context ctx(Stream::cpu(1), nullptr, false);
  const Variable q(host_zeros({2, 3, 4}, DType::f64)), flat(host_zeros({3, 4}, DType::f64));
  expect_throws<InvalidArgument>([&] { attention(ctx, flat, q, q, 2, Tensor()); }, "attention: q must be (N, Tq, A d), got f64(3, 4)");
  expect_throws<InvalidArgument>([&] { attention(ctx, Variable(), q, q, 2, Tensor()); }, "attention: q must be (N, Tq, A d), got undefined");
  expect_throws<InvalidArgument>([&] { attention(ctx, q, Variable(), q, 2, Tensor()); }, "attention: k must be (N, Tk, A d), got undefined");
  expect_throws<InvalidArgument>([&] { attention(ctx, q, q, q, 0, Tensor()); }, "attention: heads must be >= 1, got 0");
}

TEST_CASE("deformable_attention: gradients", "[cpu]") {
  const DeformableOptions options{2, {{3, 5}, {2, 2}}, {2, 1}, 0.5, Sampling::bilinear};
  const Op op = deformable_op(options, uniform({2, 3, 4}, 0.1, 0.9, 7));
  const std::vector<Tensor> inputs = deformable_inputs(19, 3, 2, 3, 3);
  expect_gradients(op, inputs);
  expect_gradient_subsets(op, inputs);
}

TEST_CASE("deformable_attention: gradients with heads of 32 channels", "[cpu]") {
  const DeformableOptions options{1, {{2, 3}}, {3}, 0.5, Sampling::bilinear};
  const Op op = deformable_op(options, uniform({2, 2, 4}, 0.1, 0.9, 7));
  const std::vector<Tensor> inputs = deformable_inputs(6, 2, 1, 3, 32);
  expect_gradients(op, inputs);
  expect_gradient_subsets(op, inputs);
}

TEST_CASE("deformable_attention: gradients with discrete sampling", "[cpu]") {
  const DeformableOptions options{2, {{3, 5}, {2, 2}}, {2, 1}, 0.5, Sampling::discrete};
  const Op op = deformable_op(options, uniform({2, 3, 4}, 0.1, 0.9, 7));
  const std::vector<Tensor> inputs = deformable_inputs(19, 3, 2, 3, 3);
  expect_gradients(op, inputs);
  expect_gradient_subsets(op, inputs);
}

TEST_CASE("deformable_attention: same bits for any number of threads", "[cpu]") {
  const DeformableOptions options{3, {{4, 4}}, {4}, 0.5, Sampling::bilinear};
  expect_same_on_threads(deformable_op(options, uniform({2, 40, 4}, 0.1, 0.9, 7)), deformable_inputs(16, 40, 3, 4, 5));
}

TEST_CASE("deformable_attention: errors", "[cpu]") {
  Context ctx(Stream::cpu(1), nullptr, false);
  const Tensor x = host_zeros({1, 4, 4}, DType::f64);
  const DeformableOptions options{2, {{2, 2}}, {1}, 0.5, Sampling::bilinear};
  expect_throws<InvalidArgument>([&] { deformable_attention(ctx, Variable(), Variable(x), Variable(x), x, options); },
                                 "deformable_attention: value must be (N, S, A d) and offsets (N, Q, A P 2), got undefined and f64(1, 4, 4)");
  expect_throws<InvalidArgument>([&] { deformable_attention(ctx, Variable(x), Variable(x), Variable(), x, options); },
                                 "deformable_attention: logits must be f64(1, 4, 2), got undefined");
}

#include "autograd/linear.h"

#include "tests/autograd/expect_gradients.h"

using namespace detr;
using namespace detr::test;

namespace {

Variable with_bias(Context& ctx, Inputs in) { return linear(ctx, in[0], in[1], in[2]); }
Variable without_bias(Context& ctx, Inputs in) { return linear(ctx, in[0], in[1], Variable()); }

/// y and the gradients of x, weight and bias.
std::vector<Tensor> results(int threads, const std::vector<Tensor>& inputs, const Tensor& dy) {
  Tape tape;
  Context ctx(Stream::cpu(threads), &tape, true);
  const Variable x = tape.input(inputs[0]), weight = tape.input(inputs[1]), bias = tape.input(inputs[2]);
  const Variable y = linear(ctx, x, weight, bias);
  tape.backward(ctx, y, dy);
  return {y.value(), tape.gradient(x), tape.gradient(weight), tape.gradient(bias)};
}

}  // namespace

TEST_CASE("linear: gradients", "[cpu]") {
  expect_gradients(with_bias, {normal({2, 3, 5}), normal({4, 5}), normal({4})});
  expect_gradient_subsets(with_bias, {normal({2, 3, 5}), normal({4, 5}), normal({4})});
  expect_gradients(without_bias, {normal({7, 3}), normal({1, 3})});
  expect_gradient_subsets(without_bias, {normal({7, 3}), normal({1, 3})});
}

TEST_CASE("linear: shape, and no node for constants", "[cpu]") {
  Tape tape;
  Context ctx(Stream::cpu(1), &tape, true);
  const Variable y = linear(ctx, Variable(normal({2, 3, 5})), Variable(normal({4, 5})), Variable(normal({4})));
  CHECK(y.shape() == Shape{2, 3, 4});
  CHECK(tape.size() == 0);
  expect_throws<InvalidArgument>([&] { linear(ctx, Variable(normal({2, 3})), Variable(normal({4, 5})), Variable()); },
                                 "linear: weight must be (O, 3), got (4, 5)");
}

TEST_CASE("linear: same bits for any number of threads through the tape", "[cpu]") {
  const std::vector<Tensor> inputs{normal({2100, 9}, 1), normal({6, 9}, 2), normal(Shape{6}, 3)};
  const Tensor dy = normal({2100, 6}, 4);
  const std::vector<Tensor> one = results(1, inputs, dy);
  for (const int threads : {2, 3}) {
    const std::vector<Tensor> more = results(threads, inputs, dy);
    for (std::size_t i = 0; i < one.size(); ++i) expect_same_bits(more[i], one[i]);
  }
}

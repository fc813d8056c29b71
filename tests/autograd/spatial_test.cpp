#include "autograd/spatial.h"

#include "tests/autograd/expect_threads.h"

using namespace detr;
using namespace detr::test;

namespace {

Op map_op(Variable (*op)(Context&, const Variable&)) {
  return [op](Context& ctx, Inputs in) { return op(ctx, in[0]); };
}
Op concat_op(int axis) {
  return [axis](Context& ctx, Inputs in) { return concatenate(ctx, in, axis); };
}
Variable reshape_op(Context& ctx, Inputs in) { return reshape(ctx, in[0], {3, 4}); }

}  // namespace

TEST_CASE("pooling and upsampling: gradients", "[cpu]") {
  for (const auto op : {max_pool, avg_pool, upsample}) {
    for (const Shape& shape : {Shape{2, 5, 4, 3}, Shape{1, 1, 1, 2}, Shape{1, 3, 6, 1}}) {
      expect_gradients(map_op(op), {normal(shape)});
      expect_gradient_subsets(map_op(op), {normal(shape)});
    }
    expect_same_on_threads(map_op(op), {normal({2, 41, 43, 11})});
  }
}

TEST_CASE("concatenate: gradients", "[cpu]") {
  const std::vector<Tensor> columns = {normal({2, 3}, 1), normal({2, 1}, 2), normal({2, 2}, 3)};
  const std::vector<Tensor> middle = {normal({2, 1, 3}, 1), normal({2, 2, 3}, 2)};
  expect_gradients(concat_op(1), columns);
  expect_gradient_subsets(concat_op(1), columns);
  expect_gradients(concat_op(1), middle);
  expect_gradients(concat_op(0), {normal({1, 3}, 1), normal({2, 3}, 2)});
  expect_same_on_threads(concat_op(1), {normal({5000, 7}, 1), normal({5000, 6}, 2)});
}

TEST_CASE("reshape: shares the value, not the gradient", "[cpu]") {
  expect_gradients(reshape_op, {normal({2, 6})});
  expect_gradient_subsets(reshape_op, {normal({2, 6})});
  Tape tape;
  Context ctx(Stream::cpu(1), &tape, true);
  const Variable x = tape.input(normal({2, 6}));
  const Variable y = reshape(ctx, x, {12});
  CHECK(y.value().raw() == x.value().raw());
  const Tensor seed = normal(Shape{12}, 5);
  tape.backward(ctx, y, seed);
  expect_same_bits(tape.gradient(x), seed.reshape({2, 6}));
  CHECK(tape.gradient(x).raw() != seed.raw());
}

TEST_CASE("spatial: broken contracts", "[cpu]") {
  Context ctx(Stream::cpu(1), nullptr, true);
  const Variable flat(normal({2, 3})), narrow(normal({2, 2, 2})), row(normal(Shape{4}));
  const auto throws = [](const std::function<void()>& call, const std::string& text) { expect_throws<InvalidArgument>(call, text); };
  throws([&] { max_pool(ctx, flat); }, "max_pool: x must be (N, H, W, C), got f64(2, 3)");
  throws([&] { avg_pool(ctx, flat); }, "avg_pool: x must be (N, H, W, C)");
  throws([&] { upsample(ctx, flat); }, "upsample: x must be (N, H, W, C)");
  throws([&] { concatenate(ctx, {}, 0); }, "concatenate: there must be at least one input");
  throws([&] { concatenate(ctx, std::vector<Variable>{flat, flat}, 2); }, "concatenate: axis 2 of f64(2, 3)");
  throws([&] { concatenate(ctx, std::vector<Variable>{flat, flat}, -1); }, "concatenate: axis -1");
  throws([&] { concatenate(ctx, std::vector<Variable>{flat, row}, 1); }, "concat: input must have 2 dimensions, got f64(4)");
  throws([&] { concatenate(ctx, std::vector<Variable>{flat, narrow}, 0); }, "concat: input must have 2 dimensions, got f64(2, 2, 2)");
  throws([&] { reshape(ctx, flat, {5}); }, "reshape: f64(2, 3) to (5)");
}

#include "autograd/gather.h"

#include "tests/autograd/expect_threads.h"

using namespace detr;
using namespace detr::test;

namespace {

Tensor i64(const Shape& shape, const std::vector<std::int64_t>& values) { return host_tensor<std::int64_t>(shape, values); }

}  // namespace

TEST_CASE("gather_rows: gradients, with and without invalid cells", "[cpu]") {
  const Tensor index = i64({2, 4}, {2, 0, 2, 1, 1, 1, 4, 3}), valid = host_tensor<std::uint8_t>({5}, {1, 0, 1, 1, 0});
  for (const Tensor& mask : {Tensor(), valid}) {
    const Op op = [&](Context& ctx, Inputs in) { return gather_rows(ctx, in[0], index, mask); };
    expect_gradients(op, {normal({2, 5, 3})});
    expect_gradient_subsets(op, {normal({2, 5, 3})});
    expect_same_on_threads(op, {normal({2, 5, 3})});
  }
}

TEST_CASE("embedding: gradients, and none for the padding row", "[cpu]") {
  const Tensor index = i64({2, 3}, {3, 0, 3, 1, 1, 3});
  const Op op = [&](Context& ctx, Inputs in) { return embedding(ctx, in[0], index, -1); };
  expect_gradients(op, {normal({4, 3})});
  expect_gradient_subsets(op, {normal({4, 3})});
  expect_same_on_threads(op, {normal({4, 200})});

  Tape tape;
  Context ctx(Stream::cpu(1), &tape, true);
  const Variable table = tape.input(normal({4, 2}));
  const Variable y = embedding(ctx, table, index, 3);
  tape.backward(ctx, y, uniform({2, 3, 2}, 1, 1));
  expect_close(tape.gradient(table), host_tensor<double>({4, 2}, {1, 1, 2, 2, 0, 0, 0, 0}), 0);
}

TEST_CASE("gather: broken contracts", "[cpu]") {
  Context ctx(Stream::cpu(1), nullptr, true);
  const Variable table(normal({4, 3}));
  const Tensor index = i64({1, 2}, {0, 4});
  expect_throws<InvalidArgument>([&] { gather_rows(ctx, table, index, Tensor()); },
                                 "gather_rows: x must be (N, T, D) and index (N, Q), got f64(4, 3)");
  expect_throws<InvalidArgument>([&] { embedding(ctx, table, index, -1); }, "embedding: index 4 of 4 rows");
}

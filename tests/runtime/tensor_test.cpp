#include "runtime/tensor.h"

#include "runtime/stream.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;

TEST_CASE("shape: sizes", "[cpu]") {
  const Shape shape{2, 3, 5};
  CHECK(shape.rank() == 3);
  CHECK(shape.numel() == 30);
  CHECK(shape[0] == 2);
  CHECK(shape[-1] == 5);
  CHECK(shape.dim(-3) == 2);
  CHECK(concat(shape) == "(2, 3, 5)");
  CHECK(Shape().numel() == 1);
  CHECK(Shape{4, 0}.numel() == 0);
  CHECK(Shape{2, 3} == Shape(std::vector<std::int64_t>{2, 3}));
  CHECK_FALSE(Shape{2, 3} == Shape{3, 2});
  CHECK_FALSE(Shape{} == Shape{1});
  CHECK_THROWS_AS(shape.dim(3), InvalidArgument);
  CHECK_THROWS_AS(shape.dim(-4), InvalidArgument);
  CHECK_THROWS_AS((Shape{1, 2, 3, 4, 5, 6, 7}), InvalidArgument);
  CHECK_THROWS_AS((Shape{2, -1}), InvalidArgument);
}

TEST_CASE("tensor: views share the memory", "[cpu]") {
  const Tensor x = host_tensor<float>({2, 3}, {0, 1, 2, 3, 4, 5});
  CHECK(x.defined());
  CHECK(x.rank() == 2);
  CHECK(x.rows() == 2);
  CHECK(x.bytes() == 24);
  CHECK(x.device().is_cpu());
  const Tensor column = x.reshape({3, 2}), row = x.slice(1, 2), middle = x.view(2, {2});
  CHECK(column.shape() == Shape{3, 2});
  CHECK(values_of(row) == std::vector<double>{3, 4, 5});
  CHECK(row.shape() == Shape{1, 3});
  CHECK(values_of(middle) == std::vector<double>{2, 3});
  middle.data<float>()[1] = 9;
  CHECK(x.data<float>()[3] == 9);
  CHECK(row.data<float>()[0] == 9);
  CHECK(values_of(row.slice(0, 1).view(1, {2})) == std::vector<double>{4, 5});
  CHECK(x.slice(2, 2).numel() == 0);
  CHECK(host_zeros({0, 3}, DType::f32).slice(0, 0).shape() == Shape{0, 3});
  // A view keeps the memory when the tensor it came from is gone.
  Tensor kept;
  {
    const Tensor owner = host_tensor<double>({2}, {7, 8});
    kept = owner.slice(1, 2);
  }
  CHECK(kept.data<double>()[0] == 8);
}

TEST_CASE("tensor: types", "[cpu]") {
  for (const DType dtype : {DType::f32, DType::f64, DType::i64, DType::u8}) {
    const Tensor x = host_zeros({3}, dtype);
    CHECK(x.bytes() == 3 * size_of(dtype));
    CHECK(values_of(x) == std::vector<double>(3, 0));
  }
  CHECK(size_of(DType::bf16) == 2);
  CHECK(concat(host_zeros({2}, DType::bf16)) == "bf16(2)");
  CHECK(concat(Tensor()) == "undefined");
  CHECK(concat(host_zeros({}, DType::i64)) == "i64()");
}

TEST_CASE("tensor: broken contracts", "[cpu]") {
  const Tensor x = host_zeros({2, 3}, DType::f32);
  expect_throws<InvalidArgument>([&] { static_cast<void>(x.reshape({5})); }, "reshape: f32(2, 3) to (5)");
  expect_throws<InvalidArgument>([&] { static_cast<void>(x.slice(1, 3)); }, "slice: [1, 3) of f32(2, 3)");
  expect_throws<InvalidArgument>([&] { static_cast<void>(x.slice(2, 1)); }, "slice: [2, 1)");
  expect_throws<InvalidArgument>([&] { static_cast<void>(host_zeros({}, DType::f32).slice(0, 0)); }, "slice: [0, 0) of f32()");
  expect_throws<InvalidArgument>([&] { static_cast<void>(x.view(4, {3})); }, "view: (3) at 4 of f32(2, 3)");
  expect_throws<InvalidArgument>([&] { static_cast<void>(x.view(-1, {1})); }, "view: (1) at -1");
  expect_throws<InvalidArgument>([&] { x.data<double>(); }, "tensor: f32(2, 3) read as f64");
  expect_throws<InvalidArgument>([&] { Tensor().data<float>(); }, "tensor: undefined");
  expect_throws<InvalidArgument>([&] { host_tensor<float>({3}, {1, 2}); }, "host_tensor: 2 values for (3)");

  expect_like(x, "op: y", x, {2, 3});
  expect_like(x, "op: dy", static_cast<const Tensor*>(nullptr), {7});
  expect_throws<InvalidArgument>([&] { expect_like(x, "op: y", x, {3, 2}); }, "op: y must be f32(3, 2), got f32(2, 3)");
  expect_throws<InvalidArgument>([&] { expect_like(x, "op: y", host_zeros({2, 3}, DType::f64), {2, 3}); }, "op: y must be f32(2, 3), got f64(2, 3)");
  expect_throws<InvalidArgument>([&] { expect_like(x, "op: y", Tensor(), {}); }, "op: y must be f32(), got undefined");
  expect_throws<InvalidArgument>([&] { expect_tensor(x, "op: rows", x, {2, 3}, DType::i64); }, "op: rows must be i64(2, 3), got f32(2, 3)");
  const Tensor elsewhere(nullptr, 0, {0}, DType::f32, Device{Device::Kind::cuda, 1});
  expect_throws<InvalidArgument>([&] { expect_like(x, "op: y", elsewhere, {0}); }, "op: y must be on cpu, is on cuda:1");
}

TEST_CASE("stream: memory and blocks", "[cpu]") {
  const Stream stream = Stream::cpu(3);
  CHECK(stream.device().is_cpu());
  CHECK(stream.pool().threads() == 3);
  const Tensor zeros = stream.zeros({5}, DType::f64);
  CHECK(values_of(zeros) == std::vector<double>(5, 0));
  CHECK(stream.empty_like(zeros).shape() == Shape{5});
  CHECK(stream.empty({0, 4}, DType::f32).raw() == nullptr);
  CHECK(reinterpret_cast<std::uintptr_t>(stream.empty({3}, DType::u8).raw()) % 64 == 0);

  std::vector<int> seen(10, 0), block_of(10, -1);
  stream.parallel_blocks(10, 4, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      ++seen[static_cast<std::size_t>(i)];
      block_of[static_cast<std::size_t>(i)] = static_cast<int>(begin);
    }
  });
  CHECK(seen == std::vector<int>(10, 1));
  CHECK(block_of == std::vector<int>{0, 0, 0, 0, 4, 4, 4, 4, 8, 8});
  stream.parallel_blocks(0, 4, [&](std::int64_t, std::int64_t) { FAIL_CHECK("no block of nothing"); });
}

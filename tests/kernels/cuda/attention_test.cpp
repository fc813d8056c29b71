#include "kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/gpu.h"
#include "tests/kernels/values.h"
#include "tests/small.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;
using kernels::attention_backward;
using kernels::attention_forward;
using kernels::kOrdinaryQuery;
using kernels::kPaddingSlot;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Case {
  Tensor q, k, v, dout, groups;   // f64 on the host; groups may be undefined
  std::int64_t heads = 1;
  Shape lse_shape() const { return {q.dim(0), heads, q.dim(1)}; }
};

/// Forward's outputs, and the gradients that backward makes of the oracle's out and lse. f64 on the host.
struct Result {
  Tensor out, lse, dq, dk, dv;
};

Tensor scaled(Tensor x, double factor) {
  for (double& value : x.span<double>()) value *= factor;
  return x;
}

Case random_case(std::int64_t images, std::int64_t queries, std::int64_t keys, std::int64_t heads, std::int64_t depth) {
  const Shape of_queries{images, queries, heads * depth}, of_keys{images, keys, heads * depth};
  return {scaled(random(of_queries, DType::f64, 1), 3), random(of_keys, DType::f64, 2), random(of_keys, DType::f64, 3),
          random(of_queries, DType::f64, 4), {}, heads};
}

/// `count` groups of `size` slots, the last fifth of each padding, then ordinary queries: `tokens` in all.
Tensor denoising_groups(std::int64_t tokens, std::int64_t count, std::int64_t size) {
  std::vector<std::int64_t> groups(static_cast<std::size_t>(tokens), kOrdinaryQuery);
  for (std::int64_t i = 0; i < count * size; ++i) groups[static_cast<std::size_t>(i)] = i % size >= size - size / 5 ? kPaddingSlot : i / size;
  return host_tensor<std::int64_t>({tokens}, groups);
}

Case masked_case(std::int64_t images, std::int64_t tokens, std::int64_t heads, std::int64_t depth, std::int64_t count, std::int64_t size) {
  Case c = random_case(images, tokens, tokens, heads, depth);
  c.groups = denoising_groups(tokens, count, size);
  return c;
}

Result oracle(const Case& c, DType dtype) {
  const Stream stream = Stream::cpu(2);
  const Tensor* groups = c.groups.defined() ? &c.groups : nullptr;
  const Tensor q = rounded(c.q, dtype), k = rounded(c.k, dtype), v = rounded(c.v, dtype), dout = rounded(c.dout, dtype);
  Result r{host_zeros(q.shape(), DType::f64), host_zeros(c.lse_shape(), DType::f64), host_zeros(q.shape(), DType::f64),
           host_zeros(k.shape(), DType::f64), host_zeros(k.shape(), DType::f64)};
  attention_forward(stream, q, k, v, c.heads, groups, r.out, r.lse);
  attention_backward(stream, dout, q, k, v, rounded(r.out, dtype), rounded(r.lse, DType::f32), c.heads, groups, &r.dq, &r.dk, &r.dv);
  return r;
}

/// A tensor on the GPU that starts `offset` elements behind a place fit for any access.
Tensor moved(const Tensor& x, DType dtype, std::int64_t offset) {
  Tensor memory = host_zeros({offset + x.numel()}, DType::f64);
  std::copy_n(x.data<double>(), x.numel(), memory.data<double>() + offset);
  return on_gpu(memory, dtype).view(offset, x.shape());
}

/// The gradients in `wanted` (bits: dq, dk, dv) of given out and lse; the others are undefined.
Result run(const Case& c, DType dtype, const Result& given, unsigned wanted = 7, std::int64_t offset = 0) {
  const auto load = [&](const Tensor& x) { return moved(x, dtype, offset); };
  const Tensor q = load(c.q), k = load(c.k), v = load(c.v), dout = load(c.dout), given_out = load(given.out);
  const Tensor given_lse = moved(given.lse, DType::f32, offset), groups = c.groups.defined() ? on_gpu(c.groups, DType::i64) : Tensor();
  const Tensor* mask = groups.defined() ? &groups : nullptr;
  Guarded out(q.shape(), dtype), lse(c.lse_shape(), DType::f32), dq(q.shape(), dtype), dk(k.shape(), dtype), dv(k.shape(), dtype);
  attention_forward(gpu(), q, k, v, c.heads, mask, out.tensor, lse.tensor);
  attention_backward(gpu(), dout, q, k, v, given_out, given_lse, c.heads, mask, wanted & 1 ? &dq.tensor : nullptr,
                     wanted & 2 ? &dk.tensor : nullptr, wanted & 4 ? &dv.tensor : nullptr);
  return {out.values(), lse.values(), wanted & 1 ? dq.values() : Tensor(), wanted & 2 ? dk.values() : Tensor(), wanted & 4 ? dv.values() : Tensor()};
}

/// Within `tolerance` of the tensor's largest value. Some gradients vanish by cancellation: of terms around 1, 4e-6 of f32 roundoff
/// may remain.
void expect_values(const Tensor& got, const Tensor& wanted, double tolerance) {
  double largest = 0;
  for (const double value : values_of(wanted)) largest = std::max(largest, std::abs(value));
  expect_close(got, wanted, tolerance, tolerance * largest + 4e-6);
}

void expect_as_oracle(const Case& c, DType dtype, std::int64_t offset = 0) {
  INFO(dtype << " q " << c.q.shape() << " k " << c.k.shape() << " heads " << c.heads << " offset " << offset);
  const Result wanted = oracle(c, dtype), got = run(c, dtype, wanted, 7, offset);
  // f32: a roundoff for each term of the sums over channels, keys and queries. bf16: each weight (or gradient of a score) is rounded
  // once before its product, and these errors add at random as the terms do; the result is rounded once more.
  const double plain = static_cast<double>(c.q.dim(2) / c.heads + c.k.dim(1) + c.q.dim(1)) * roundoff(DType::f32);
  const double tolerance = std::max(plain, dtype == DType::bf16 ? 4 * roundoff(dtype) : 0.0);
  expect_values(got.out, wanted.out, tolerance);
  expect_values(got.lse, wanted.lse, plain);   // in f32 for both
  expect_values(got.dq, wanted.dq, tolerance);
  expect_values(got.dk, wanted.dk, tolerance);
  expect_values(got.dv, wanted.dv, tolerance);
}

void expect_same_result(const Result& a, const Result& b) {
  const auto compare = [](const Tensor& x, const Tensor& y) {
    if (x.defined() && y.defined()) expect_same_bits(x, y);
  };
  compare(a.out, b.out);
  compare(a.lse, b.lse);
  compare(a.dq, b.dq);
  compare(a.dk, b.dk);
  compare(a.dv, b.dv);
}

void expect_zeros(const Tensor& x) { CHECK(std::ranges::all_of(values_of(x), [](double value) { return value == 0; })); }

}  // namespace

TEST_CASE("attention: CUDA agrees with the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    expect_as_oracle(random_case(1, 1, 1, 1, 1), dtype);
    expect_as_oracle(random_case(2, 3, 5, 2, 3), dtype);
    expect_as_oracle(random_case(1, 31, 33, 1, 8), dtype);
    expect_as_oracle(random_case(2, 33, 31, 3, 16), dtype);
    expect_as_oracle(random_case(1, 64, 64, 2, 32), dtype);      // whole tiles
    expect_as_oracle(random_case(1, 65, 129, 2, 40), dtype);     // one more than whole; channels beyond d
    expect_as_oracle(random_case(1, 70, 200, 1, 48), dtype);
    expect_as_oracle(random_case(1, 130, 66, 2, 64), dtype);
    expect_as_oracle(random_case(1, 66, 130, 1, 96), dtype);
    expect_as_oracle(random_case(1, 50, 70, 1, 128), dtype);
    if (!small_tests()) expect_as_oracle(random_case(1, 400, 400, 8, 32), dtype);   // AIFI
  }
}

TEST_CASE("attention: CUDA agrees with the CPU under the denoising mask", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    expect_as_oracle(masked_case(1, 33, 1, 5, 2, 10), dtype);
    expect_as_oracle(masked_case(2, 71, 2, 32, 3, 15), dtype);
    if (!small_tests()) expect_as_oracle(masked_case(1, 500, 4, 32, 4, 50), dtype);   // the decoder's
    expect_as_oracle(masked_case(1, 330, 1, 16, 1, 320), dtype);   // slots 256 to 319, a tile, are nothing but padding
    Case shuffled = masked_case(1, 300, 1, 64, 7, 30);             // each group in each tile
    for (std::int64_t i = 0; i < 300; ++i) shuffled.groups.data<std::int64_t>()[i] = i % 9 == 7 ? kPaddingSlot : i * 7 % 5 - 1;
    expect_as_oracle(shuffled, dtype);
  }
}

TEST_CASE("attention: CUDA tensors may start anywhere", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    expect_as_oracle(masked_case(1, 71, 2, 32, 3, 15), dtype, 1);
    expect_as_oracle(random_case(1, 33, 65, 1, 24), dtype, 3);
  }
}

TEST_CASE("attention: CUDA repeats its bits, for any subset of gradients", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const Case& c : {masked_case(2, 200, 2, 32, 3, 40), random_case(1, 70, 90, 1, 128)}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Result given = oracle(c, dtype), whole = run(c, dtype, given);
      for (unsigned wanted = 0; wanted < 8; ++wanted) expect_same_result(run(c, dtype, given, wanted), whole);
    }
  }
}

TEST_CASE("attention: CUDA padding slots get 0, give nothing and are not read", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Case c = masked_case(2, 135, 2, 16, 2, 40);
    const Result given = oracle(c, dtype), before = run(c, dtype, given);
    for (const Tensor& x : {c.q, c.k, c.v, c.dout, given.out}) {
      for (std::int64_t row = 0; row < 2 * 135; ++row) {
        if (c.groups.data<std::int64_t>()[row % 135] == kPaddingSlot) std::fill_n(x.data<double>() + row * 32, 32, kNaN);
      }
    }
    const Result after = run(c, dtype, given);
    expect_same_result(after, before);
    for (std::int64_t row = 0; row < 2 * 135; ++row) {
      if (c.groups.data<std::int64_t>()[row % 135] != kPaddingSlot) continue;
      for (const Tensor& x : {after.out, after.dq, after.dk, after.dv}) expect_zeros(x.view(row * 32, {32}));
      for (std::int64_t a = 0; a < 2; ++a) CHECK(after.lse.data<double>()[(row / 135 * 2 + a) * 135 + row % 135] == 0);
    }
    Case nothing = random_case(1, 70, 70, 1, 8);
    nothing.groups = host_tensor<std::int64_t>({70}, std::vector<std::int64_t>(70, kPaddingSlot));
    const Result none = run(nothing, dtype, oracle(nothing, dtype));
    for (const Tensor& x : {none.out, none.lse, none.dq, none.dk, none.dv}) expect_zeros(x);
  }
}

TEST_CASE("attention: CUDA without images, queries or keys", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Case none = random_case(1, 0, 0, 1, 2);
    none.groups = host_zeros({0}, DType::i64);
    for (const Case& c : {random_case(0, 3, 4, 2, 2), random_case(1, 0, 3, 2, 2), random_case(2, 3, 0, 2, 2), none}) {
      const Result r = run(c, dtype, oracle(c, dtype));
      for (const Tensor& x : {r.out, r.lse, r.dq, r.dk, r.dv}) expect_zeros(x);
    }
  }
}

TEST_CASE("attention: CUDA with large scores, NaN, many heads, wide heads", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    // Scores 1e6, 1e6 and -1e6: the first two keys share the query.
    const Case large{host_tensor<double>({1, 1, 1}, {1000}), host_tensor<double>({1, 3, 1}, {1000, 1000, -1000}),
                     host_tensor<double>({1, 3, 1}, {1, 3, 50}), host_tensor<double>({1, 1, 1}, {1}), {}, 1};
    expect_close(run(large, dtype, oracle(large, dtype)).out.data<double>()[0], 2, 4 * roundoff(dtype));

    Case spoiled = random_case(1, 4, 4, 1, 2);
    const Result given = oracle(spoiled, dtype);
    spoiled.groups = host_tensor<std::int64_t>({4}, {0, kPaddingSlot, kOrdinaryQuery, kOrdinaryQuery});
    spoiled.k.data<double>()[3 * 2] = kNaN;
    const Tensor out = run(spoiled, dtype, given).out;
    for (const std::int64_t i : {0, 2, 3}) CHECK(std::isnan(out.data<double>()[i * 2]));
    CHECK(out.data<double>()[2] == 0);

    const Case many = random_case(small_tests() ? 90 : 9000, 1, 1, 8, 1);   // 72000 are more blocks than a grid has in y; a block does the same
    expect_same_bits(run(many, dtype, {many.q, host_zeros(many.lse_shape(), DType::f64), {}, {}, {}}).out, rounded(many.v, dtype));

    const Case wide = random_case(1, 2, 2, 1, 129);
    expect_throws<InvalidArgument>([&] { run(wide, dtype, oracle(wide, dtype)); }, "attention: CUDA takes heads of up to 128 channels, got 129");
  }
}

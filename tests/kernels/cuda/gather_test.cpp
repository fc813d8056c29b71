#include "kernels/gather.h"

#include <algorithm>
#include <numeric>

#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;

namespace {

const Stream& host() {
  static const Stream stream = Stream::cpu(2);
  return stream;
}

bool is_floating(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; }
DType host_dtype(DType dtype) { return is_floating(dtype) ? DType::f64 : dtype; }

/// i64 values in [low, high).
Tensor integers(const Shape& shape, std::int64_t low, std::int64_t high, std::uint64_t seed) {
  Tensor x = host_zeros(shape, DType::i64);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<std::int64_t>()[i] = low + uniform_int(RandomKey(seed), static_cast<std::uint64_t>(i), high - low);
  return x;
}

/// Some values of the dtype, as the oracle is given them.
Tensor values(const Shape& shape, DType dtype, std::uint64_t seed) {
  if (is_floating(dtype)) return rounded(random(shape, DType::f64, seed), dtype);
  const Tensor x = integers(shape, 0, 256, seed);
  if (dtype == DType::i64) return x;
  Tensor bytes = host_zeros(shape, DType::u8);
  for (std::int64_t i = 0; i < x.numel(); ++i) bytes.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(x.data<std::int64_t>()[i]);
  return bytes;
}

/// The same values on the GPU, `shift` elements behind an aligned address.
Tensor shifted(const Tensor& x, DType dtype, std::int64_t shift) {
  Tensor memory = gpu().empty({x.numel() + shift}, dtype), place = memory.view(shift, x.shape());
  if (x.numel()) gpu().copy(on_gpu(x, dtype), place);
  return place;
}

/// Forward, and backward for all sets of wanted gradients (the full and the empty one if there are many inputs). Copies: exact.
void check_concat(const Shape& shape, int axis, const std::vector<std::int64_t>& sizes, DType dtype, std::int64_t shift = 0) {
  INFO(shape << ' ' << axis << ' ' << dtype << " shift " << shift);
  const auto with = [&](std::int64_t size) {
    std::vector<std::int64_t> dims(shape.dims().begin(), shape.dims().end());
    dims[static_cast<std::size_t>(axis)] = size;
    return Shape(dims);
  };
  std::vector<Tensor> inputs, inputs_gpu;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    inputs.push_back(values(with(sizes[i]), dtype, i));
    inputs_gpu.push_back(shifted(inputs.back(), dtype, shift));
  }
  const Shape whole = with(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
  Tensor y = host_zeros(whole, host_dtype(dtype));
  kernels::concat_forward(host(), inputs, axis, y);
  Guarded y_gpu(whole, dtype);
  kernels::concat_forward(gpu(), inputs_gpu, axis, y_gpu.tensor);
  expect_same_bits(y_gpu.values(), y);

  const unsigned all = (1U << sizes.size()) - 1;
  const Tensor dy = shifted(y, dtype, shift);
  for (unsigned subset = 0; subset <= all; subset = sizes.size() > 4 && subset == 0 ? all : subset + 1) {
    std::vector<Guarded> parts;
    std::vector<Tensor*> wanted(sizes.size(), nullptr);
    for (const std::int64_t size : sizes) parts.emplace_back(with(size), dtype);
    for (std::size_t i = 0; i < sizes.size(); ++i) wanted[i] = subset >> i & 1 ? &parts[i].tensor : nullptr;
    kernels::concat_backward(gpu(), dy, axis, sizes, wanted);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (wanted[i]) expect_same_bits(parts[i].values(), inputs[i]);
    }
  }
}

/// gather_rows in both directions, with and without `valid`; `high` of N x Q indices are below it.
void check_gather_rows(std::int64_t N, std::int64_t T, std::int64_t D, std::int64_t Q, std::int64_t high, DType dtype, std::int64_t shift = 0) {
  INFO("N " << N << " T " << T << " D " << D << " Q " << Q << " indices below " << high << ' ' << dtype << " shift " << shift);
  const Tensor x = values({N, T, D}, dtype, 1), dy = values({N, Q, D}, dtype, 2), index = integers({N, Q}, 0, high, 3);
  Tensor valid = values({T}, DType::u8, 4);
  for (std::uint8_t& v : valid.span<std::uint8_t>()) v &= 1U;
  const Tensor x_gpu = shifted(x, dtype, shift), dy_gpu = shifted(dy, dtype, shift), index_gpu = on_gpu(index, DType::i64), valid_gpu = on_gpu(valid, DType::u8);
  for (const bool masked : {false, true}) {
    Tensor y = host_zeros({N, Q, D}, DType::f64), dx = host_zeros({N, T, D}, DType::f64);
    kernels::gather_rows_forward(host(), x, index, masked ? &valid : nullptr, y);
    kernels::gather_rows_backward(host(), dy, index, masked ? &valid : nullptr, &dx);
    Guarded y_gpu(y.shape(), dtype), dx_gpu(dx.shape(), dtype), again(dx.shape(), dtype);
    kernels::gather_rows_forward(gpu(), x_gpu, index_gpu, masked ? &valid_gpu : nullptr, y_gpu.tensor);
    expect_same_bits(y_gpu.values(), y);
    kernels::gather_rows_backward(gpu(), dy_gpu, index_gpu, masked ? &valid_gpu : nullptr, &dx_gpu.tensor);
    kernels::gather_rows_backward(gpu(), dy_gpu, index_gpu, masked ? &valid_gpu : nullptr, &again.tensor);
    // Sums of at most Q values in f32, each step of which rounds once; then rounded to the dtype.
    expect_near(dx_gpu.values(), dx, roundoff(dtype) + static_cast<double>(Q) * roundoff(DType::f32));
    expect_same_bits(again.values(), dx_gpu.values());
  }
}

/// The embedding in both directions, with and without a padding row.
void check_embedding(const Shape& index_shape, std::int64_t K, std::int64_t D, std::int64_t high, DType dtype, std::int64_t shift = 0) {
  INFO("index " << index_shape << " below " << high << " K " << K << " D " << D << ' ' << dtype << " shift " << shift);
  const Tensor table = values({K, D}, dtype, 1), index = integers(index_shape, 0, high, 2);
  std::vector<std::int64_t> dims(index_shape.dims().begin(), index_shape.dims().end());
  dims.push_back(D);
  const Shape rows(dims);
  const Tensor dy = values(rows, dtype, 3), index_gpu = on_gpu(index, DType::i64), dy_gpu = shifted(dy, dtype, shift);
  Tensor y = host_zeros(rows, DType::f64);
  kernels::embedding_forward(host(), table, index, y);
  Guarded y_gpu(rows, dtype);
  kernels::embedding_forward(gpu(), shifted(table, dtype, shift), index_gpu, y_gpu.tensor);
  expect_same_bits(y_gpu.values(), y);
  for (const std::int64_t padding : {std::int64_t{-1}, K - 1, std::int64_t{0}}) {
    Tensor dtable = host_zeros({K, D}, DType::f64);
    kernels::embedding_backward(host(), dy, index, padding, &dtable);
    Guarded first({K, D}, DType::f32), again({K, D}, DType::f32);
    kernels::embedding_backward(gpu(), dy_gpu, index_gpu, padding, &first.tensor);
    kernels::embedding_backward(gpu(), dy_gpu, index_gpu, padding, &again.tensor);
    // Sums in f32 of values below 1 in magnitude: an error of at most one roundoff of the running sum for each of R values.
    expect_near(first.values(), dtable, static_cast<double>(index.numel() + 1) * roundoff(DType::f32));
    expect_same_bits(again.values(), first.values());
  }
}

}  // namespace

TEST_CASE("concat: CUDA copies as the CPU does", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16, DType::i64, DType::u8}) {
    for (const std::int64_t size : {0, 1, 31, 33}) {
      for (const int axis : {0, 1, 2}) check_concat({3, 5, 7}, axis, {size, 2, 1}, dtype);
    }
    for (const std::int64_t shift : {0, 1, 2, 4, 8}) check_concat({2, 3, 64}, 2, {64, 16, 32}, dtype, shift);
    check_concat({2, 3, 8}, 1, {1, 2, 0, 3, 1, 1, 5, 1, 2, 4, 1, 0, 7, 1, 1, 1, 1, 1, 3}, dtype);   // several launches
    check_concat({4}, 0, {5}, dtype);
  }
  check_concat({2, 0, 256}, 1, {6400, 1600, 400}, DType::bf16);      // tokens of three levels
  check_concat({2, 40, 40, 0}, 3, {256, 256}, DType::bf16);          // channels of two maps
  check_concat({2, 0, 4}, 1, {197, 300}, DType::f32);                // denoising queries before the others
}

TEST_CASE("gather_rows: CUDA agrees with the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t Q : {0, 1, 31, 33, 100}) {
      check_gather_rows(2, 40, 24, Q, 40, dtype);
      check_gather_rows(3, 40, 5, Q, 3, dtype);        // most indices many times
      check_gather_rows(2, 40, 520, Q, 7, dtype, 3);   // wide rows, not aligned
    }
    check_gather_rows(2, 1, 264, 70, 1, dtype);        // one row takes all; columns beyond one pass of a warp in bf16
    check_gather_rows(0, 4, 8, 3, 4, dtype);
    check_gather_rows(2, 4, 0, 3, 4, dtype);
    check_gather_rows(2, 8400, 256, 300, 8400, dtype);
  }
}

TEST_CASE("embedding: CUDA agrees with the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t R : {0, 1, 31, 33, 2048, 2049}) check_embedding({R}, 5, 24, 5, dtype);
    check_embedding({3, 33}, 4, 5, 2, dtype);          // a row without entries; odd width
    check_embedding({3, 33}, 4, 72, 4, dtype, 1);      // not aligned
    check_embedding({}, 3, 8, 3, dtype);
    check_embedding({4500}, 3, 16, 2, dtype);          // several tiles, rows with more entries than a tile's share
    check_embedding({2, 9}, 3, 0, 3, dtype);
    check_embedding({16, 200}, 81, 256, 81, dtype);
  }
}

TEST_CASE("gather: CUDA skips indices that are out of range", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Tensor x = values({1, 3, 8}, DType::f32, 1), index = host_tensor<std::int64_t>({1, 4}, std::vector<std::int64_t>{-1, 3, 1LL << 40, 2});
  const Tensor x_gpu = on_gpu(x, DType::f32), index_gpu = on_gpu(index, DType::i64);
  Guarded y({1, 4, 8}, DType::f32), dx({1, 3, 8}, DType::f32), row({1, 4, 8}, DType::f32), dtable({3, 8}, DType::f32);
  kernels::gather_rows_forward(gpu(), x_gpu, index_gpu, nullptr, y.tensor);
  kernels::gather_rows_backward(gpu(), y.tensor, index_gpu, nullptr, &dx.tensor);
  kernels::embedding_forward(gpu(), x_gpu.reshape({3, 8}), index_gpu, row.tensor);
  kernels::embedding_backward(gpu(), row.tensor, index_gpu, -1, &dtable.tensor);
  Tensor wanted = host_zeros({1, 4, 8}, DType::f64), wanted_dx = host_zeros({1, 3, 8}, DType::f64);
  std::copy_n(x.data<double>() + 16, 8, wanted.data<double>() + 24);
  std::copy_n(x.data<double>() + 16, 8, wanted_dx.data<double>() + 16);
  expect_same_bits(y.values(), wanted);
  expect_same_bits(row.values(), wanted);
  expect_same_bits(dx.values(), wanted_dx);
  expect_same_bits(dtable.values().reshape({1, 3, 8}), wanted_dx);
}

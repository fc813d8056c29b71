#include "kernels/pointwise.h"

#include <cmath>
#include <limits>

#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;

namespace {

constexpr DType kDtypes[] = {DType::f32, DType::bf16};

const Stream& cpu() {
  static const Stream stream = Stream::cpu(2);
  return stream;
}

/// One rounding of an exact result, or of one that has the error of a unit or two in f32.
double rounding(DType dtype) { return 2.1 * roundoff(dtype); }

Tensor values(const Shape& shape, DType dtype, std::uint64_t seed) { return rounded(random(shape, DType::f64, seed), dtype); }

/// A copy on the GPU that starts one element into its memory, so that no 16-byte access fits.
Tensor shifted(const Tensor& tensor) {
  Tensor copy = gpu().empty({tensor.numel() + 1}, tensor.dtype()).view(1, tensor.shape());
  gpu().copy(tensor, copy);
  return copy;
}

/// What `call` writes to an output of this shape; twice, with the same bits.
Tensor output(const Shape& shape, DType dtype, const std::function<void(Tensor&)>& call) {
  Guarded first(shape, dtype), second(shape, dtype);
  call(first.tensor);
  call(second.tensor);
  const Tensor result = first.values();
  expect_same_bits(second.values(), result);
  return result;
}

/// The oracle's f64 output.
Tensor oracle(const Shape& shape, const std::function<void(Tensor&)>& call) {
  Tensor y = host_zeros(shape, DType::f64);
  call(y);
  return y;
}

}  // namespace

TEST_CASE("add on CUDA: equal shapes and suffixes", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  struct Shapes { Shape a, b; };
  for (const DType dtype : kDtypes) {
    for (const auto& [shape, suffix] : {Shapes{{0, 3}, {3}}, Shapes{{1}, {1}}, Shapes{{31}, {31}}, Shapes{{33}, {33}}, Shapes{{5, 33}, {33}},
                                        Shapes{{3, 2, 40}, {2, 40}}, Shapes{{3, 7}, {}}, Shapes{{1500, 8}, {8}}, Shapes{{4, 400, 256}, {400, 256}},
                                        Shapes{{2, 500, 256}, {2, 500, 256}}}) {
      INFO(dtype << shape << " + " << suffix);
      const Tensor a = values(shape, dtype, 1), b = values(suffix, dtype, 2), ga = on_gpu(a, dtype), gb = on_gpu(b, dtype);
      const Tensor wanted = oracle(shape, [&](Tensor& y) { kernels::add_forward(cpu(), a, b, y); });
      const Tensor got = output(shape, dtype, [&](Tensor& y) { kernels::add_forward(gpu(), ga, gb, y); });
      expect_near(got, wanted, rounding(dtype), 0);
      expect_same_bits(output(shape, dtype, [&](Tensor& y) { kernels::add_forward(gpu(), shifted(ga), gb, y); }), got);
      expect_same_bits(output(shape, dtype, [&](Tensor& y) { kernels::add_forward(gpu(), ga, shifted(gb), y); }), got);
    }
  }
}

TEST_CASE("add on CUDA: gradients, for all subsets", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  struct Shapes { Shape y, b; };
  for (const DType dtype : kDtypes) {
    for (const auto& [shape, suffix] : {Shapes{{0, 5}, {5}}, Shapes{{4, 0}, {0}}, Shapes{{1, 31}, {31}}, Shapes{{7, 33}, {33}},
                                        Shapes{{31, 64}, {64}}, Shapes{{3, 5}, {3, 5}}, Shapes{{3001, 8}, {8}}, Shapes{{5000}, {}},
                                        Shapes{{300, 40, 4}, {4}}, Shapes{{8, 400, 256}, {400, 256}}}) {
      INFO(dtype << shape << " to " << suffix);
      const Tensor dy = values(shape, dtype, 3), gdy = on_gpu(dy, dtype);
      const Tensor wanted = oracle(suffix, [&](Tensor& db) { kernels::add_backward(cpu(), dy, nullptr, &db); });
      Guarded da(shape, dtype), db(suffix, dtype);
      kernels::add_backward(gpu(), gdy, &da.tensor, &db.tensor);
      const Tensor got = db.values();
      expect_same_bits(da.values(), dy);
      // A sum of up to 12,000 terms by chunks: some 128 additions deep, in f32.
      expect_near(got, wanted, rounding(dtype) + 128 * roundoff(DType::f32));
      expect_same_bits(output(suffix, dtype, [&](Tensor& y) { kernels::add_backward(gpu(), gdy, nullptr, &y); }), got);
      expect_same_bits(output(shape, dtype, [&](Tensor& y) { kernels::add_backward(gpu(), gdy, &y, nullptr); }), dy);
      expect_same_bits(output(suffix, dtype, [&](Tensor& y) { kernels::add_backward(gpu(), shifted(gdy), nullptr, &y); }), got);
      CHECK_NOTHROW(kernels::add_backward(gpu(), gdy, nullptr, nullptr));
    }
  }
}

TEST_CASE("accumulate, scale and fill on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : kDtypes) {
    for (const std::int64_t n : {0, 1, 31, 33, 1 << 19}) {
      INFO(dtype << "(" << n << ")");
      const Tensor x = values({n}, dtype, 4), start = values({n}, dtype, 5), gx = on_gpu(x, dtype), gstart = on_gpu(start, dtype);
      const Tensor sum = oracle({n}, [&](Tensor& y) { kernels::add_forward(cpu(), start, x, y); });
      const Tensor got = output({n}, dtype, [&](Tensor& y) {
        gpu().copy(gstart, y);
        kernels::accumulate(gpu(), gx, y);
      });
      expect_near(got, sum, rounding(dtype), 0);
      Tensor odd = shifted(gstart);
      kernels::accumulate(gpu(), gx, odd);
      expect_same_bits(from_gpu(odd), got);

      const Tensor scaled = oracle({n}, [&](Tensor& y) { kernels::scale(cpu(), x, -0.3, y); });
      const Tensor got_scaled = output({n}, dtype, [&](Tensor& y) { kernels::scale(gpu(), gx, -0.3, y); });
      expect_near(got_scaled, scaled, rounding(dtype), 0);
      expect_same_bits(output({n}, dtype, [&](Tensor& y) { kernels::scale(gpu(), shifted(gx), -0.3, y); }), got_scaled);
    }
  }
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
    for (const std::int64_t n : {0, 1, 33, 70001}) {
      for (const double value : {0.0, 2.5, -0.0}) {
        const Tensor got = output({n}, dtype, [&](Tensor& y) { kernels::fill(gpu(), value, y); });
        expect_same_bits(got, oracle({n}, [&](Tensor& y) { kernels::fill(cpu(), value, y); }));
      }
    }
  }
  Tensor ids = gpu().empty({2}, DType::i64);
  expect_throws<InvalidArgument>([&] { kernels::fill(gpu(), 1, ids); }, "CUDA fills f32, f64 and bf16");
}

TEST_CASE("sum on CUDA: a few tensors, and more than one launch takes", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const DType dtype : kDtypes) {
    for (const int count : {1, 39, 128, 129, 300}) {
      INFO(dtype << ", " << count << " tensors");
      std::vector<Tensor> inputs, ginputs;
      for (int k = 0; k < count; ++k) {
        const Shape shape = k % 7 == 3 ? Shape{0} : k % 7 == 5 ? Shape{3, 11} : k == 2 ? Shape{5000} : Shape{1};
        inputs.push_back(values(shape, dtype, static_cast<std::uint64_t>(k)));
        ginputs.push_back(k % 2 ? shifted(on_gpu(inputs.back(), dtype)) : on_gpu(inputs.back(), dtype));
      }
      const Tensor wanted = oracle({1}, [&](Tensor& total) { kernels::sum_forward(cpu(), inputs, total); });
      // In double on both sides, rounded to f32 and then to the dtype.
      expect_near(output({1}, dtype, [&](Tensor& total) { kernels::sum_forward(gpu(), ginputs, total); }), wanted, rounding(dtype), 0);

      const Tensor dtotal = values({1}, dtype, 6), gdtotal = on_gpu(dtotal, dtype);
      std::vector<Guarded> outputs;
      for (const Tensor& input : inputs) outputs.emplace_back(input.shape(), dtype);
      std::vector<Tensor*> wanted_gradients;
      for (int k = 0; k < count; ++k) wanted_gradients.push_back(k % 5 == 4 ? nullptr : &outputs[static_cast<std::size_t>(k)].tensor);
      kernels::sum_backward(gpu(), gdtotal, wanted_gradients);
      for (int k = 0; k < count; ++k)
        for (const double value : values_of(outputs[static_cast<std::size_t>(k)].values()))
            CHECK((k % 5 == 4 ? std::isnan(value) : value == dtotal.data<double>()[0]));
    }
    const std::vector<Tensor> empty = {gpu().empty({0}, dtype)};
    CHECK(output({1}, dtype, [&](Tensor& total) { kernels::sum_forward(gpu(), empty, total); }).data<double>()[0] == 0);
    CHECK_NOTHROW(kernels::sum_backward(gpu(), on_gpu(values({1}, dtype, 6), dtype), std::vector<Tensor*>{nullptr}));
  }
}

TEST_CASE("cast on CUDA: all of its pairs", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const double inf = std::numeric_limits<double>::infinity();
  for (const std::int64_t n : {0, 1, 31, 33, 100001}) {
    Tensor x = random({n}, DType::f64, 7), ids = host_zeros({n}, DType::i64), bytes = host_zeros({n}, DType::u8);
    const double special[] = {1.00390625, 1.01171875, 3.4e38, inf, -inf, std::nan(""), -0.0, 1e-40};   // two ties of bf16, an overflow, a subnormal
    for (std::int64_t i = 0; i < n; ++i) {
      if (n > 8 && i < 8) x.data<double>()[i] = special[i];
      ids.data<std::int64_t>()[i] = (i - 5) * 1234567;
      bytes.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(i * 7);
    }
    struct Pair { Tensor x; DType to; };
    const Tensor x64 = gpu().to_device(x), x32 = on_gpu(x, DType::f32), x16 = on_gpu(x, DType::bf16), gids = gpu().to_device(ids),
        gbytes = gpu().to_device(bytes);
    gpu().wait();
    for (const auto& [from, to] : {Pair{x64, DType::f32}, Pair{x32, DType::f32}, Pair{x16, DType::f32}, Pair{gids, DType::f32},
                                   Pair{gbytes, DType::f32}, Pair{x32, DType::bf16}, Pair{x16, DType::bf16}, Pair{x32, DType::f64},
                                   Pair{x16, DType::f64}, Pair{x64, DType::f64}}) {
      INFO(from << " to " << to);
      // The host's rounding, exactly: rounded() works on the values that `from` has.
      const Tensor seen = from_gpu(from), wanted = to == DType::f64 ? seen : rounded(seen, to);
      expect_near(output({n}, to, [&](Tensor& y) { kernels::cast(gpu(), from, y); }), wanted, 0, 0);
      expect_near(output({n}, to, [&](Tensor& y) { kernels::cast(gpu(), shifted(from), y); }), wanted, 0, 0);
    }
    for (const Tensor& whole : {gids, gbytes})
      expect_same_bits(output({n}, whole.dtype(), [&](Tensor& y) { kernels::cast(gpu(), whole, y); }), from_gpu(whole));
  }
  Tensor half = gpu().empty({2}, DType::bf16), ids = gpu().empty({2}, DType::i64), wide = gpu().empty({2}, DType::f64);
  expect_throws<InvalidArgument>([&] { kernels::cast(gpu(), wide, half); }, "cast: CUDA casts");
  expect_throws<InvalidArgument>([&] { kernels::cast(gpu(), half, ids); }, "cast: CUDA casts");
}

TEST_CASE("mask_rows on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  struct Shapes { Shape x, mask; };
  for (const DType dtype : kDtypes) {
    for (const auto& [shape, rows] : {Shapes{{0, 4}, {0}}, Shapes{{1, 1}, {1}}, Shapes{{31, 33}, {31}}, Shapes{{3, 33, 8}, {33}},
                                      Shapes{{3, 33, 8}, {3, 33}}, Shapes{{2, 3, 5}, {}}, Shapes{{4, 0}, {4}}, Shapes{{2, 2100, 256}, {2100}}}) {
      INFO(dtype << shape << ", mask " << rows);
      Tensor x = values(shape, dtype, 8), mask = host_zeros(rows, DType::u8);
      for (std::int64_t i = 0; i < rows.numel(); ++i) mask.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(i % 3);
      if (x.numel()) x.data<double>()[0] = std::nan("");   // in a masked row, which is no product
      const Tensor gx = on_gpu(x, dtype), gmask = on_gpu(mask, DType::u8);
      gpu().wait();
      const Tensor wanted = oracle(shape, [&](Tensor& y) { kernels::mask_rows(cpu(), x, mask, y); });
      expect_same_bits(output(shape, dtype, [&](Tensor& y) { kernels::mask_rows(gpu(), gx, gmask, y); }), wanted);
      expect_same_bits(output(shape, dtype, [&](Tensor& y) { kernels::mask_rows(gpu(), shifted(gx), gmask, y); }), wanted);
    }
  }
}

TEST_CASE("images_to_float on CUDA: scaling and nearest resize", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  struct Shapes { Shape images, y; };
  for (const DType dtype : kDtypes) {
    for (const auto& [from, to] : {Shapes{{0, 4, 4, 3}, {0, 2, 2, 3}}, Shapes{{1, 1, 1, 1}, {1, 1, 1, 1}}, Shapes{{1, 1, 1, 3}, {1, 31, 33, 3}},
                                   Shapes{{2, 5, 7, 3}, {2, 5, 7, 3}}, Shapes{{2, 16, 16, 3}, {2, 31, 24, 3}}, Shapes{{2, 33, 40, 4}, {2, 16, 8, 4}},
                                   Shapes{{1, 256, 1, 1}, {1, 256, 1, 1}}, Shapes{{2, 160, 160, 3}, {2, 160, 160, 3}},
                                   Shapes{{2, 160, 160, 3}, {2, 120, 136, 3}}}) {
      INFO(dtype << from << " to " << to);
      Tensor images = host_zeros(from, DType::u8);
      for (std::int64_t i = 0; i < images.numel(); ++i) images.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(i * 37 + i / 256);
      const Tensor gimages = on_gpu(images, DType::u8);
      gpu().wait();
      const Tensor wanted = oracle(to, [&](Tensor& y) { kernels::images_to_float(cpu(), images, y); });
      const Tensor got = output(to, dtype, [&](Tensor& y) { kernels::images_to_float(gpu(), gimages, y); });
      // The quotient's nearest value, by way of f32 where that is bf16.
      expect_same_bits(got, rounded(wanted, dtype));
      const std::int64_t count = to.numel();
      Guarded memory({count + 1}, dtype);   // an output without 16-byte stores
      Tensor odd = memory.tensor.view(1, to);
      kernels::images_to_float(gpu(), gimages, odd);
      CHECK(std::isnan(memory.values().data<double>()[0]));
      expect_same_bits(from_gpu(odd), got);
    }
  }
}

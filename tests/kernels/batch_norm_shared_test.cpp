// Batch norm over the rows of several ranks: kernels/batch_norm.h, from batch_norm_moments on.
#include <cmath>

#include "kernels/batch_norm.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;
using kernels::Activation;

namespace {

Tensor f64(const Shape& shape, const std::vector<double>& values) { return host_tensor<double>(shape, values); }

double largest(const Tensor& tensor) {
  double result = 0;
  for (const double v : values_of(tensor)) result = std::max(result, std::abs(v));
  return result;
}

/// What a batch norm reads, for the joined rows of W ranks with R rows each, rank after rank.
struct Batch {
  std::int64_t ranks, rows;
  Activation activation;
  Tensor x, weight, bias, residual, dy;
  double eps = 1e-5, momentum = 0.1;

  Batch(std::int64_t W, std::int64_t R, std::int64_t C, DType dtype, Activation activation_ = Activation::none, bool has_residual = false)
      : ranks(W), rows(R), activation(activation_) {
    x = random({W * R, C}, dtype, 1);
    weight = random({C}, dtype, 2);
    bias = random({C}, dtype, 3);
    if (has_residual) residual = random({W * R, C}, dtype, 4);
    dy = random({W * R, C}, dtype, 5);
  }
  DType dtype() const { return x.dtype(); }
  std::int64_t channels() const { return x.dim(1); }
  Tensor of_rank(const Tensor& joined, std::int64_t rank) const { return joined.slice(rank * rows, (rank + 1) * rows); }
};

/// What comes of it. Maps are joined; of a wanted gradient that is not there nothing is defined. dweight and dbias are by rank, (W, C).
struct Result {
  Tensor running_mean, running_var, y, mean, rstd, dx, dweight, dbias, dresidual;

  explicit Result(const Batch& batch, std::int64_t ranks) {
    running_mean = random({batch.channels()}, batch.dtype(), 6);
    running_var = random({batch.channels()}, batch.dtype(), 7);
    y = poisoned(batch.x.shape(), batch.dtype());
    mean = poisoned({batch.channels()}, batch.dtype());
    rstd = poisoned({batch.channels()}, batch.dtype());
    dx = poisoned(batch.x.shape(), batch.dtype());
    dresidual = poisoned(batch.x.shape(), batch.dtype());
    dweight = poisoned({ranks, batch.channels()}, batch.dtype());
    dbias = poisoned({ranks, batch.channels()}, batch.dtype());
  }
};

/// The fused op on all rows.
Result joined(const Batch& b) {
  Result r(b, 1);
  const Stream stream = Stream::cpu(1);
  const Tensor* added = b.residual.defined() ? &b.residual : nullptr;
  kernels::batch_norm_forward(stream, b.x, b.weight, b.bias, added, b.activation, b.eps, b.momentum, r.running_mean, r.running_var, r.y, r.mean,
                              r.rstd);
  Tensor dweight = r.dweight.view(0, {b.channels()}), dbias = r.dbias.view(0, {b.channels()});
  kernels::batch_norm_backward(stream, b.dy, b.x, b.weight, b.bias, added, r.y, r.mean, r.rstd, b.activation, true, &r.dx, &dweight, &dbias,
                               &r.dresidual);
  return r;
}

constexpr int kAll = 15;   // dx, dweight, dbias, dresidual: bits 0 to 3

/// Each rank by itself but for what it exchanges.
Result by_ranks(const Batch& b, const Stream& stream = Stream::cpu(1), int wanted = kAll) {
  const std::int64_t C = b.channels();
  Result r(b, b.ranks);
  Tensor moments = poisoned({b.ranks, 2, C}, DType::f64), sums = poisoned({b.ranks, 2, C}, DType::f64);
  const auto share = [C](const Tensor& all, std::int64_t rank) { return all.view(rank * 2 * C, {2, C}); };
  const auto row = [C](const Tensor& all, std::int64_t rank) { return all.view(rank * C, {C}); };
  for (std::int64_t w = 0; w < b.ranks; ++w) {
    Tensor mine = share(moments, w);
    kernels::batch_norm_moments(stream, b.of_rank(b.x, w), mine);
  }
  kernels::batch_norm_combine(stream, moments, b.rows, b.eps, b.momentum, r.running_mean, r.running_var, r.mean, r.rstd);
  for (std::int64_t w = 0; w < b.ranks; ++w) {
    const Tensor residual = b.residual.defined() ? b.of_rank(b.residual, w) : Tensor();
    Tensor y = b.of_rank(r.y, w), mine = share(sums, w), dweight = row(r.dweight, w), dbias = row(r.dbias, w), dresidual = b.of_rank(r.dresidual, w);
    const auto if_wanted = [wanted](int bit, Tensor& t) { return wanted >> bit & 1 ? &t : nullptr; };
    const Tensor* added = residual.defined() ? &residual : nullptr;
    kernels::batch_norm_apply(stream, b.of_rank(b.x, w), b.weight, b.bias, added, b.activation, r.mean, r.rstd, y);
    kernels::batch_norm_backward_sums(stream, b.of_rank(b.dy, w), b.of_rank(b.x, w), b.weight, b.bias, added, y, r.mean, r.rstd, b.activation,
                                      if_wanted(0, mine), if_wanted(1, dweight), if_wanted(2, dbias), if_wanted(3, dresidual));
  }
  for (std::int64_t w = 0; w < b.ranks && wanted & 1; ++w) {
    const Tensor residual = b.residual.defined() ? b.of_rank(b.residual, w) : Tensor();
    Tensor dx = b.of_rank(r.dx, w);
    kernels::batch_norm_backward_apply(stream, b.of_rank(b.dy, w), b.of_rank(b.x, w), b.weight, b.bias, residual.defined() ? &residual : nullptr,
                                       b.of_rank(r.y, w), r.mean, r.rstd, b.activation, sums, dx);
  }
  return r;
}

/// The sum over the ranks, (1, C).
Tensor over_ranks(const Tensor& shares) {
  Tensor sum = host_zeros({1, shares.dim(1)}, DType::f64);
  const std::vector<double> values = values_of(shares);
  for (std::size_t i = 0; i < values.size(); ++i) sum.data<double>()[i % static_cast<std::size_t>(shares.dim(1))] += values[i];
  return sum;
}

void expect_same_results(const Result& got, const Result& wanted) {
  expect_same_bits(got.running_mean, wanted.running_mean);
  expect_same_bits(got.running_var, wanted.running_var);
  expect_same_bits(got.y, wanted.y);
  expect_same_bits(got.dx, wanted.dx);
  expect_same_bits(got.dweight, wanted.dweight);
  expect_same_bits(got.dbias, wanted.dbias);
  expect_same_bits(got.dresidual, wanted.dresidual);
}

}  // namespace

TEST_CASE("shared batch_norm: statistics worked by hand", "[cpu]") {
  // Ranks {0, 2}, {4, 8} and {9, 12}: means 1, 6 and 10.5, squared deviations 2, 8 and 4.5; in all 35/6, and 309 - 35^2 / 6 of 6 rows.
  const Tensor x = f64({6, 1}, {0, 2, 4, 8, 9, 12});
  Tensor moments = host_zeros({3, 2, 1}, DType::f64);
  for (std::int64_t w = 0; w < 3; ++w) {
    Tensor mine = moments.view(2 * w, {2, 1});
    kernels::batch_norm_moments(Stream::cpu(1), x.slice(2 * w, 2 * w + 2), mine);
  }
  expect_close(moments, f64({3, 2, 1}, {1, 2, 6, 8, 10.5, 4.5}), 1e-15);
  Tensor running_mean = f64({1}, {1}), running_var = f64({1}, {4}), mean = f64({1}, {0}), rstd = f64({1}, {0});
  kernels::batch_norm_combine(Stream::cpu(1), moments, 2, 0.5, 0.25, running_mean, running_var, mean, rstd);
  const double squares = 309 - 35 * 35 / 6.0;
  expect_close(mean, f64({1}, {35 / 6.0}), 1e-15);
  expect_close(rstd, f64({1}, {1 / std::sqrt(squares / 6 + 0.5)}), 1e-15);
  expect_close(running_mean, f64({1}, {0.75 + 0.25 * 35 / 6}), 1e-15);
  expect_close(running_var, f64({1}, {3 + 0.25 * squares / 5}), 1e-15);

  // One row in all: its variance is 0, biased or not.
  kernels::batch_norm_combine(Stream::cpu(1), f64({1, 2, 1}, {7, 0}), 1, 0.25, 0.5, running_mean, running_var, mean, rstd);
  expect_close(mean, f64({1}, {7}), 0);
  expect_close(rstd, f64({1}, {2}), 0);
  expect_close(running_var, f64({1}, {(3 + 0.25 * squares / 5) / 2}), 1e-15);
}

TEST_CASE("shared batch_norm: backward worked by hand", "[cpu]") {
  // Ranks {0} and {4}: mean 2; with rstd 1/2 the normalised values are -1 and 1. Gradients 3 and 5: sums of g and g (x - mean) by rank.
  const Tensor x = f64({2, 1}, {0, 4}), dy = f64({2, 1}, {3, 5}), weight = f64({1}, {6}), bias = f64({1}, {0}), mean = f64({1}, {2}),
               rstd = f64({1}, {0.5});
  Tensor sums = host_zeros({2, 2, 1}, DType::f64), dweight = host_zeros({1}, DType::f64), dbias = host_zeros({1}, DType::f64);
  for (std::int64_t w = 0; w < 2; ++w) {
    Tensor mine = sums.view(2 * w, {2, 1});
    kernels::batch_norm_backward_sums(Stream::cpu(1), dy.slice(w, w + 1), x.slice(w, w + 1), weight, bias, nullptr, Tensor(), mean, rstd,
                                      Activation::none, &mine, &dweight, &dbias, nullptr);
    expect_close(dweight, f64({1}, {w ? 5.0 : -3.0}), 0);   // this rank's alone
    expect_close(dbias, f64({1}, {w ? 5.0 : 3.0}), 0);
  }
  expect_close(sums, f64({2, 2, 1}, {3, -6, 5, 10}), 0);
  // dx = 6 / 2 (g - 8 / 2 - (x - mean) / 4 * 4 / 2)
  for (std::int64_t w = 0; w < 2; ++w) {
    Tensor dx = host_zeros({1, 1}, DType::f64);
    kernels::batch_norm_backward_apply(Stream::cpu(1), dy.slice(w, w + 1), x.slice(w, w + 1), weight, bias, nullptr, Tensor(), mean, rstd,
                                       Activation::none, sums, dx);
    expect_close(dx, f64({1, 1}, {w ? 3 * (5 - 4 - 1) : 3 * (3 - 4 + 1.0)}), 0);
  }
}

TEST_CASE("shared batch_norm: ranks agree with one process on the joined rows", "[cpu]") {
  for (const DType dtype : {DType::f64, DType::f32}) {
    for (const std::int64_t W : {1, 2, 3, 4}) {
      for (const auto& [R, C] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {1, 33}, {2, 31}, {57, 3}}) {
        for (const Activation activation : {Activation::none, Activation::relu, Activation::silu}) {
          for (const bool residual : {false, true}) {
            INFO(dtype << ", " << W << " ranks of (" << R << ", " << C << "), activation " << static_cast<int>(activation) << ", residual "
                       << residual);
            const Batch batch(W, R, C, dtype, activation, residual);
            const Result got = by_ranks(batch), wanted = joined(batch);
            // What adding up all rows one by one may be off by, and some more operations, relative to the terms.
            const double off = static_cast<double>(W * R + 16) * (dtype == DType::f64 ? std::ldexp(1.0, -53) : std::ldexp(1.0, -24));
            const double scale = largest(wanted.rstd) * largest(batch.weight), g = 2 * largest(wanted.dresidual);
            expect_close(got.mean, wanted.mean, 0, off);
            expect_close(got.rstd, wanted.rstd, off * largest(wanted.rstd) * largest(wanted.rstd));   // var is off by `off`
            expect_close(got.running_mean, wanted.running_mean, 0, off);
            expect_close(got.running_var, wanted.running_var, 0, off);
            expect_close(got.y, wanted.y, 0, off * (2 + scale));
            expect_close(got.dx, wanted.dx, 0, off * scale * g);
            expect_close(got.dresidual, wanted.dresidual, 0, off * (2 + scale));
            expect_close(over_ranks(got.dweight), over_ranks(wanted.dweight), 0, off * largest(wanted.rstd) * static_cast<double>(W * R));
            expect_close(over_ranks(got.dbias), over_ranks(wanted.dbias), 0, off * static_cast<double>(W * R) * (2 + scale));
          }
        }
      }
    }
  }
}

TEST_CASE("shared batch_norm: any subset of gradients has the same bits, with any number of threads", "[cpu]") {
  for (const Activation activation : {Activation::none, Activation::relu, Activation::silu}) {
    for (const bool residual : {false, true}) {
      const Batch batch(2, 1500, 33, DType::f32, activation, residual);   // two blocks on each rank
      const Result full = by_ranks(batch);
      for (const int threads : {2, 3}) expect_same_results(by_ranks(batch, Stream::cpu(threads)), full);
      const Result untouched(batch, 2);
      for (int wanted = 0; wanted < kAll; ++wanted) {
        INFO("activation " << static_cast<int>(activation) << ", wanted " << wanted);
        const Result part = by_ranks(batch, Stream::cpu(1), wanted);
        expect_same_bits(part.dx, (wanted & 1 ? full : untouched).dx);
        expect_same_bits(part.dweight, (wanted & 2 ? full : untouched).dweight);
        expect_same_bits(part.dbias, (wanted & 4 ? full : untouched).dbias);
        expect_same_bits(part.dresidual, (wanted & 8 ? full : untouched).dresidual);
      }
      // dx from the residual's gradient.
      const Tensor sums = random({1, 2, 33}, DType::f64, 8);
      Tensor from_dy = poisoned(batch.x.shape(), DType::f32), from_g = poisoned(batch.x.shape(), DType::f32);
      kernels::batch_norm_backward_apply(Stream::cpu(1), batch.dy, batch.x, batch.weight, batch.bias, residual ? &batch.residual : nullptr, full.y,
                                         full.mean, full.rstd, activation, sums, from_dy);
      kernels::batch_norm_backward_apply(Stream::cpu(1), full.dresidual, batch.x, batch.weight, batch.bias, nullptr, Tensor(), full.mean, full.rstd,
                                         Activation::none, sums, from_g);
      expect_same_bits(from_g, from_dy);
    }
  }
}

TEST_CASE("shared batch_norm: of norms that share an exchange each takes its own numbers", "[cpu]") {
  constexpr std::int64_t W = 3, K = 2, C = 5;
  const Tensor together = random({W, K, 2, C}, DType::f64, 1), x = random({4, C}, DType::f64, 2), dy = random({4, C}, DType::f64, 3), channel = random({C}, DType::f64, 4);
  for (std::int64_t norm = 0; norm < K; ++norm) {
    Tensor alone = host_zeros({W, 2, C}, DType::f64);
    for (std::int64_t w = 0; w < W; ++w) {
      for (std::int64_t i = 0; i < 2 * C; ++i) alone.data<double>()[w * 2 * C + i] = together.data<double>()[(w * K + norm) * 2 * C + i];
    }
    const auto results = [&](const kernels::Exchanged& exchanged) {
      std::vector<Tensor> out;
      for (int i = 0; i < 4; ++i) out.push_back(host_tensor<double>({C}, values_of(channel)));
      kernels::batch_norm_combine(Stream::cpu(1), exchanged, 4, 1, 0.25, out[0], out[1], out[2], out[3]);
      out.push_back(poisoned({4, C}, DType::f64));
      kernels::batch_norm_backward_apply(Stream::cpu(1), dy, x, channel, channel, nullptr, Tensor(), out[2], out[3], Activation::none, exchanged, out[4]);
      return out;
    };
    const std::vector<Tensor> got = results({together, norm}), wanted = results(alone);
    for (std::size_t i = 0; i < got.size(); ++i) expect_same_bits(got[i], wanted[i]);
  }
  Tensor a = host_zeros({C}, DType::f64), b = a;
  for (const std::int64_t norm : {-1, 2}) {
    expect_throws<InvalidArgument>([&] { kernels::batch_norm_combine(Stream::cpu(1), {together, norm}, 4, 1, 0.25, a, b, a, b); }, "batch_norm: moments: there is no norm ");
  }
}

TEST_CASE("shared batch_norm: far means cost no digits", "[cpu]") {
  // Means of a million on one rank and of a million and ten on the other, deviations of about one.
  Batch batch(2, 3000, 3, DType::f64);
  for (std::int64_t i = 0; i < batch.x.numel(); ++i) batch.x.data<double>()[i] += i < batch.x.numel() / 2 ? 1e6 : 1e6 + 10;
  const Result got = by_ranks(batch);
  for (std::int64_t c = 0; c < 3; ++c) {
    long double sum = 0, squares = 0;
    for (std::int64_t r = 0; r < 6000; ++r) sum += static_cast<long double>(batch.x.data<double>()[3 * r + c]);
    const long double mean = sum / 6000;
    for (std::int64_t r = 0; r < 6000; ++r) {
      const long double d = static_cast<long double>(batch.x.data<double>()[3 * r + c]) - mean;
      squares += d * d;
    }
    expect_close(got.mean.data<double>()[c], static_cast<double>(mean), 1e-15);
    // A million is known to 1e-10, the deviation of 5 from the middle therefore to 2e-11 of itself.
    expect_close(got.rstd.data<double>()[c], static_cast<double>(1 / std::sqrt(squares / 6000 + 1e-5L)), 1e-10);
  }
}

TEST_CASE("shared batch_norm: NaN is not hidden, no channels are no trouble", "[cpu]") {
  Batch batch(3, 2, 2, DType::f32, Activation::relu);
  batch.x.data<float>()[4] = std::nanf("");   // rank 1, channel 0
  const Result got = by_ranks(batch);
  CHECK(std::isnan(got.mean.data<float>()[0]));
  CHECK(std::isnan(got.rstd.data<float>()[0]));
  CHECK(std::isnan(got.y.data<float>()[10]));   // on the last rank
  CHECK(std::isnan(got.dx.data<float>()[0]));   // on the first
  CHECK_FALSE(std::isnan(got.y.data<float>()[11]));
  CHECK(by_ranks(Batch(2, 3, 0, DType::f32)).dx.numel() == 0);
}

TEST_CASE("shared batch_norm: broken contracts", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const Tensor map = host_zeros({4, 3}, DType::f32), channel = host_zeros({3}, DType::f32), none;
  const auto throws = [](const std::function<void()>& call, const std::string& text) { expect_throws<InvalidArgument>(call, text); };
  Tensor moments = host_zeros({2, 3}, DType::f64), all = host_zeros({2, 2, 3}, DType::f64), wrong = host_zeros({4}, DType::f64);
  Tensor a = host_zeros({3}, DType::f32), b = a, mean = a, rstd = a, y = host_zeros({4, 3}, DType::f32);

  throws([&] { kernels::batch_norm_moments(stream, none, moments); }, "batch_norm: x must be (..., C), got undefined");
  throws([&] { kernels::batch_norm_moments(stream, host_zeros({0, 3}, DType::f32), moments); }, "no rows to take statistics of in f32(0, 3)");
  throws([&] { kernels::batch_norm_moments(stream, map, wrong); }, "batch_norm: moments must be f64(2, 3), got f64(4)");

  const auto combine = [&](const Tensor& m, std::int64_t rows, double eps, double momentum, Tensor run_m, Tensor run_v, Tensor me, Tensor rs) {
    return [=] { Tensor p = run_m, q = run_v, r = me, s = rs; kernels::batch_norm_combine(Stream::cpu(1), m, rows, eps, momentum, p, q, r, s); };
  };
  throws(combine(all, 1, 1e-5, 0.1, a, b, none, rstd), "batch_norm: mean must be (C), got undefined");
  throws(combine(moments, 1, 1e-5, 0.1, a, b, mean, rstd), "batch_norm: moments must be (W, 2, 3) of W ranks, got f64(2, 3)");
  throws(combine(host_zeros({0, 2, 3}, DType::f64), 1, 1e-5, 0.1, a, b, mean, rstd), "batch_norm: moments must be (W, 2, 3)");
  throws(combine(host_zeros({2, 2, 3}, DType::f32), 1, 1e-5, 0.1, a, b, mean, rstd), "moments must be f64(2, 2, 3), got f32(2, 2, 3)");
  throws(combine(all, 1, 1e-5, 0.1, wrong, b, mean, rstd), "batch_norm: running_mean must be");
  throws(combine(all, 1, 1e-5, 0.1, a, wrong, mean, rstd), "batch_norm: running_var must be");
  throws(combine(all, 1, 1e-5, 0.1, a, b, mean, wrong), "batch_norm: rstd must be");
  throws(combine(all, 0, 1e-5, 0.1, a, b, mean, rstd), "batch_norm: each rank must have a row, got 0 rows");
  throws(combine(all, 1, 0, 0.1, a, b, mean, rstd), "batch_norm: eps must be > 0");
  throws(combine(all, 1, 1e-5, -1, a, b, mean, rstd), "batch_norm: momentum must be in [0, 1]");

  throws([&] { kernels::batch_norm_apply(stream, map, channel, channel, nullptr, Activation::none, wrong, rstd, y); }, "batch_norm: mean must be");
  throws([&] { kernels::batch_norm_apply(stream, map, channel, channel, nullptr, Activation::gelu, mean, rstd, y); }, "must be none, relu or silu");

  const auto sums = [&](const Tensor& x, Activation activation, Tensor* s, Tensor* dweight, Tensor* dbias, Tensor* dresidual) {
    kernels::batch_norm_backward_sums(stream, map, x, channel, channel, nullptr, none, mean, rstd, activation, s, dweight, dbias, dresidual);
  };
  sums(none, Activation::none, nullptr, nullptr, nullptr, &y);   // reads nothing of x
  throws([&] { sums(none, Activation::none, &moments, nullptr, nullptr, nullptr); }, "batch_norm: x must be (..., C), got undefined");
  throws([&] { sums(none, Activation::silu, nullptr, nullptr, nullptr, &y); }, "batch_norm: x must be (..., C), got undefined");
  throws([&] { sums(map, Activation::relu, &moments, nullptr, nullptr, nullptr); }, "batch_norm: y must be");
  throws([&] { sums(map, Activation::none, &wrong, nullptr, nullptr, nullptr); }, "batch_norm: sums must be f64(2, 3), got f64(4)");
  throws([&] { sums(map, Activation::none, nullptr, &wrong, nullptr, nullptr); }, "batch_norm: dweight must be");
  throws([&] { sums(map, Activation::none, nullptr, nullptr, &wrong, nullptr); }, "batch_norm: dbias must be");
  throws([&] { sums(map, Activation::none, nullptr, nullptr, nullptr, &wrong); }, "batch_norm: dresidual must be");

  const auto apply = [&](const Tensor& x, const Tensor& s, Tensor& dx) {
    kernels::batch_norm_backward_apply(stream, map, x, channel, channel, nullptr, none, mean, rstd, Activation::none, s, dx);
  };
  throws([&] { apply(none, all, y); }, "batch_norm: x must be (..., C), got undefined");
  throws([&] { apply(map, moments, y); }, "batch_norm: sums must be (W, 2, 3) of W ranks, got f64(2, 3)");
  throws([&] { apply(map, all, wrong); }, "batch_norm: dx must be");
}

#include "kernels/attention.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/random.h"
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
  Tensor q, k, v, dout, groups;   // groups may be undefined
  std::int64_t heads = 1;
  const Tensor* mask() const { return groups.defined() ? &groups : nullptr; }
};

struct Result {
  Tensor out, lse, dq, dk, dv;
};

Result run(const Case& c, int threads = 1) {
  const Stream stream = Stream::cpu(threads);
  const DType dtype = c.q.dtype();
  Result r{host_zeros(c.q.shape(), dtype), host_zeros({c.q.dim(0), c.heads, c.q.dim(1)}, dtype), host_zeros(c.q.shape(), dtype),
           host_zeros(c.k.shape(), dtype), host_zeros(c.k.shape(), dtype)};
  attention_forward(stream, c.q, c.k, c.v, c.heads, c.mask(), r.out, r.lse);
  attention_backward(stream, c.dout, c.q, c.k, c.v, r.out, r.lse, c.heads, c.mask(), &r.dq, &r.dk, &r.dv);
  return r;
}

/// Numbers on a grid that any language repeats exactly.
Tensor ramp(const Shape& shape, std::int64_t step, double low, double high) {
  Tensor x = host_zeros(shape, DType::f64);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<double>()[i] = low + (high - low) * static_cast<double>(i * step % 23) / 23;
  return x;
}

Tensor random(const Shape& shape, DType dtype, std::uint64_t seed, double scale = 1) {
  Tensor x = host_zeros(shape, dtype);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    const double value = scale * normal(RandomKey(seed), static_cast<std::uint64_t>(i));
    if (dtype == DType::f32) x.data<float>()[i] = static_cast<float>(value);
    else x.data<double>()[i] = value;
  }
  return x;
}

Tensor copy_of(const Tensor& x) {
  Tensor copy = host_zeros(x.shape(), x.dtype());
  std::memcpy(copy.raw(), x.raw(), static_cast<std::size_t>(x.bytes()));
  return copy;
}

Case random_case(std::int64_t images, std::int64_t queries, std::int64_t keys, std::int64_t heads, std::int64_t depth, DType dtype) {
  const Shape of_queries{images, queries, heads * depth}, of_keys{images, keys, heads * depth};
  return {random(of_queries, dtype, 1), random(of_keys, dtype, 2), random(of_keys, dtype, 3), random(of_queries, dtype, 4), {}, heads};
}

/// Two denoising groups, padding slots among and after them, ordinary queries, `tokens` in all.
Tensor denoising_groups(std::int64_t tokens) {
  std::vector<std::int64_t> groups(static_cast<std::size_t>(tokens), kOrdinaryQuery);
  for (std::int64_t i = 0; i < tokens * 2 / 3; ++i) groups[static_cast<std::size_t>(i)] = i % 7 == 5 ? kPaddingSlot : i * 3 / tokens;
  return host_tensor<std::int64_t>({tokens}, groups);
}

bool allowed(const Case& c, std::int64_t query, std::int64_t key) {
  if (!c.groups.defined()) return true;
  const std::int64_t from = c.groups.data<std::int64_t>()[query], to = c.groups.data<std::int64_t>()[key];
  return from != kPaddingSlot && to != kPaddingSlot && (to == kOrdinaryQuery || to == from);
}

/// The formula, one sum after the other, in f64.
Result plain(const Case& c) {
  const std::int64_t images = c.q.dim(0), queries = c.q.dim(1), keys = c.k.dim(1), width = c.q.dim(2), depth = width / c.heads;
  Result r{host_zeros(c.q.shape(), DType::f64), host_zeros({images, c.heads, queries}, DType::f64), host_zeros(c.q.shape(), DType::f64),
           host_zeros(c.k.shape(), DType::f64), host_zeros(c.k.shape(), DType::f64)};
  const std::vector<double> q = values_of(c.q), k = values_of(c.k), v = values_of(c.v), dout = values_of(c.dout);
  const double scale = 1 / std::sqrt(static_cast<double>(depth));
  for (std::int64_t n = 0; n < images; ++n) {
    for (std::int64_t a = 0; a < c.heads; ++a) {
      for (std::int64_t i = 0; i < queries; ++i) {
        const std::size_t qi = static_cast<std::size_t>((n * queries + i) * width + a * depth);
        std::vector<double> p(static_cast<std::size_t>(keys), 0), dp = p;
        const auto key = [&](std::int64_t j) { return static_cast<std::size_t>((n * keys + j) * width + a * depth); };
        double sum = 0, mean = 0;
        for (std::int64_t j = 0; j < keys; ++j) {
          if (!allowed(c, i, j)) continue;
          double score = 0;
          for (std::size_t e = 0; e < static_cast<std::size_t>(depth); ++e) score += q[qi + e] * k[key(j) + e] * scale;
          sum += p[static_cast<std::size_t>(j)] = std::exp(score);
        }
        if (sum == 0) continue;
        r.lse.data<double>()[(n * c.heads + a) * queries + i] = std::log(sum);
        for (std::int64_t j = 0; j < keys; ++j) {
          const auto at = static_cast<std::size_t>(j);
          p[at] /= sum;
          for (std::size_t e = 0; e < static_cast<std::size_t>(depth); ++e) {
            r.out.data<double>()[qi + e] += p[at] * v[key(j) + e];
            r.dv.data<double>()[key(j) + e] += p[at] * dout[qi + e];
            dp[at] += dout[qi + e] * v[key(j) + e];
          }
          mean += p[at] * dp[at];
        }
        for (std::int64_t j = 0; j < keys; ++j) {
          const double ds = p[static_cast<std::size_t>(j)] * (dp[static_cast<std::size_t>(j)] - mean) * scale;
          for (std::size_t e = 0; e < static_cast<std::size_t>(depth); ++e) {
            r.dq.data<double>()[qi + e] += ds * k[key(j) + e];
            r.dk.data<double>()[key(j) + e] += ds * q[qi + e];
          }
        }
      }
    }
  }
  return r;
}

/// Compares values, whatever the dtype of `got`.
void expect_values(const Tensor& got, const Tensor& wanted, double rtol, double atol) {
  expect_close(host_tensor<double>(got.shape(), values_of(got)), wanted, rtol, atol);
}

void expect_as_plain(const Case& c, double rtol, double atol) {
  const Result got = run(c), wanted = plain(c);
  expect_values(got.out, wanted.out, rtol, atol);
  expect_values(got.lse, wanted.lse, rtol, atol);
  expect_values(got.dq, wanted.dq, rtol, atol);
  expect_values(got.dk, wanted.dk, rtol, atol);
  expect_values(got.dv, wanted.dv, rtol, atol);
}

void expect_same_result(const Result& a, const Result& b) {
  expect_same_bits(a.out, b.out);
  expect_same_bits(a.lse, b.lse);
  expect_same_bits(a.dq, b.dq);
  expect_same_bits(a.dk, b.dk);
  expect_same_bits(a.dv, b.dv);
}

}  // namespace

TEST_CASE("attention: worked by hand", "[cpu]") {
  // One head of depth 1: scores 0 and ln 3, so weights 1/4 and 3/4.
  const Case c{host_tensor<double>({1, 1, 1}, {1}), host_tensor<double>({1, 2, 1}, {0, std::log(3.0)}), host_tensor<double>({1, 2, 1}, {0, 4}),
               host_tensor<double>({1, 1, 1}, {2}), {}, 1};
  const Result r = run(c);
  expect_close(r.out.data<double>()[0], 3, 1e-14);
  expect_close(r.lse.data<double>()[0], std::log(4.0), 1e-14);
  expect_close(r.dv, host_tensor<double>({1, 2, 1}, {0.5, 1.5}), 1e-14);
  // dp = (0, 8), mean 6, ds = (-1.5, 1.5)
  expect_close(r.dk, host_tensor<double>({1, 2, 1}, {-1.5, 1.5}), 1e-14);
  expect_close(r.dq.data<double>()[0], 1.5 * std::log(3.0), 1e-14);
}

TEST_CASE("attention: recorded from PyTorch with a denoising mask", "[cpu]") {
  const Shape shape{1, 6, 4};
  const Case c{ramp(shape, 7, -2, 2), ramp(shape, 5, -2, 2), ramp(shape, 9, -1, 1), ramp(shape, 11, -1, 1),
               host_tensor<std::int64_t>({6}, {0, 0, 1, 1, kOrdinaryQuery, kOrdinaryQuery}), 2};
  const Result r = run(c);
  const auto expect = [](const Tensor& got, const std::vector<double>& wanted) {
    expect_close(got, host_tensor<double>(got.shape(), wanted), 1e-8, 1e-9);
  };
  expect(r.out, {-0.8815060414, -0.2168378181, 0.1751528592, -0.3095141186, -0.5265275473, -0.1749883913, -0.321236884, -0.5694811129,
                 -0.1483716573, -0.2381408545, 0.1975957953, 0.3733377019, -0.3748559498, -0.1710665937, 0.2743866036, 0.1589765138,
                 0.06883030627, -0.1164915399, -0.4552967052, -0.482547685, 0.2943980534, -0.2900051916, -0.2229904631, -0.6612447943});
  expect(r.lse, {3.547186016, 2.037226893, 2.100772433, 3.264746178, -0.151123747, 1.011435579, 1.157474641, 3.813922048, 3.145135315,
                 1.737558896, -0.7641423947, 3.947585246});
  expect(r.dq, {-0.1234537708, -0.09679066789, -0.06777439677, 0.1837088316, 0.2389062912, 0.2076116603, -0.1021121115, -0.0929295036,
                -0.1095224349, -0.1095224349, 0.09828506604, 0.06412489001, -0.07626572142, -0.07626572142, 0.1403236835, 0.05700441036,
                -0.09091726691, -0.09091726691, -0.08570395627, -0.08570395627, -0.07513112938, -0.07513112938, -0.08060087815, -0.08060087815});
  expect(r.dk, {0.03097741738, -0.07387930982, 0.07854615918, 0.2700581283, 0.004487416655, 0.005897012115, -0.048216697, -0.1695781934,
                -0.04527830488, -0.3507437195, -0.4129731354, -0.04521332606, 0.04941014775, 0.3435369326, 0.4484921723, 0.04497774808,
                0.003381418669, 0.1917374097, -0.3727245377, 0.295719469, -0.04297809558, -0.1165483251, 0.3068760386, -0.3959638259});
  expect(r.dv, {-0.4139947651, -0.1704058152, 0.5460592212, -0.07983294725, 0.02096778733, -0.008242086632, 0.256942725, -0.0386514884,
                0.5215214487, -0.4825100033, 0.3116692868, -0.3896988189, 0.2966787812, -0.2470808945, 0.5867238568, -0.6592966973,
                0.4843985478, -0.8429418647, 0.6046184705, -1.070947523, 0.4817325478, -1.118384553, 0.563551657, -1.152876873});
}

TEST_CASE("attention: as the plain formula at odd sizes", "[cpu]") {
  for (const DType dtype : {DType::f64, DType::f32}) {
    const double rtol = dtype == DType::f64 ? 1e-11 : 1e-4, atol = dtype == DType::f64 ? 1e-12 : 1e-5;
    expect_as_plain(random_case(1, 1, 1, 1, 1, dtype), rtol, atol);
    expect_as_plain(random_case(2, 3, 5, 2, 3, dtype), rtol, atol);
    expect_as_plain(random_case(1, 16, 16, 1, 8, dtype), rtol, atol);
    expect_as_plain(random_case(1, 131, 33, 3, 5, dtype), rtol, atol);   // three blocks of queries
    Case masked = random_case(2, 71, 71, 2, 32, dtype);
    masked.groups = denoising_groups(71);
    expect_as_plain(masked, rtol, atol);
  }
}

TEST_CASE("attention: padding slots get 0, give nothing and are not read", "[cpu]") {
  Case c = random_case(2, 21, 21, 2, 4, DType::f64);
  c.groups = denoising_groups(21);
  const Result before = run(c);
  for (const Tensor& x : {c.q, c.k, c.v, c.dout}) {
    for (std::int64_t row = 0; row < 2 * 21; ++row) {
      if (c.groups.data<std::int64_t>()[row % 21] == kPaddingSlot) std::fill_n(x.data<double>() + row * 8, 8, kNaN);
    }
  }
  const Result after = run(c);
  expect_same_result(after, before);
  for (std::int64_t row = 0; row < 2 * 21; ++row) {
    if (c.groups.data<std::int64_t>()[row % 21] != kPaddingSlot) continue;
    for (const Tensor& x : {after.out, after.dq, after.dk, after.dv}) {
      for (std::int64_t e = 0; e < 8; ++e) CHECK(x.data<double>()[row * 8 + e] == 0);
    }
    for (std::int64_t a = 0; a < 2; ++a) CHECK(after.lse.data<double>()[(row / 21 * 2 + a) * 21 + row % 21] == 0);
  }
}

TEST_CASE("attention: what a group holds does not show outside it", "[cpu]") {
  Case c = random_case(1, 21, 21, 2, 4, DType::f32);
  c.groups = denoising_groups(21);
  const Tensor before = run(c).out;
  for (Tensor* x : {&c.q, &c.k, &c.v}) {
    *x = copy_of(*x);
    for (std::int64_t i = 0; i < 21; ++i) {
      if (c.groups.data<std::int64_t>()[i] == 0) x->data<float>()[i * 8] += 1;
    }
  }
  const Tensor after = run(c).out;
  for (std::int64_t i = 0; i < 21; ++i) {
    const bool same = std::memcmp(after.data<float>() + i * 8, before.data<float>() + i * 8, 8 * sizeof(float)) == 0;
    CHECK(same == (c.groups.data<std::int64_t>()[i] != 0));
  }
}

TEST_CASE("attention: only padding slots", "[cpu]") {
  Case c = random_case(1, 3, 3, 1, 2, DType::f32);
  c.groups = host_tensor<std::int64_t>({3}, {kPaddingSlot, kPaddingSlot, kPaddingSlot});
  const Result r = run(c);
  for (const Tensor& x : {r.out, r.lse, r.dq, r.dk, r.dv}) expect_same_bits(x, host_zeros(x.shape(), DType::f32));
}

TEST_CASE("attention: no images, no queries, no keys", "[cpu]") {
  run(random_case(0, 3, 4, 2, 2, DType::f32));
  const Result no_queries = run(random_case(1, 0, 3, 2, 2, DType::f32));
  expect_same_bits(no_queries.dk, host_zeros({1, 3, 4}, DType::f32));
  expect_same_bits(no_queries.dv, host_zeros({1, 3, 4}, DType::f32));
  const Result no_keys = run(random_case(2, 3, 0, 2, 2, DType::f64));
  for (const Tensor& x : {no_keys.out, no_keys.lse, no_keys.dq}) expect_same_bits(x, host_zeros(x.shape(), DType::f64));
  Case none = random_case(1, 0, 0, 1, 2, DType::f32);
  none.groups = host_zeros({0}, DType::i64);
  run(none);
}

TEST_CASE("attention: large scores neither overflow nor vanish", "[cpu]") {
  // Scores 1e6, 1e6 and -1e6: the first two keys share the query.
  const Case c{host_tensor<float>({1, 1, 1}, {1000}), host_tensor<float>({1, 3, 1}, {1000, 1000, -1000}),
               host_tensor<float>({1, 3, 1}, {1, 3, 50}), host_tensor<float>({1, 1, 1}, {1}), {}, 1};
  const Result r = run(c);
  CHECK(r.out.data<float>()[0] == 2);
  expect_close(r.dv, host_tensor<float>({1, 3, 1}, {0.5F, 0.5F, 0}), 0.07);   // lse has the resolution of 1e6 in f32, 1/16
}

TEST_CASE("attention: NaN in an ordinary key reaches each query that may look at it", "[cpu]") {
  Case c = random_case(1, 4, 4, 1, 2, DType::f32);
  c.groups = host_tensor<std::int64_t>({4}, {0, kPaddingSlot, kOrdinaryQuery, kOrdinaryQuery});
  c.k.data<float>()[3 * 2] = static_cast<float>(kNaN);
  const Tensor out = run(c).out;
  for (const std::int64_t i : {0, 2, 3}) CHECK(std::isnan(out.data<float>()[i * 2]));
  CHECK(out.data<float>()[2] == 0);
}

TEST_CASE("attention: same bits for any number of threads", "[cpu]") {
  Case c = random_case(2, 150, 150, 4, 8, DType::f32);
  c.groups = denoising_groups(150);
  const Result one = run(c, 1);
  expect_same_result(run(c, 2), one);
  expect_same_result(run(c, 3), one);
}

TEST_CASE("attention: errors", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const Tensor q = host_zeros({2, 3, 8}, DType::f32), k = host_zeros({2, 5, 8}, DType::f32), flat = host_zeros({3, 8}, DType::f32);
  const Tensor narrow = host_zeros({2, 5, 6}, DType::f32), doubles = host_zeros({2, 5, 8}, DType::f64);
  const Tensor groups = host_zeros({3}, DType::i64), long_groups = host_zeros({5}, DType::i64), float_groups = host_zeros({3}, DType::f32);
  Tensor out = host_zeros({2, 3, 8}, DType::f32), lse = host_zeros({2, 4, 3}, DType::f32), bad = host_zeros({2, 3, 7}, DType::f32);
  const auto forward = [&](const Tensor& q_, const Tensor& k_, const Tensor& v_, std::int64_t heads, const Tensor* groups_, Tensor& out_,
                           Tensor& lse_, const std::string& text) {
    expect_throws<InvalidArgument>([&] { attention_forward(stream, q_, k_, v_, heads, groups_, out_, lse_); }, text);
  };
  forward(flat, k, k, 4, nullptr, out, lse, "attention: q must be (N, Tq, A d), got f32(3, 8)");
  forward(q, k, k, 0, nullptr, out, lse, "attention: heads must be >= 1, got 0");
  forward(q, k, k, 3, nullptr, out, lse, "attention: the width of q must be a multiple of 3 heads");
  forward(q, flat, k, 4, nullptr, out, lse, "attention: k must be (N, Tk, A d), got f32(3, 8)");
  forward(q, narrow, k, 4, nullptr, out, lse, "attention: k must be f32(2, 5, 8), got f32(2, 5, 6)");
  forward(q, k, doubles, 4, nullptr, out, lse, "attention: v must be f32(2, 5, 8), got f64(2, 5, 8)");
  forward(q, k, k, 4, &groups, out, lse, "attention: with groups Tk must be Tq = 3, got 5");
  forward(q, q, q, 4, &long_groups, out, lse, "attention: groups must be i64(3), got i64(5)");
  forward(q, q, q, 4, &float_groups, out, lse, "attention: groups must be i64(3), got f32(3)");
  forward(q, k, k, 4, nullptr, bad, lse, "attention: out must be");
  forward(q, k, k, 4, nullptr, out, bad, "attention: lse must be f32(2, 4, 3)");
  const Tensor integers = host_zeros({2, 3, 8}, DType::i64);
  Tensor integer_out = host_zeros({2, 3, 8}, DType::i64), integer_lse = host_zeros({2, 4, 3}, DType::i64);
  forward(integers, integers, integers, 4, nullptr, integer_out, integer_lse, "attention: the CPU computes in f32 and f64, got i64");

  const auto backward = [&](const Tensor& dout, const Tensor& out_, const Tensor& lse_, Tensor* dq, Tensor* dk, Tensor* dv,
                            const std::string& text) {
    expect_throws<InvalidArgument>([&] { attention_backward(stream, dout, q, k, k, out_, lse_, 4, nullptr, dq, dk, dv); }, text);
  };
  backward(bad, out, lse, nullptr, nullptr, nullptr, "attention: dout must be");
  backward(out, bad, lse, nullptr, nullptr, nullptr, "attention: out must be");
  backward(out, out, bad, nullptr, nullptr, nullptr, "attention: lse must be");
  backward(out, out, lse, &bad, nullptr, nullptr, "attention: dq must be f32(2, 3, 8)");
  backward(out, out, lse, nullptr, &bad, nullptr, "attention: dk must be f32(2, 5, 8)");
  backward(out, out, lse, nullptr, nullptr, &bad, "attention: dv must be f32(2, 5, 8)");
}

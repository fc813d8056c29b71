#include "kernels/assignment.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "tests/gpu.h"
#include "tests/kernels/values.h"
#include "tests/small.h"

using namespace detr;
using namespace detr::test;
using kernels::assign;
using kernels::match_cost;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Images with `tokens` queries, of which those from `begin` on are priced, and up to `capacity` true boxes. Host tensors in f64.
struct Prices {
  std::int64_t begin;
  Tensor logits, boxes, labels, truth, counts;
  kernels::MatchCostOptions options;

  Prices(std::int64_t images, std::int64_t begin_, std::int64_t queries, std::int64_t classes, std::int64_t capacity)
      : begin(begin_),
        logits(random({images, begin_ + queries, classes}, DType::f64, 1)),
        boxes(random({images, begin_ + queries, 4}, DType::f64, 2)),
        labels(host_zeros({images, capacity}, DType::i64)),
        truth(random({images, capacity, 4}, DType::f64, 3)),
        counts(host_zeros({images}, DType::i64)) {
    for (double& x : logits.span<double>()) x *= 6;
    for (Tensor* sides : {&boxes, &truth}) {
      for (double& x : sides->span<double>()) x = 0.5 + 0.4 * x;   // no side is shorter than 0.1
    }
    for (std::int64_t i = 0; i < labels.numel(); ++i) labels.data<std::int64_t>()[i] = (i * 7 + 2) % classes;
    for (std::int64_t n = 0; n < images; ++n) counts.data<std::int64_t>()[n] = n == 0 ? capacity : n * 5 % (capacity + 1);
  }
  Shape cost_shape() const { return {labels.dim(0), labels.dim(1), logits.dim(1) - begin}; }

  /// The oracle's cost for logits of a dtype; what it leaves unwritten is NaN.
  Tensor expected(DType dtype) const {
    Tensor cost = poisoned(cost_shape(), DType::f64);
    match_cost(Stream::cpu(2), rounded(logits, dtype), rounded(boxes, DType::f32), begin, labels, rounded(truth, DType::f32), counts, options, cost);
    return cost;
  }
  /// The GPU's; what it leaves unwritten is NaN.
  Tensor on_device(DType dtype) const {
    Guarded cost(cost_shape(), DType::f32);
    match_cost(gpu(), on_gpu(logits, dtype), on_gpu(boxes, DType::f32), begin, on_gpu(labels, DType::i64), on_gpu(truth, DType::f32),
               on_gpu(counts, DType::i64), options, cost.tensor);
    return cost.values();
  }
};

/// A side of 0.1 from corners near 1 has lost a factor of 10, an area and a quotient of areas some more; with weights and some ten
/// operations that is 200 roundings of the largest cost.
void expect_prices(const Prices& prices) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    INFO(name_of(dtype) << " " << prices.cost_shape());
    const Tensor got = prices.on_device(dtype);
    expect_near(got, prices.expected(dtype), 200 * roundoff(DType::f32));
    expect_same_bits(prices.on_device(dtype), got);
  }
}

/// Cost of true box g for query q in image n.
using CostOf = std::function<double(std::int64_t n, std::int64_t g, std::int64_t q)>;

/// Costs as match_cost lays them out; rows beyond an image's count are NaN, which must not be looked at.
Tensor cost_tensor(std::int64_t capacity, std::int64_t queries, const std::vector<std::int64_t>& counts, const CostOf& cost_of) {
  Tensor cost = poisoned({std::ssize(counts), capacity, queries}, DType::f32);
  for (std::int64_t n = 0; n < std::ssize(counts); ++n) {
    for (std::int64_t g = 0; g < counts[static_cast<std::size_t>(n)]; ++g) {
      for (std::int64_t q = 0; q < queries; ++q) {
        cost.data<float>()[(n * capacity + g) * queries + q] = static_cast<float>(cost_of(n, g, q));
      }
    }
  }
  return cost;
}

/// Guarded i64 memory whose values are not -1, which is a result.
Guarded filled(const Shape& shape) {
  Guarded result(shape, DType::i64);
  Tensor host = host_zeros(shape, DType::i64);
  std::ranges::fill(host.span<std::int64_t>(), 12345);
  gpu().copy(host, result.tensor);
  gpu().wait();
  return result;
}

struct Solution {
  Tensor match, status;
};
Solution solve(const Tensor& cost, const std::vector<std::int64_t>& counts) {
  Guarded match = filled({cost.dim(0), cost.dim(2)}), status = filled({cost.dim(0)});
  assign(gpu(), on_gpu(cost, DType::f32), on_gpu(host_tensor<std::int64_t>({cost.dim(0)}, counts), DType::i64), match.tensor, status.tensor);
  return {match.values(), status.values()};
}

/// The GPU's matching is the CPU's, index by index.
void expect_matching(std::int64_t capacity, std::int64_t queries, const std::vector<std::int64_t>& counts, const CostOf& cost_of) {
  INFO(queries << " queries, " << capacity << " boxes");
  const Tensor cost = cost_tensor(capacity, queries, counts, cost_of);
  Tensor match = host_zeros({cost.dim(0), queries}, DType::i64), status = host_zeros({cost.dim(0)}, DType::i64);
  assign(Stream::cpu(2), cost, host_tensor<std::int64_t>({cost.dim(0)}, counts), match, status);
  const Solution got = solve(cost, counts);
  expect_same_bits(got.match, match);
  expect_same_bits(got.status, status);
}

double drawn(std::int64_t n, std::int64_t g, std::int64_t q) {
  return normal(RandomKey(9).fold(static_cast<std::uint64_t>(n)), static_cast<std::uint64_t>(g * 10000 + q));
}

/// Costs without ties, with few, with many, with nothing else, and such that all boxes want the same queries.
const std::vector<CostOf> kKinds = {
    drawn,
    [](std::int64_t n, std::int64_t g, std::int64_t q) { return std::round(10 * drawn(n, g, q)); },
    [](std::int64_t n, std::int64_t g, std::int64_t q) {
      return std::floor(4 * uniform(RandomKey(static_cast<std::uint64_t>(n)), static_cast<std::uint64_t>(g * 10000 + q)));
    },
    [](std::int64_t, std::int64_t, std::int64_t) { return -1.5; },
    [](std::int64_t n, std::int64_t g, std::int64_t q) { return 0.01 * static_cast<double>(q * (g % 5)) + 0.001 * drawn(n, g, q); },
};

}  // namespace

TEST_CASE("match_cost: CUDA agrees with the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const std::int64_t queries : {0, 1, 31, 33}) {
    for (const std::int64_t capacity : {0, 1, 33}) {
      for (const std::int64_t classes : {1, 3, 365}) expect_prices(Prices(2, 3, queries, classes, capacity));
    }
  }
  expect_prices(Prices(0, 0, 5, 3, 2));
  expect_prices(Prices(4, 200, 300, 80, 20));
  Prices general(2, 0, 33, 3, 5);
  general.options = {1, 2, 3, 0.4, 1.5};
  expect_prices(general);
}

TEST_CASE("match_cost: on CUDA a label out of range spoils its row alone", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  Prices prices(1, 0, 40, 3, 4);
  const Tensor wanted = prices.on_device(DType::f32);
  std::fill_n(wanted.data<double>() + 40, 80, kNan);
  prices.labels.data<std::int64_t>()[1] = 3;
  prices.labels.data<std::int64_t>()[2] = -1;
  expect_near(prices.on_device(DType::f32), wanted, 0);
}

TEST_CASE("assign: CUDA gives the CPU's matching, ties included", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const CostOf& kind : kKinds) {
    for (const std::int64_t queries : {0, 1, 2, 31, 33, 64}) {
      for (const std::int64_t boxes : {0, 1, 7, 31, 33}) expect_matching(boxes + 1, queries, {boxes, boxes / 2, boxes + 1}, kind);
    }
    expect_matching(20, 320, {20}, kind);     // as many as registers hold
    expect_matching(20, 321, {20}, kind);     // one more
    expect_matching(3, 6000, {3, 2}, kind);   // more than shared memory holds
    if (small_tests()) continue;
    expect_matching(100, 300, {100, 0, 7, 60}, kind);   // a step
    expect_matching(330, 300, {330, 300, 299, 320}, kind);
    expect_matching(90, 900, {90, 31}, kind);
  }
  expect_matching(4, 5, {}, kKinds[0]);
  expect_matching(24, 300, std::vector<std::int64_t>(130, 7), kKinds[0]);
}

TEST_CASE("assign: on CUDA an image with a cost that is not finite is left unmatched, the others are not", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const float inf = std::numeric_limits<float>::infinity();
  for (const std::int64_t queries : {4, 300, 330}) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), inf, -inf}) {
      const std::vector<std::int64_t> counts = {5, 6, 5};
      const Tensor cost = cost_tensor(6, queries, counts, kKinds[0]);
      const std::int64_t image = 6 * queries;
      cost.data<float>()[image + 5 * queries + 1] = bad;
      cost.data<float>()[image + 6 * queries - 1] = bad;
      cost.data<float>()[2 * image + 5 * queries] = bad;   // beyond the count
      const Solution got = solve(cost, counts);
      CHECK(values_of(got.status) == std::vector<double>{-1, static_cast<double>(5 * queries + 1), -1});
      const auto match = got.match.span<std::int64_t>();
      const auto matched = [&](std::int64_t n) { return queries - std::count(match.begin() + n * queries, match.begin() + (n + 1) * queries, -1); };
      CHECK(matched(0) == std::min<std::int64_t>(queries, 5));
      CHECK(matched(1) == 0);
      CHECK(matched(2) == std::min<std::int64_t>(queries, 5));
    }
  }
}

TEST_CASE("assign: on CUDA costs of any size and counts out of range do no harm", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const CostOf wild = [](std::int64_t, std::int64_t g, std::int64_t q) {
    return ((q + g) % 2 ? 1 : -1) * std::pow(10.0, static_cast<double>((q * 7 + g * 3) % 76 - 38));
  };
  expect_matching(45, 60, {45}, wild);
  const Tensor cost = cost_tensor(3, 5, {3, 3}, kKinds[0]);
  const Solution clamped = solve(cost, {-1, 99}), wanted = solve(cost, {0, 3});
  expect_same_bits(clamped.match, wanted.match);
  expect_same_bits(clamped.status, wanted.status);
  Guarded match({1, 1}, DType::i64), status({1}, DType::i64);
  expect_throws<InvalidArgument>(
      [&] { assign(gpu(), gpu().zeros({1, 65535, 1}, DType::f32), gpu().zeros({1}, DType::i64), match.tensor, status.tensor); }, "at most 65534");
}

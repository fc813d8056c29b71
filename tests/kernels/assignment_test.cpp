#include "kernels/assignment.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "runtime/random.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;
using kernels::assign;
using kernels::expect_finite_costs;
using kernels::match_cost;

namespace {

using CostOf = std::function<double(std::int64_t q, std::int64_t g)>;

/// The cost of one image as match_cost lays it out, with one row of padding that must not be read.
Tensor cost_tensor(std::int64_t queries, std::int64_t boxes, DType dtype, const CostOf& cost_of) {
  Tensor cost = host_zeros({1, boxes + 1, queries}, dtype);
  for (std::int64_t g = 0; g <= boxes; ++g) {
    for (std::int64_t q = 0; q < queries; ++q) {
      const double value = g < boxes ? cost_of(q, g) : std::numeric_limits<double>::quiet_NaN();
      if (dtype == DType::f32) {
        cost.data<float>()[g * queries + q] = static_cast<float>(value);
      } else {
        cost.data<double>()[g * queries + q] = value;
      }
    }
  }
  return cost;
}

std::vector<std::int64_t> solve(std::int64_t queries, std::int64_t boxes, DType dtype, const CostOf& cost_of) {
  const Tensor cost = cost_tensor(queries, boxes, dtype, cost_of);
  Tensor match = host_zeros({1, queries}, DType::i64), status = host_zeros({1}, DType::i64);
  assign(Stream::cpu(1), cost, host_tensor<std::int64_t>({1}, {boxes}), match, status);
  CHECK(status.data<std::int64_t>()[0] == -1);
  const auto values = match.span<std::int64_t>();
  return {values.begin(), values.end()};
}

/// Integers with many ties, the fewer the larger the modulus.
CostOf tied(std::int64_t modulus) {
  return [modulus](std::int64_t q, std::int64_t g) { return static_cast<double>((q * 37 + g * 101 + q * g * 13) % modulus); };
}

/// FNV-1a over the entries plus one.
std::uint64_t hash_of(const std::vector<std::int64_t>& match) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const std::int64_t entry : match) hash = (hash ^ static_cast<std::uint64_t>(entry + 1)) * 0x100000001b3U;
  return hash;
}

/// Least cost over all ways to give min(queries, boxes) pairs, by trying all.
double least_cost(std::int64_t queries, std::int64_t boxes, const CostOf& cost_of) {
  const std::int64_t rows = std::min(queries, boxes), columns = std::max(queries, boxes);
  std::vector<std::int64_t> order(static_cast<std::size_t>(columns));
  std::iota(order.begin(), order.end(), 0);
  double least = std::numeric_limits<double>::infinity();
  do {
    double sum = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t column = order[static_cast<std::size_t>(row)];
      sum += boxes < queries ? cost_of(column, row) : cost_of(row, column);
    }
    least = std::min(least, sum);
  } while (std::next_permutation(order.begin(), order.end()));
  return least;
}

/// A layer with one image, two classes and three queries, the first of which is not priced.
struct Prices {
  Tensor logits, boxes, labels, truth, counts, cost;
  std::int64_t begin = 1;
  kernels::MatchCostOptions options;

  template <class T>
  static Prices of() {
    Prices p;
    const T x = static_cast<T>(std::log(0.3 / 0.7));
    p.logits = host_tensor<T>({1, 3, 2}, {9, 9, -5, x, x, 200});
    p.boxes = host_tensor<T>({1, 3, 4}, std::vector<T>{0, 0, 1, 1, T(.5), T(.5), T(.4), T(.4), T(.6), T(.5), T(.4), T(.2)});
    p.labels = host_tensor<std::int64_t>({1, 3}, {1, 0, 99});
    p.truth = host_tensor<T>({1, 3, 4}, std::vector<T>{T(.6), T(.5), T(.4), T(.2), T(.5), T(.5), T(.4), T(.4), 0, 0, 0, 0});
    p.counts = host_tensor<std::int64_t>({1}, {2});
    p.cost = host_tensor<T>({1, 3, 2}, {7, 7, 7, 7, 7, 7});
    return p;
  }
  void run() { match_cost(Stream::cpu(2), logits, boxes, begin, labels, truth, counts, options, cost); }
};

}  // namespace

TEST_CASE("match_cost: values worked by hand", "[cpu]") {
  const auto check = [](auto zero) {
    using T = decltype(zero);
    Prices p = Prices::of<T>();
    p.run();
    const T* cost = p.cost.template data<T>();
    expect_close(static_cast<double>(cost[0]), 1.2801555, 1e-6);                          // p 0.3, L1 0.3, GIoU 0.2333333
    expect_close(static_cast<double>(cost[3]), 1.2801555, 1e-6);                          // the same pair the other way round
    expect_close(static_cast<double>(cost[1]), 2 * 0.75 * std::log(1e-8) - 2, 1e-6);      // p 1, the box itself: capped by 1e-8
    const double q = 1 / (1 + std::exp(5.0));
    expect_close(static_cast<double>(cost[2]), 2 * (.25 * (1 - q) * (1 - q) * -std::log(q) + .75 * q * q * std::log(1 - q)) - 2, 1e-5);
    CHECK(cost[4] == 7);   // beyond the count: not written
    CHECK(cost[5] == 7);
  };
  check(0.0F);
  check(0.0);
}

TEST_CASE("match_cost: weights and a general gamma", "[cpu]") {
  Prices p = Prices::of<double>();
  p.options = {1, 0, 0, 0.4, 1.5};
  p.run();
  const double wanted = .4 * std::pow(.7, 1.5) * -std::log(.3) - .6 * std::pow(.3, 1.5) * -std::log(.7);
  expect_close(p.cost.data<double>()[0], wanted, 1e-7);
  p.options = {0, 3, 0, 0.25, 2};
  p.run();
  expect_close(p.cost.data<double>()[0], 0.9, 1e-12);
  p.options = {0, 0, 3, 0.25, 2};
  p.run();
  expect_close(p.cost.data<double>()[0], -0.7, 1e-12);
}

TEST_CASE("match_cost: boxes without area have a finite cost", "[cpu]") {
  Prices p = Prices::of<float>();
  p.options = {0, 0, 1, 0.25, 2};
  p.boxes = host_tensor<float>({1, 3, 4}, {0, 0, 0, 0, 0.5F, 0.5F, 0, 0, 0.6F, 0.5F, -0.2F, 0.1F});
  p.truth = host_tensor<float>({1, 3, 4}, {0.5F, 0.5F, 0, 0, 0.5F, 0.5F, 0.4F, 0.4F, 0, 0, 0, 0});
  p.run();
  const float* cost = p.cost.data<float>();
  CHECK(cost[0] == 0);   // two equal points: no enclosing area, GIoU = IoU = 0
  CHECK(cost[2] == 0);   // a point inside a box: the box is all of the enclosing area
  for (int i = 0; i < 4; ++i) CHECK(std::isfinite(cost[i]));
}

TEST_CASE("match_cost: errors", "[cpu]") {
  const auto expect = [](const std::string& text, const std::function<void(Prices&)>& spoil) {
    Prices p = Prices::of<float>();
    spoil(p);
    expect_throws<InvalidArgument>([&] { p.run(); }, text);
  };
  expect("match_cost: logits must be (N, T, C)", [](Prices& p) { p.logits = host_zeros({3, 2}, DType::f32); });
  expect("match_cost: boxes", [](Prices& p) { p.boxes = host_zeros({1, 2, 4}, DType::f32); });
  expect("match_cost: labels must be (N, Gcap)", [](Prices& p) { p.labels = host_zeros({3}, DType::i64); });
  expect("match_cost: labels", [](Prices& p) { p.labels = host_zeros({2, 3}, DType::i64); });
  expect("match_cost: truth", [](Prices& p) { p.truth = host_zeros({1, 3, 4}, DType::f64); });
  expect("match_cost: counts", [](Prices& p) { p.counts = host_zeros({2}, DType::i64); });
  expect("match_cost: cost must be (N, Gcap, Q)", [](Prices& p) { p.cost = host_zeros({3, 2}, DType::f32); });
  expect("match_cost: cost", [](Prices& p) { p.cost = host_zeros({1, 2, 2}, DType::f32); });
  expect("queries [2, 4) do not lie in the 3", [](Prices& p) { p.begin = 2; });
  expect("queries [-1, 1) do not lie in the 3", [](Prices& p) { p.begin = -1; });
  expect("counts[0] must be in [0, 3], got 4", [](Prices& p) { p.counts = host_tensor<std::int64_t>({1}, {4}); });
  expect("labels[0, 1] must be in [0, 2), got 2", [](Prices& p) { p.labels = host_tensor<std::int64_t>({1, 3}, {0, 2, 0}); });
  expect("labels[0, 0] must be in [0, 2), got -1", [](Prices& p) { p.labels = host_tensor<std::int64_t>({1, 3}, {-1, 1, 0}); });
}

TEST_CASE("assign: index by index what SciPy returns, ties included", "[cpu]") {
  // Recorded from scipy.optimize.linear_sum_assignment 1.17.1; modulus 1 is the constant matrix.
  struct Case {
    std::int64_t queries, boxes, modulus;
    std::vector<std::int64_t> match;
  };
  const std::vector<Case> cases = {
      {7, 3, 1, {0, 1, 2, -1, -1, -1, -1}},         {3, 7, 1, {0, 1, 2}},
      {4, 4, 1, {0, 1, 2, 3}},                      {7, 3, 3, {0, 2, 1, -1, -1, -1, -1}},
      {3, 7, 3, {0, 1, 4}},                         {5, 5, 2, {0, 1, 2, 3, 4}},
      {9, 4, 2, {0, 1, 2, 3, -1, -1, -1, -1, -1}},  {4, 9, 2, {0, 1, 2, 3}},
      {6, 6, 5, {0, 2, 3, 1, 4, 5}},
  };
  for (const Case& c : cases) {
    INFO(c.queries << " x " << c.boxes << " modulo " << c.modulus);
    CHECK(solve(c.queries, c.boxes, DType::f64, tied(c.modulus)) == c.match);
    CHECK(solve(c.queries, c.boxes, DType::f32, tied(c.modulus)) == c.match);
  }
  const double duplicated[5][3] = {{1, 2, 3}, {1, 2, 3}, {0, 5, 1}, {1, 2, 3}, {0, 5, 1}};
  CHECK(solve(5, 3, DType::f64, [&](std::int64_t q, std::int64_t g) { return duplicated[q][g]; }) ==
        std::vector<std::int64_t>{1, -1, 0, -1, 2});
}

TEST_CASE("assign: SciPy's matching at the sizes of a step, by its hash", "[cpu]") {
  struct Case {
    std::int64_t queries, boxes, modulus;
    std::uint64_t hash;
  };
  for (const Case& c : {Case{300, 100, 7, 0xbd7a213af38f7b97U}, Case{300, 320, 7, 0xf9637abee8b17017U},
                        Case{300, 300, 3, 0x623bda88217a633dU}, Case{300, 100, 9973, 0xc524ed9d808a9cebU},
                        Case{300, 320, 9973, 0x4dabee0289609c00U}, Case{320, 300, 2, 0x97a666ea56311165U}}) {
    INFO(c.queries << " x " << c.boxes << " modulo " << c.modulus);
    CHECK(hash_of(solve(c.queries, c.boxes, DType::f32, tied(c.modulus))) == c.hash);
  }
}

TEST_CASE("assign: optimal and one-to-one, against all permutations", "[cpu]") {
  for (std::int64_t queries = 1; queries <= 5; ++queries) {
    for (std::int64_t boxes = 1; boxes <= 5; ++boxes) {
      for (const bool ties : {false, true}) {
        const RandomKey key = RandomKey(3).fold(static_cast<std::uint64_t>(queries * 100 + boxes * 10 + ties));
        const CostOf cost_of = [&](std::int64_t q, std::int64_t g) {
          const double value = normal(key, static_cast<std::uint64_t>(q * boxes + g));
          return ties ? std::round(value) : value;
        };
        const std::vector<std::int64_t> match = solve(queries, boxes, DType::f64, cost_of);
        std::vector<int> taken(static_cast<std::size_t>(boxes), 0);
        double sum = 0;
        for (std::int64_t q = 0; q < queries; ++q) {
          const std::int64_t g = match[static_cast<std::size_t>(q)];
          REQUIRE(g >= -1);
          REQUIRE(g < boxes);
          if (g < 0) continue;
          sum += cost_of(q, g);
          ++taken[static_cast<std::size_t>(g)];
        }
        INFO(queries << " x " << boxes << (ties ? " with ties" : ""));
        CHECK(std::accumulate(taken.begin(), taken.end(), 0) == std::min(queries, boxes));
        CHECK(*std::max_element(taken.begin(), taken.end()) == 1);
        expect_close(sum, least_cost(queries, boxes, cost_of), 1e-12, 1e-12);
      }
    }
  }
}

TEST_CASE("assign: no boxes, one box, one query, no queries, no images", "[cpu]") {
  const CostOf falling = [](std::int64_t q, std::int64_t g) { return -static_cast<double>(q + 10 * g); };
  CHECK(solve(3, 0, DType::f32, falling) == std::vector<std::int64_t>{-1, -1, -1});
  CHECK(solve(3, 1, DType::f32, falling) == std::vector<std::int64_t>{-1, -1, 0});
  CHECK(solve(1, 3, DType::f32, falling) == std::vector<std::int64_t>{2});
  CHECK(solve(1, 1, DType::f32, falling) == std::vector<std::int64_t>{0});
  CHECK(solve(0, 2, DType::f32, falling).empty());
  Tensor match = host_zeros({0, 5}, DType::i64), status = host_zeros({0}, DType::i64);
  assign(Stream::cpu(1), host_zeros({0, 2, 5}, DType::f32), host_zeros({0}, DType::i64), match, status);
  CHECK(match.numel() == 0);
}

TEST_CASE("assign: an image with a cost that is not finite is left unmatched, the others are not", "[cpu]") {
  const double inf = std::numeric_limits<double>::infinity();
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), inf, -inf, 1e305}) {
    Tensor cost = host_zeros({3, 2, 4}, DType::f64), match = host_zeros({3, 4}, DType::i64), status = host_zeros({3}, DType::i64);
    cost.data<double>()[8 + 6] = bad;    // image 1, box 1, query 2
    cost.data<double>()[8 + 7] = bad;
    cost.data<double>()[16 + 4] = bad;   // image 2 has one box: not looked at
    assign(Stream::cpu(2), cost, host_tensor<std::int64_t>({3}, {2, 2, 1}), match, status);
    CHECK(values_of(status) == std::vector<double>{-1, 6, -1});
    CHECK(values_of(match) == std::vector<double>{0, 1, -1, -1, -1, -1, -1, -1, 0, -1, -1, -1});
    expect_throws<Diverged>([&] { expect_finite_costs(status, 4); },
                            "matching: image 1 of the batch: the cost of query 2 for true box 1 is not finite");
  }
  expect_finite_costs(host_tensor<std::int64_t>({2}, {-1, -1}), 4);
}

TEST_CASE("assign: costs of very different size terminate", "[cpu]") {
  const CostOf wild = [](std::int64_t q, std::int64_t g) {
    const double size = std::pow(10.0, static_cast<double>((q * 7 + g * 3) % 600 - 300));
    return (q + g) % 2 ? size : -size;
  };
  const std::vector<std::int64_t> match = solve(60, 45, DType::f64, wild);
  CHECK(std::count(match.begin(), match.end(), -1) == 15);
}

TEST_CASE("assign: no thread count changes the result", "[cpu]") {
  const std::int64_t images = 37, capacity = 9, queries = 20;
  Tensor cost = host_zeros({images, capacity, queries}, DType::f32), counts = host_zeros({images}, DType::i64);
  for (std::size_t i = 0; float& value : cost.span<float>()) value = static_cast<float>(normal(RandomKey(5), i++));
  for (std::int64_t n = 0; n < images; ++n) counts.data<std::int64_t>()[n] = n % (capacity + 1);
  Tensor match = host_zeros({images, queries}, DType::i64), status = host_zeros({images}, DType::i64);
  assign(Stream::cpu(1), cost, counts, match, status);
  for (const int threads : {2, 3}) {
    Tensor again = host_zeros({images, queries}, DType::i64), again_status = host_zeros({images}, DType::i64);
    assign(Stream::cpu(threads), cost, counts, again, again_status);
    expect_same_bits(again, match);
    expect_same_bits(again_status, status);
  }
}

TEST_CASE("assign: errors", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const Tensor cost = host_zeros({2, 3, 4}, DType::f32), counts = host_zeros({2}, DType::i64);
  Tensor match = host_zeros({2, 4}, DType::i64), status = host_zeros({2}, DType::i64), bad = host_zeros({3}, DType::i64);
  expect_throws<InvalidArgument>([&] { assign(stream, host_zeros({3, 4}, DType::f32), counts, match, status); },
                                 "assign: cost must be (N, Gcap, Q)");
  expect_throws<InvalidArgument>([&] { assign(stream, cost, bad, match, status); }, "assign: counts");
  expect_throws<InvalidArgument>([&] { assign(stream, cost, counts, bad, status); }, "assign: match");
  expect_throws<InvalidArgument>([&] { assign(stream, cost, counts, match, bad); }, "assign: status");
  expect_throws<InvalidArgument>([&] { assign(stream, host_zeros({2, 3, 4}, DType::i64), counts, match, status); }, "f32 and f64");
  expect_throws<InvalidArgument>([&] { assign(stream, cost, host_tensor<std::int64_t>({2}, {0, 4}), match, status); },
                                 "assign: counts[1] must be in [0, 3], got 4");
  expect_throws<InvalidArgument>([&] { expect_finite_costs(cost, 4); }, "status must be i64 (N)");
  expect_throws<InvalidArgument>([&] { expect_finite_costs(host_tensor<std::int64_t>({1}, {3}), 0); }, "queries must be >= 1");
}

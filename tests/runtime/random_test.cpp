#include "runtime/random.h"

#include <cmath>
#include <set>
#include <vector>

#include "tests/support.h"

using namespace detr;
using namespace detr::test;

TEST_CASE("random: Philox 4x32-10 known answers", "[cpu]") {
  // Counter and key 0: Salmon et al., Random123, kat_vectors. Ours counts in the two low words of the counter.
  using Words = std::array<std::uint32_t, 4>;
  CHECK(philox(RandomKey(0), 0) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(random_bits(RandomKey(0), 0) == 0xe169c58d6627e8d5ULL);
}

TEST_CASE("random: one bit of key or counter changes about half of the output", "[cpu]") {
  const auto distance = [](const std::array<std::uint32_t, 4>& a, const std::array<std::uint32_t, 4>& b) {
    int bits = 0;
    for (std::size_t i = 0; i < 4; ++i) bits += __builtin_popcount(a[i] ^ b[i]);
    return bits;
  };
  const auto base = philox(RandomKey(0x123456789abcdefULL), 0xfedcba987654321ULL);
  for (int bit = 0; bit < 64; ++bit) {
    CAPTURE(bit);
    const std::uint64_t flip = std::uint64_t{1} << bit;
    for (const int changed : {distance(base, philox(RandomKey(0x123456789abcdefULL ^ flip), 0xfedcba987654321ULL)),
                             distance(base, philox(RandomKey(0x123456789abcdefULL), 0xfedcba987654321ULL ^ flip))}) {
      CHECK(changed > 34);   // 64 +- 5.3 standard deviations
      CHECK(changed < 94);
    }
  }
}

TEST_CASE("random: uniform numbers", "[cpu]") {
  const RandomKey key(7);
  const int n = 20000;
  std::vector<int> bins(20, 0), dice(6, 0);
  double sum = 0, squares = 0, normals = 0, normal_squares = 0;
  for (std::uint64_t i = 0; i < n; ++i) {
    const double u = uniform(key, i);
    REQUIRE((u >= 0 && u < 1));
    REQUIRE(std::ldexp(u, 53) == std::floor(std::ldexp(u, 53)));
    ++bins[static_cast<std::size_t>(u * 20)];
    sum += u;
    squares += u * u;
    const std::int64_t d = uniform_int(key.fold(1), i, 6);
    REQUIRE((d >= 0 && d < 6));
    ++dice[static_cast<std::size_t>(d)];
    const double z = normal(key.fold(2), i);
    REQUIRE(std::isfinite(z));
    normals += z;
    normal_squares += z * z;
  }
  expect_close(sum / n, 0.5, 0, 0.01);
  expect_close(squares / n, 1.0 / 3, 0, 0.01);
  expect_close(normals / n, 0, 0, 0.03);
  expect_close(normal_squares / n, 1, 0, 0.05);
  for (const int count : bins) CHECK(std::abs(count - n / 20) < 160);   // 5 standard deviations
  for (const int count : dice) CHECK(std::abs(count - n / 6) < 270);
  CHECK(uniform_int(key, 3, 1) == 0);
  CHECK(uniform_int(key, 3, std::int64_t{1} << 62) >= 0);
  expect_throws<InvalidArgument>([&] { uniform_int(key, 0, 0); }, "uniform_int: bound must be >= 1, got 0");
}

TEST_CASE("random: keys", "[cpu]") {
  const RandomKey key(3);
  CHECK(key.fold(1).fold(2).value != key.fold(2).fold(1).value);
  CHECK(key.fold(1).value == RandomKey(3).fold(1).value);
  CHECK(key.fold(0).value != key.value);
  std::set<std::uint64_t> values;
  for (std::uint64_t a = 0; a < 30; ++a)
    for (std::uint64_t b = 0; b < 30; ++b) values.insert(RandomKey(a).fold(b).value);
  CHECK(values.size() == 900);
}

TEST_CASE("random: a sequence reads a key's draws in order", "[cpu]") {
  const RandomKey key(11);
  RandomSequence sequence(key);
  CHECK(sequence.uniform() == uniform(key, 0));
  CHECK(sequence.uniform(2, 4) == 2 + 2 * uniform(key, 1));
  CHECK(sequence.uniform_int(9) == uniform_int(key, 2, 9));
  CHECK(sequence.normal() == normal(key, 3));
}

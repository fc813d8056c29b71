#include "runtime/random.h"

#include <cmath>
#include <numbers>

#include "runtime/error.h"

namespace detr {
namespace {
__extension__ using Wide = unsigned __int128;
}  // namespace

RandomKey RandomKey::fold(std::uint64_t coordinate) const {
  // The finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection of the 64 bits.
  std::uint64_t z = value * 0xD1342543DE82EF95ULL + coordinate + 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return RandomKey(z ^ (z >> 31));
}

std::array<std::uint32_t, 4> philox(RandomKey key, std::uint64_t counter) {
  std::uint32_t k0 = static_cast<std::uint32_t>(key.value), k1 = static_cast<std::uint32_t>(key.value >> 32);
  std::array<std::uint32_t, 4> c = {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 0, 0};
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * c[0], b = std::uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(a)};
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c;
}

std::uint64_t random_bits(RandomKey key, std::uint64_t counter) {
  const auto words = philox(key, counter);
  return (std::uint64_t{words[1]} << 32) | words[0];
}

double uniform(RandomKey key, std::uint64_t counter) { return static_cast<double>(random_bits(key, counter) >> 11) * 0x1p-53; }

std::int64_t uniform_int(RandomKey key, std::uint64_t counter, std::int64_t bound) {
  DETR_CHECK(bound >= 1, "uniform_int: bound must be >= 1, got ", bound);
  return static_cast<std::int64_t>((static_cast<Wide>(random_bits(key, counter)) * static_cast<std::uint64_t>(bound)) >> 64);
}

double normal(RandomKey key, std::uint64_t counter) {
  const auto w = philox(key, counter);
  const double u = (static_cast<double>((std::uint64_t{w[1]} << 32 | w[0]) >> 11) + 1) * 0x1p-53;   // (0, 1]
  const double v = static_cast<double>((std::uint64_t{w[3]} << 32 | w[2]) >> 11) * 0x1p-53;
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
}

}  // namespace detr

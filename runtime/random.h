#pragma once
#include <array>
#include <cstdint>

namespace detr {

/// A name for a stream of random numbers: a seed with coordinates folded in, such as (seed, epoch, sample, site). Equal
/// coordinates give equal numbers on every thread, rank and device.
struct RandomKey {
  std::uint64_t value = 0;

  explicit RandomKey(std::uint64_t seed = 0) : value(seed) {}
  /// The key with one more coordinate; fold(a).fold(b) differs from fold(b).fold(a).
  RandomKey fold(std::uint64_t coordinate) const;
};

/// Four random words for a key and a counter: Philox 4x32 with ten rounds (Salmon et al. 2011, "Parallel Random Numbers:
/// As Easy as 1, 2, 3"). A pure function.
std::array<std::uint32_t, 4> philox(RandomKey key, std::uint64_t counter);

/// Draw `counter` of the key, uniform in [0, 1), a multiple of 2^-53.
double uniform(RandomKey key, std::uint64_t counter);
/// Uniform in [0, 2^64).
std::uint64_t random_bits(RandomKey key, std::uint64_t counter);
/// Uniform in [0, bound); bound >= 1.
std::int64_t uniform_int(RandomKey key, std::uint64_t counter, std::int64_t bound);
/// Standard normal (Box-Muller).
double normal(RandomKey key, std::uint64_t counter);

/// Reads a key's draws one after the other.
class RandomSequence {
 public:
  explicit RandomSequence(RandomKey key) : key_(key) {}
  double uniform() { return detr::uniform(key_, counter_++); }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  std::int64_t uniform_int(std::int64_t bound) { return detr::uniform_int(key_, counter_++, bound); }
  double normal() { return detr::normal(key_, counter_++); }

 private:
  RandomKey key_;
  std::uint64_t counter_ = 0;
};

}  // namespace detr

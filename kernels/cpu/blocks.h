#pragma once
#include <algorithm>
#include <cstdint>

namespace detr::kernels::cpu {

/// Elements that one task of a pointwise loop handles: enough to hide the cost of handing it out, small enough for the
/// second-level cache. A constant, since the blocks decide the order of sums.
inline constexpr std::int64_t kBlockElements = std::int64_t{1} << 15;

/// Rows of `width` elements that make up one such task; at least one.
inline std::int64_t rows_per_block(std::int64_t width) {
  return std::max<std::int64_t>(1, kBlockElements / std::max<std::int64_t>(1, width));
}

}  // namespace detr::kernels::cpu

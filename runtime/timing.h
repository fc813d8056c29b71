#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "runtime/error.h"

namespace detr {

/// Seconds on a clock that never jumps, from some point in the past.
inline double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Percentiles {
  double median = 0, p10 = 0, p90 = 0;
};

/// Of at least one value, each the nearest of them. Throws InvalidArgument where there is none.
inline Percentiles percentiles(std::vector<double> values) {
  DETR_CHECK(!values.empty(), "percentiles: there must be at least one value");
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) { return values[static_cast<std::size_t>(std::lround(share * static_cast<double>(values.size() - 1)))]; };
  return {at(0.5), at(0.1), at(0.9)};
}

}  // namespace detr

#pragma once
#include <string>

#include "bench/case.h"

namespace detr::bench {

/// What became of a case's results.
struct Check {
  bool ok = false;
  double max_error = -1;   ///< largest difference from the CPU among the outputs, see difference(); -1: not compared
  std::string fault;       ///< what is wrong where it is not ok
};

/// Runs the case twice at its full size, each time with inputs of its own making: equal bits and finite values, in the first and last 32 MiB of
/// each output. Then, where `oracle` is given, once at its small size on both devices: differences up to 0.02 where the case is in bf16, else
/// 1e-4, and none in integers.
Check check_case(const Case& c, const RandomPool& pool, const RandomPool* oracle);

/// ||got - wanted|| / ||wanted|| of two floating tensors of the host; of integers the share of elements that differ. Infinite where `got` has a
/// value that is not finite.
double difference(const Tensor& got, const Tensor& wanted);

/// Whether a floating tensor of the host has finite values only; true for integers.
bool all_finite(const Tensor& tensor);

}  // namespace detr::bench

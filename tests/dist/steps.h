#pragma once
#include <functional>
#include <random>
#include <vector>

#include "dist/bucketer.h"

namespace detr::dist::test {

/// Made-up training steps over a small layout of several buckets: which parameters a rank's backward reaches, in which order, and its gradients are
/// functions of (seed, step, rank).
struct Steps {
  unsigned seed = 1;
  unsigned order_seed = 1;      ///< of the order in which gradients become ready; changes no result
  double missing = 0.3;         ///< share of the parameters that a rank does not reach
  bool integers = true;         ///< gradients whose sums are exact in any order
  std::vector<int> never = {};  ///< parameters that no rank reaches

  static Layout layout();
  bool reached(std::int64_t step, int rank, int parameter) const;
  float gradient(std::int64_t step, int rank, std::int64_t element) const;
  /// One step on one rank. `before(n)` is called before the n-th gradient.
  void run(Bucketer& bucketer, const Tensor& grads, std::int64_t step, int rank, const std::function<void(std::size_t)>& before = [](std::size_t) {}) const;
};

/// The parameters that no rank used in the step that was finished last. Waits for the stream.
std::vector<int> unused_everywhere(const Bucketer& bucketer, const Stream& stream);

/// Values of one rank: small integers (their sums are exact in every dtype) or draws from [-1, 1). u8: integers alone.
Tensor values(DType dtype, std::int64_t count, int rank, bool integers);

}  // namespace detr::dist::test

#pragma once
#include <string>
#include <vector>

namespace detr {

/// Result of one op's check on this machine; `failure` is empty if it passed.
struct SelfCheck {
  std::string op, failure;
};

/// For each differentiable op whose name matches the expression (empty: all): gradients against central differences in f64, all
/// subsets of wanted gradients bit for bit, and the same bits with 1, 2 and 3 threads. Small odd shapes; a few seconds in all.
/// Throws ConfigError for a bad expression.
std::vector<SelfCheck> check_ops(const std::string& expression);

}  // namespace detr

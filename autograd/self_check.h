#pragma once
#include <string>
#include <vector>

#include "autograd/self_check_cases.h"
#include "runtime/stream.h"

namespace detr {

/// Result of one op's check on this machine; `failure` is empty if it passed.
struct SelfCheck {
  std::string op, failure;
};

/// For each differentiable op whose name matches the expression (empty: all): gradients against central differences in f64, all
/// subsets of wanted gradients bit for bit, and the same bits with 1, 2 and 3 threads. Small odd shapes; a few seconds in all.
/// Throws ConfigError for a bad expression.
std::vector<SelfCheck> check_ops(const std::string& expression);

/// The same cases on a stream, in each dtype that models compute in there (CUDA: f32 and bf16; CPU: f32); an op is named "linear, f32 on
/// cuda:0". See check_case. Throws ConfigError for a bad expression.
std::vector<SelfCheck> check_ops_on(const Stream& stream, const std::string& expression);

/// A case on a stream with activations of `dtype`: value and gradients against the CPU's in f64 from the same rounded inputs, all 2^k
/// subsets of wanted gradients, a second run, and (CUDA) a captured one with the bits of the first. Empty string, or one line naming
/// what is wrong.
std::string check_case(const Stream& stream, DType dtype, const OpCase& check);

}  // namespace detr

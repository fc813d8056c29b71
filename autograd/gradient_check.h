#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "autograd/context.h"

namespace detr {

using Inputs = std::span<const Variable>;
/// A differentiable function of some tensors.
using Op = std::function<Variable(Context& ctx, Inputs inputs)>;

/// What a gradient check found: empty `failure`, or one line naming input, element, both numbers.
struct GradientReport {
  double largest_error = 0;   ///< largest |analytic - numeric| / (atol + rtol |numeric|), in units of the tolerance
  std::string failure;
};

/// Compares the gradient of each f64 input with central differences of sum(op * r), r fixed pseudo-random numbers.
/// Inputs of other dtypes are constants. CPU only.
GradientReport check_gradients(const Op& op, const std::vector<Tensor>& inputs, double step = 1e-6, double rtol = 1e-3, double atol = 1e-5);

/// Runs backward for all 2^k subsets of wanted f64 inputs and compares each gradient with the run that wants all, bit for bit;
/// also that unwanted inputs get none. Empty string, or one line naming subset and input.
std::string check_gradient_subsets(const Op& op, const std::vector<Tensor>& inputs);

}  // namespace detr

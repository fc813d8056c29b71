#pragma once
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "autograd/gradient_check.h"

namespace detr {

/// A tensor that a case is given, and its dtype where activations are bf16 (Note [Element types]): theirs; theirs, with a gradient that
/// is wide, as for the weights of products; or wide itself. Values are f64, or i64 and u8, which stay as they are.
struct CaseTensor {
  enum class Type { like_x, weight, wide };
  CaseTensor(Tensor given, Type as = Type::like_x) : values(std::move(given)), type(as) {}
  Tensor values;
  Type type;
};

/// A small call of one differentiable op. `function` gets inputs and constants on the context's device; every run has constants of its
/// own, so that running statistics may be updated.
struct OpCase {
  std::string op;
  std::vector<CaseTensor> inputs, constants;
  std::function<Variable(Context& ctx, Inputs inputs, std::span<const Tensor> constants)> function;
  /// Whether differences of the value are the gradient. Not so for losses with constants that follow the inputs (IoU targets, weights).
  bool has_differences = true;
};

/// One case or more of every differentiable op, on small odd shapes.
std::vector<OpCase> op_cases();

}  // namespace detr

#include "autograd/context.h"

#include <algorithm>

namespace detr {

Variable Context::leaf(const Parameter& parameter) {
  return leaf(parameter, 0, parameter.shape().rank() ? parameter.shape()[0] : 1);
}

Variable Context::leaf(const Parameter& parameter, std::int64_t begin, std::int64_t end) {
  if (tape_) return tape_->leaf(parameter, begin, end);
  return Variable(rows_of(parameter.value(), begin, end));
}

Variable Context::record(const char* name, std::initializer_list<Variable> inputs, const Tensor& y, Backward backward, GradientRules rules) {
  return record(name, std::span<const Variable>(inputs.begin(), inputs.size()), y, std::move(backward), rules);
}

Variable Context::record(const char* name, std::span<const Variable> inputs, const Tensor& y, Backward backward, GradientRules rules) {
  if (after_op) after_op(name);
  const bool wanted = std::any_of(inputs.begin(), inputs.end(), [](const Variable& v) { return v.wants_grad(); });
  if (!tape_ || !wanted) return Variable(y);
  return tape_->record(name, inputs, y, std::move(backward), rules);
}

}  // namespace detr

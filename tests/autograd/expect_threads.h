#pragma once
#include "tests/autograd/expect_gradients.h"

namespace detr::test {

/// The value of `op` and its gradients (of the f64 inputs, for a gradient of ones) have the same bits on 1, 2 and 3 threads.
inline void expect_same_on_threads(const Op& op, const std::vector<Tensor>& inputs) {
  std::vector<Tensor> first;
  for (const int threads : {1, 2, 3}) {
    Tape tape;
    Context ctx(Stream::cpu(threads), &tape, true);
    std::vector<Variable> variables;
    for (const Tensor& input : inputs) variables.push_back(input.dtype() == DType::f64 ? tape.input(input) : Variable(input));
    const Variable y = op(ctx, variables);
    Tensor ones = host_zeros(y.shape(), DType::f64);
    for (double& v : ones.span<double>()) v = 1;
    tape.backward(ctx, y, ones);
    std::vector<Tensor> results = {y.value()};
    for (const Variable& v : variables)
      if (v.wants_grad()) results.push_back(tape.gradient(v));
    if (threads == 1) first = results;
    for (std::size_t i = 0; i < results.size(); ++i) {
      INFO("threads " << threads << ", result " << i);
      expect_same_bits(results[i], first[i]);
    }
  }
}

}  // namespace detr::test

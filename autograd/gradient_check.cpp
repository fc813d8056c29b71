#include "autograd/gradient_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/error.h"

namespace detr {
namespace {

/// Weights of the scalar that is differentiated: sum(op * r).
Tensor weights_like(const Tensor& y) {
  Tensor r = host_zeros(y.shape(), y.dtype());
  const auto values = r.span<double>();
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 2 * uniform(RandomKey(17), i) - 1;
  return r;
}

double project(const Op& op, const std::vector<Tensor>& inputs) {
  Context ctx(Stream::cpu(1), nullptr, true);
  std::vector<Variable> variables(inputs.begin(), inputs.end());
  const Variable result = op(ctx, variables);
  const Tensor r = weights_like(result.value());
  double sum = 0;
  for (std::int64_t i = 0; i < r.numel(); ++i) sum += result.value().data<double>()[i] * r.data<double>()[i];
  return sum;
}

/// Gradients with the inputs whose bit is set wanted; undefined elsewhere.
std::vector<Tensor> gradients(const Op& op, const std::vector<Tensor>& inputs, unsigned wanted) {
  Tape tape;
  Context ctx(Stream::cpu(1), &tape, true);
  std::vector<Variable> variables;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool want = wanted >> i & 1U && inputs[i].dtype() == DType::f64;
    variables.push_back(want ? tape.input(inputs[i]) : Variable(inputs[i]));
  }
  const Variable result = op(ctx, variables);
  std::vector<Tensor> grads(inputs.size());
  if (!result.wants_grad()) return grads;
  tape.backward(ctx, result, weights_like(result.value()));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (variables[i].wants_grad()) grads[i] = tape.gradient(variables[i]);
  }
  return grads;
}

Tensor copy_of(const Tensor& tensor) {
  Tensor copy = host_zeros(tensor.shape(), tensor.dtype());
  if (tensor.bytes()) std::memcpy(copy.raw(), tensor.raw(), static_cast<std::size_t>(tensor.bytes()));
  return copy;
}

}  // namespace

GradientReport check_gradients(const Op& op, const std::vector<Tensor>& inputs, double step, double rtol, double atol) {
  GradientReport report;
  const std::vector<Tensor> analytic = gradients(op, inputs, ~0U);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].dtype() != DType::f64) continue;
    for (std::int64_t j = 0; j < inputs[i].numel(); ++j) {
      std::vector<Tensor> moved = inputs;
      moved[i] = copy_of(inputs[i]);
      double& x = moved[i].data<double>()[j];
      const double x0 = x;
      x = x0 + step;
      const double above = project(op, moved);
      x = x0 - step;
      const double below = project(op, moved);
      const double numeric = (above - below) / (2 * step);
      const double exact = analytic[i].defined() ? analytic[i].data<double>()[j] : 0;
      const double error = std::abs(exact - numeric) / (atol + rtol * std::abs(numeric));
      if (!(error <= report.largest_error)) report.largest_error = error;
      if (!(error <= 1) && report.failure.empty())
        report.failure = concat("input ", i, ", element ", j, ": backward gives ", exact, ", differences give ", numeric);
    }
  }
  return report;
}

std::string check_gradient_subsets(const Op& op, const std::vector<Tensor>& inputs) {
  const std::vector<Tensor> full = gradients(op, inputs, ~0U);
  for (unsigned subset = 0; subset < 1U << inputs.size(); ++subset) {
    const std::vector<Tensor> part = gradients(op, inputs, subset);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const bool wanted = subset >> i & 1U && full[i].defined();
      if (part[i].defined() != wanted) return concat("subset ", subset, ": input ", i, wanted ? " got no gradient" : " got a gradient unasked");
      if (wanted && std::memcmp(part[i].raw(), full[i].raw(), static_cast<std::size_t>(full[i].bytes())) != 0)
        return concat("subset ", subset, ": the gradient of input ", i, " differs from the full run");
    }
  }
  return {};
}

}  // namespace detr

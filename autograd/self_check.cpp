#include "autograd/self_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <regex>

#include "runtime/error.h"
#include "runtime/host_value.h"

namespace detr {
namespace {

constexpr unsigned kAll = ~0U;

double rounded_value(double x, DType dtype) {
  if (dtype == DType::f64) return x;
  const auto single = static_cast<float>(x);
  return static_cast<double>(dtype == DType::bf16 ? to_float(to_bf16(single)) : single);
}

/// f64 values, rounded to `precision`, in memory of their own on the stream's device as `dtype`. i64 and u8 stay as they are.
Tensor placed(const Stream& stream, const Tensor& values, DType precision, DType dtype) {
  if (values.dtype() != DType::f64) return stream.to_device(values);
  Tensor host = host_zeros(values.shape(), dtype);
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    const double x = rounded_value(values.data<double>()[i], precision);
    switch (dtype) {
      case DType::f64: host.data<double>()[i] = x; break;
      case DType::bf16: host.data<BFloat16>()[i] = to_bf16(static_cast<float>(x)); break;
      default: host.data<float>()[i] = static_cast<float>(x); break;
    }
  }
  const Tensor there = stream.to_device(host);
  stream.wait();   // the host's memory goes
  return there;
}

std::vector<Tensor> placed(const Stream& stream, const std::vector<CaseTensor>& tensors, DType precision, DType dtype) {
  std::vector<Tensor> result;
  for (const CaseTensor& tensor : tensors) {
    const bool wide = tensor.type == CaseTensor::Type::wide;
    result.push_back(placed(stream, tensor.values, wide ? wide_dtype(precision) : precision, wide ? wide_dtype(dtype) : dtype));
  }
  return result;
}

/// A case with its tensors in place. `precision` is what they are rounded to, `dtype` what activations are stored in.
struct PlacedCase {
  const OpCase& check;
  Stream stream;
  std::vector<Tensor> inputs, constants;
  Tensor seed;   // gradient of the value; made by the first run, which tells its shape and dtype

  PlacedCase(const OpCase& what, const Stream& where, DType precision, DType dtype)
      : check(what), stream(where), inputs(placed(where, what.inputs, precision, dtype)), constants(placed(where, what.constants, precision, dtype)) {}
};

Tensor seed_values(const Shape& shape) {
  Tensor seed = host_zeros(shape, DType::f64);
  for (std::int64_t i = 0; i < seed.numel(); ++i) seed.data<double>()[i] = 2 * uniform(RandomKey(41), static_cast<std::uint64_t>(i)) - 1;
  return seed;
}

/// An input as a parameter, whose gradient is wide.
Parameter as_parameter(const Stream& stream, const Tensor& value, std::size_t index) {
  auto state = std::make_shared<Parameter::State>();
  state->name = concat("input ", index);
  state->shape = value.shape();
  state->value = value;
  state->grad = stream.empty(value.shape(), wide_dtype(value.dtype()));
  state->index = static_cast<std::int64_t>(index);
  return Parameter(std::move(state));
}

/// The value, then the gradient of each input whose bit is set, undefined for the others.
std::vector<Tensor> run(PlacedCase& placed_case, unsigned wanted) {
  Tape tape;
  Context ctx(placed_case.stream, &tape, true);
  std::vector<Variable> variables;
  std::vector<Tensor> parameter_grads(placed_case.inputs.size());
  for (std::size_t i = 0; i < placed_case.inputs.size(); ++i) {
    const Tensor& value = placed_case.inputs[i];
    if ((wanted >> i & 1U) == 0) {
      variables.emplace_back(value);
    } else if (placed_case.check.inputs[i].type == CaseTensor::Type::weight) {
      const Parameter parameter = as_parameter(placed_case.stream, value, i);
      parameter_grads[i] = parameter.grad();
      variables.push_back(ctx.leaf(parameter));
    } else {
      variables.push_back(tape.input(value));
    }
  }
  const Variable y = placed_case.check.function(ctx, variables, placed_case.constants);
  std::vector<Tensor> result = {y.value()};
  result.resize(variables.size() + 1);
  if (!y.wants_grad()) return result;
  if (!placed_case.seed.defined()) placed_case.seed = placed(placed_case.stream, seed_values(y.shape()), y.value().dtype(), y.value().dtype());
  tape.backward(ctx, y, placed_case.seed);
  for (std::size_t i = 0; i < variables.size(); ++i) {
    if (variables[i].wants_grad()) result[i + 1] = parameter_grads[i].defined() ? parameter_grads[i] : tape.gradient(variables[i]);
  }
  return result;
}

std::string name_of_result(std::size_t index) { return index == 0 ? "the value" : concat("the gradient of input ", index - 1); }

/// The bytes of each tensor; empty for undefined ones. Waits.
std::vector<std::string> bits(const Stream& stream, const std::vector<Tensor>& tensors) {
  std::vector<std::string> result;
  for (const Tensor& tensor : tensors) {
    const Tensor host = stream.to_host(tensor);
    result.emplace_back(host.defined() ? std::string(static_cast<const char*>(host.raw()), static_cast<std::size_t>(host.bytes())) : std::string());
  }
  return result;
}

/// The first tensor whose bits differ, in words, or an empty string. Gradients whose bit is not set must be undefined in `got`.
std::string compare_bits(const Stream& stream, const std::vector<Tensor>& got, const std::vector<std::string>& wanted, unsigned subset, const std::string& when) {
  const std::vector<std::string> found = bits(stream, got);
  for (std::size_t i = 0; i < found.size(); ++i) {
    const bool is_wanted = i == 0 || (subset >> (i - 1) & 1U) != 0;
    if (got[i].defined() != is_wanted) return concat(when, ": ", name_of_result(i), is_wanted ? " is missing" : " was made unasked");
    if (is_wanted && found[i] != wanted[i]) return concat(when, ": ", name_of_result(i), " has other bits than in the first run");
  }
  return {};
}

/// What a value may be off by, relative to the largest of its tensor. f32: sums of up to 72 terms and some tens of operations on terms that
/// may be a few times larger than the result, 2^-24 each. bf16: besides, what passes between the parts of an op (the sum that a layer
/// norm takes in, attention weights, the gradient before an activation, the first of two contributions) is rounded, and the result
/// too: up to four roundings of at most 2^-8 of a tensor's largest value.
double tolerance_of(DType dtype) { return 256 * std::ldexp(1.0, -24) + (dtype == DType::bf16 ? 4 * std::ldexp(1.0, -8) : 0); }

std::string compare_values(const Stream& stream, const std::vector<Tensor>& got, const std::vector<Tensor>& wanted, double tolerance) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!got[i].defined() || !wanted[i].defined()) return concat(name_of_result(i), " is missing");
    if (got[i].shape() != wanted[i].shape()) return concat(name_of_result(i), " is ", got[i], ", wanted ", wanted[i].shape());
    const Tensor host = stream.to_host(got[i]);
    double largest = 0;
    for (const double x : wanted[i].span<double>()) largest = std::max(largest, std::abs(x));
    for (std::int64_t j = 0; j < host.numel(); ++j) {
      const double x = host_value(host, j), exact = wanted[i].data<double>()[j];
      if (!(std::abs(x - exact) <= tolerance * largest)) return concat(name_of_result(i), ", element ", j, ": ", x, ", and ", exact, " by the CPU in f64; the largest is ", largest);
    }
  }
  return {};
}

/// Fills tensors that a graph is to write with bytes of ones, which are NaN, so that what it leaves alone shows. Those that share
/// memory with what the graph reads (a reshape's value) stay.
void poison(PlacedCase& placed_case, std::vector<Tensor>& tensors) {
  for (Tensor& tensor : tensors) {
    const auto shares = [&](const Tensor& other) { return other.raw() == tensor.raw(); };
    if (shares(placed_case.seed) || std::any_of(placed_case.inputs.begin(), placed_case.inputs.end(), shares)) continue;
    const Tensor ones = host_zeros(tensor.shape(), tensor.dtype());
    std::memset(ones.raw(), 0xff, static_cast<std::size_t>(ones.bytes()));
    placed_case.stream.copy(ones, tensor);
    placed_case.stream.wait();
  }
}

std::string check_captured(PlacedCase& placed_case, const std::vector<std::string>& wanted) {
  std::vector<Tensor> results;
  const Graph graph = placed_case.stream.capture([&] { results = run(placed_case, kAll); });
  for (const char* when : {"captured", "captured and launched again"}) {
    poison(placed_case, results);
    graph.launch(placed_case.stream);
    if (const std::string failure = compare_bits(placed_case.stream, results, wanted, kAll, when); !failure.empty()) return failure;
  }
  return {};
}

/// On the CPU in f64, with 1 to 3 threads.
std::string check_in_f64(const OpCase& check) {
  const Op op = [&](Context& c, Inputs in) { return check.function(c, in, placed(c.stream(), check.constants, DType::f64, DType::f64)); };
  std::vector<Tensor> inputs;
  for (const CaseTensor& input : check.inputs) inputs.push_back(input.values);
  if (check.has_differences) {
    const GradientReport report = check_gradients(op, inputs);
    if (!report.failure.empty()) return report.failure;
  }
  if (const std::string failure = check_gradient_subsets(op, inputs); !failure.empty()) return failure;
  const auto bits_on = [&](int threads) {
    PlacedCase placed_case(check, Stream::cpu(threads), DType::f64, DType::f64);
    return bits(placed_case.stream, run(placed_case, kAll));
  };
  const std::vector<std::string> one = bits_on(1);
  for (const int threads : {2, 3}) {
    if (bits_on(threads) != one) return concat("other bits with ", threads, " threads than with one");
  }
  return {};
}

std::vector<OpCase> cases_named(const std::string& expression) {
  std::regex pattern;
  try {
    pattern = std::regex(expression);
  } catch (const std::regex_error& error) {
    throw ConfigError("'", expression, "' is no regular expression: ", error.what());
  }
  std::vector<OpCase> cases = op_cases();
  std::erase_if(cases, [&](const OpCase& check) { return !std::regex_search(check.op, pattern); });
  return cases;
}

}  // namespace

std::string check_case(const Stream& stream, DType dtype, const OpCase& check) {
  PlacedCase on_device(check, stream, dtype, dtype), exact(check, Stream::cpu(1), dtype, DType::f64);
  const std::vector<Tensor> first = run(on_device, kAll);
  exact.seed = placed(exact.stream, seed_values(first[0].shape()), first[0].dtype(), DType::f64);   // the same for both: as the device rounds it
  if (const std::string failure = compare_values(stream, first, run(exact, kAll), tolerance_of(dtype)); !failure.empty()) return failure;

  const std::vector<std::string> wanted = bits(stream, first);
  if (const std::string failure = compare_bits(stream, run(on_device, kAll), wanted, kAll, "run again"); !failure.empty()) return failure;
  for (unsigned subset = 0; subset < 1U << check.inputs.size(); ++subset) {
    if (const std::string failure = compare_bits(stream, run(on_device, subset), wanted, subset, concat("subset ", subset, " of the gradients")); !failure.empty()) return failure;
  }
  return stream.device().is_cpu() ? std::string() : check_captured(on_device, wanted);
}

std::vector<SelfCheck> check_ops(const std::string& expression) {
  std::vector<SelfCheck> results;
  for (const OpCase& check : cases_named(expression)) results.push_back({check.op, check_in_f64(check)});
  return results;
}

std::vector<SelfCheck> check_ops_on(const Stream& stream, const std::string& expression) {
  const Stream arena = stream.with_arena();   // a captured run must write to no memory that others use
  std::vector<DType> dtypes = {DType::f32};
  if (!stream.device().is_cpu()) dtypes.push_back(DType::bf16);
  std::vector<SelfCheck> results;
  for (const OpCase& check : cases_named(expression)) {
    for (const DType dtype : dtypes) results.push_back({concat(check.op, ", ", dtype, " on ", stream.device()), check_case(arena, dtype, check)});
  }
  return results;
}

}  // namespace detr

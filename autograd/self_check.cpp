#include "autograd/self_check.h"

#include <cstring>
#include <functional>
#include <regex>

#include "autograd/attention.h"
#include "autograd/conv2d.h"
#include "autograd/detection.h"
#include "autograd/gather.h"
#include "autograd/gradient_check.h"
#include "autograd/linear.h"
#include "autograd/norm.h"
#include "autograd/pointwise.h"
#include "autograd/spatial.h"
#include "runtime/error.h"

namespace detr {
namespace {

using kernels::Activation;

struct Case {
  std::string op;
  std::vector<Tensor> inputs;
  Op function;
};

Tensor normals(const Shape& shape, std::uint64_t seed) {
  Tensor x = host_zeros(shape, DType::f64);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<double>()[i] = normal(RandomKey(seed), static_cast<std::uint64_t>(i));
  return x;
}

Tensor uniforms(const Shape& shape, double low, double high, std::uint64_t seed) {
  Tensor x = host_zeros(shape, DType::f64);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<double>()[i] = low + (high - low) * uniform(RandomKey(seed), static_cast<std::uint64_t>(i));
  return x;
}

Tensor integers(const Shape& shape, std::vector<std::int64_t> values) { return host_tensor<std::int64_t>(shape, values); }

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto add_case = [&](std::string op, std::vector<Tensor> inputs, Op function) { cases.push_back({std::move(op), std::move(inputs), std::move(function)}); };
  add_case("linear", {normals({3, 5}, 1), normals({4, 5}, 2), normals({4}, 3)}, [](Context& c, Inputs in) { return linear(c, in[0], in[1], in[2]); });
  for (const std::int64_t stride : {1, 2}) {
    add_case(concat("conv2d, stride ", stride), {normals({2, 5, 4, 3}, 4), normals({2, 3, 3, 3}, 5)},
             [stride](Context& c, Inputs in) { return conv2d(c, in[0], in[1], {stride, 1}); });
  }
  for (const Activation act : {Activation::none, Activation::relu, Activation::silu}) {
    for (const bool batch : {true, false}) {
      add_case(concat("batch_norm, ", batch ? "batch" : "given", " statistics, activation ", static_cast<int>(act)),
               {normals({2, 3, 2, 3}, 6), uniforms({3}, 0.5, 1.5, 7), normals({3}, 8), normals({2, 3, 2, 3}, 9)}, [act, batch](Context& c, Inputs in) {
                 const RunningStats running{normals({3}, 10), uniforms({3}, 0.5, 1.5, 11)};   // of its own: training updates them
                 return batch_norm(c, in[0], in[1], in[2], in[3], act, 1e-5, 0.1, batch, running);
               });
    }
  }
  add_case("layer_norm", {normals({3, 5}, 12), normals({3, 5}, 13), normals({5}, 14), normals({5}, 15)},
           [](Context& c, Inputs in) { return layer_norm(c, in[0], in[1], in[2], in[3], 1e-5); });
  for (const Activation act : {Activation::relu, Activation::silu, Activation::gelu, Activation::sigmoid})
    add_case(concat("activation ", static_cast<int>(act)), {normals({3, 7}, 16)}, [act](Context& c, Inputs in) { return activation(c, in[0], act); });
  add_case("add", {normals({2, 3, 4}, 17), normals({3, 4}, 18)}, [](Context& c, Inputs in) { return add(c, in[0], in[1]); });
  add_case("sum", {normals({2, 3}, 19), normals({4}, 20)}, [](Context& c, Inputs in) { return sum(c, in); });
  add_case("max_pool", {normals({1, 5, 6, 2}, 21)}, [](Context& c, Inputs in) { return max_pool(c, in[0]); });
  add_case("avg_pool", {normals({1, 5, 6, 2}, 22)}, [](Context& c, Inputs in) { return avg_pool(c, in[0]); });
  add_case("upsample", {normals({1, 2, 3, 2}, 23)}, [](Context& c, Inputs in) { return upsample(c, in[0]); });
  add_case("concatenate", {normals({2, 3, 2}, 24), normals({2, 1, 2}, 25)}, [](Context& c, Inputs in) { return concatenate(c, in, 1); });
  add_case("reshape", {normals({2, 3}, 26)}, [](Context& c, Inputs in) { return reshape(c, in[0], {3, 2}); });
  add_case("gather_rows", {normals({2, 4, 3}, 27)}, [](Context& c, Inputs in) {
    return gather_rows(c, in[0], integers({2, 3}, {3, 0, 3, 1, 2, 0}), host_tensor<std::uint8_t>({4}, std::vector<std::uint8_t>{1, 1, 0, 1}));
  });
  add_case("embedding", {normals({4, 3}, 28)}, [](Context& c, Inputs in) { return embedding(c, in[0], integers({2, 3}, {0, 2, 1, 1, 2, 0}), 3); });
  add_case("attention", {normals({2, 5, 4}, 29), normals({2, 5, 4}, 30), normals({2, 5, 4}, 31)},
           [](Context& c, Inputs in) { return attention(c, in[0], in[1], in[2], 2, integers({5}, {0, 1, -2, -1, -1})); });
  for (const auto sampling : {kernels::Sampling::bilinear, kernels::Sampling::discrete}) {
    add_case(concat("deformable_attention, ", sampling == kernels::Sampling::bilinear ? "bilinear" : "discrete"),
             {normals({1, 20, 4}, 32), normals({1, 3, 2 * 3 * 2}, 33), normals({1, 3, 2 * 3}, 34)}, [sampling](Context& c, Inputs in) {
               kernels::DeformableOptions options;
               options.heads = 2;
               options.levels = {{4, 4}, {2, 2}};
               options.points = {2, 1};
               options.sampling = sampling;
               return deformable_attention(c, in[0], in[1], in[2], uniforms({1, 3, 4}, 0.2, 0.8, 35), options);
             });
  }
  add_case("refine_boxes", {normals({3, 4}, 36), uniforms({3, 4}, 0.1, 0.9, 37)}, [](Context& c, Inputs in) { return refine_boxes(c, in[0], in[1]); });
  return cases;
}

/// The losses have constants that follow the inputs (IoU targets, weights), so differences of them are no gradient of theirs. Subsets
/// and threads are checked all the same.
std::vector<Case> subset_cases() {
  return {{"detection_loss", {normals({2, 5, 3}, 38), uniforms({2, 5, 4}, 0.2, 0.5, 39)}, [](Context& c, Inputs in) {
             const Tensor one = uniforms({1}, 2, 2, 0);
             const std::vector<kernels::PredictionSet> sets = {{2, integers({2, 3}, {0, -1, 1, -1, 0, -1}), Tensor(), one}, {0, integers({2, 2}, {1, -1, -1, 0}), integers({2}, {0, -2}), one}};
             return detection_loss(c, in[0], in[1], sets, {integers({2, 2}, {2, 0, 1, 1}), uniforms({2, 2, 4}, 0.2, 0.5, 40)}, {});
           }}};
}

/// Value and gradients with the given number of threads, as bytes.
std::vector<std::string> bits(const Case& check, int threads) {
  Tape tape;
  Context ctx(Stream::cpu(threads), &tape, true);
  std::vector<Variable> variables;
  for (const Tensor& input : check.inputs) variables.push_back(tape.input(input));
  const Variable y = check.function(ctx, variables);
  tape.backward(ctx, y, uniforms(y.shape(), -1, 1, 41));
  std::vector<std::string> result;
  const auto append = [&](const Tensor& x) { result.emplace_back(static_cast<const char*>(x.raw()), static_cast<std::size_t>(x.bytes())); };
  append(y.value());
  for (const Variable& v : variables) append(tape.gradient(v));
  return result;
}

std::string run(const Case& check, bool differences) {
  if (differences) {
    const GradientReport report = check_gradients(check.function, check.inputs);
    if (!report.failure.empty()) return report.failure;
  }
  if (const std::string failure = check_gradient_subsets(check.function, check.inputs); !failure.empty()) return failure;
  const std::vector<std::string> one = bits(check, 1);
  for (const int threads : {2, 3}) {
    if (bits(check, threads) != one) return concat("other bits with ", threads, " threads than with one");
  }
  return {};
}

}  // namespace

std::vector<SelfCheck> check_ops(const std::string& expression) {
  std::regex pattern;
  try {
    pattern = std::regex(expression);
  } catch (const std::regex_error& error) {
    throw ConfigError("'", expression, "' is no regular expression: ", error.what());
  }
  std::vector<SelfCheck> results;
  const auto add_all = [&](const std::vector<Case>& cases, bool differences) {
    for (const Case& check : cases) {
      if (std::regex_search(check.op, pattern)) results.push_back({check.op, run(check, differences)});
    }
  };
  add_all(all_cases(), true);
  add_all(subset_cases(), false);
  return results;
}

}  // namespace detr

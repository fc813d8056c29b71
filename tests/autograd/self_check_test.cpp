#include "autograd/self_check.h"

#include <algorithm>

#include "autograd/pointwise.h"
#include "kernels/pointwise.h"
#include "tests/autograd/expect_gradients.h"

using namespace detr;
using namespace detr::test;

namespace {

using Constants = std::span<const Tensor>;

/// y = factor x of the first input, with a backward that gives every input dy times a factor.
Variable scaled(Context& ctx, Inputs in, double factor, std::function<double(Wanted want)> backward_factor) {
  Tensor y = ctx.empty_like(in[0].value());
  kernels::scale(ctx.stream(), in[0].value(), factor, y);
  return ctx.record("scaled", in, y, [backward_factor](Context& c, const Tensor& dy, Wanted want) {
    for (Tensor* dx : want) {
      if (dx) kernels::scale(c.stream(), dy, backward_factor(want), *dx);
    }
  });
}

/// What the check says of an op with `count` inputs, on the CPU in f32.
std::string verdict(std::size_t count, std::function<Variable(Context&, Inputs)> op) {
  std::vector<CaseTensor> inputs;
  for (std::size_t i = 0; i < count; ++i) inputs.emplace_back(detr::test::normal({2, 3}, i));
  return check_case(Stream::cpu(1), DType::f32, {"op", inputs, {}, [op](Context& c, Inputs in, Constants) { return op(c, in); }});
}

bool in_f64(Inputs in) { return in[0].value().dtype() == DType::f64; }

}  // namespace

TEST_CASE("self-check: every op passes on this machine", "[cpu]") {
  const std::vector<SelfCheck> checks = check_ops("");
  CHECK(checks.size() >= 25);
  for (const SelfCheck& check : checks) {
    INFO(check.op);
    CHECK(check.failure == "");
  }
  for (const char* family : {"linear", "conv2d", "batch_norm", "layer_norm", "activation", "pool", "gather_rows", "embedding", "attention", "deformable_attention", "refine_boxes", "detection_loss"}) {
    INFO(family);
    CHECK(std::any_of(checks.begin(), checks.end(), [&](const SelfCheck& check) { return check.op.find(family) != std::string::npos; }));
  }
}

TEST_CASE("self-check: an expression chooses", "[cpu]") {
  const std::vector<SelfCheck> checks = check_ops("^linear$");
  REQUIRE(checks.size() == 1);
  CHECK(checks[0].op == "linear");
  CHECK(check_ops("no such op").empty());
  expect_throws<ConfigError>([] { check_ops("("); }, "'(' is no regular expression");
}

TEST_CASE("self-check: the ops in f32 agree with f64", "[cpu]") {
  const std::vector<SelfCheck> checks = check_ops_on(Stream::cpu(2), "");
  CHECK(checks.size() == check_ops("").size());
  for (const SelfCheck& check : checks) {
    INFO(check.op);
    CHECK(check.failure == "");
    CHECK(check.op.ends_with(", f32 on cpu"));
  }
  expect_throws<ConfigError>([] { check_ops_on(Stream::cpu(1), "("); }, "'(' is no regular expression");
}

TEST_CASE("self-check: a wrong op is found and told", "[cpu]") {
  const auto one = [](Wanted) { return 1.0; };
  const auto says = [](const std::string& text, const std::string& failure) {
    INFO("got '" << failure << "'");
    CHECK(failure.starts_with(text));
    CHECK(failure.empty() == text.empty());
  };
  says("", verdict(1, [&](Context& c, Inputs in) { return scaled(c, in, 1, one); }));
  says("the value, element 0: ", verdict(1, [&](Context& c, Inputs in) { return scaled(c, in, in_f64(in) ? 1 : 1.001, one); }));
  says("the gradient of input 0, element 0: ", verdict(1, [](Context& c, Inputs in) {
         return scaled(c, in, 1, [exact = in_f64(in)](Wanted) { return exact ? 1 : 1.001; });
       }));
  // Within the tolerance, but not the same each time.
  int runs = 0;
  says("run again: the value has other bits", verdict(1, [&](Context& c, Inputs in) { return scaled(c, in, 1 + 2e-6 * runs++, one); }));
  says("subset 1 of the gradients: the gradient of input 0 has other bits", verdict(2, [](Context& c, Inputs in) {
         return scaled(c, in, 1, [](Wanted want) { return want[0] && want[1] ? 1 : 1 + 2e-6; });
       }));
  says("the gradient of input 1 is missing", verdict(2, [&](Context& c, Inputs in) { return scaled(c, in.first(1), 1, one); }));
}

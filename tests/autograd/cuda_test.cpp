// What the tape and its ops do on a GPU above the kernels, which have tests of their own.
#include "autograd/linear.h"
#include "autograd/pointwise.h"
#include "autograd/self_check.h"
#include "runtime/side_branch.h"
#include "tests/autograd/expect_gradients.h"
#include "tests/gpu.h"

using namespace detr;
using namespace detr::test;

TEST_CASE("autograd on CUDA: every op agrees with the CPU, for all wanted gradients, again, and captured", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const std::vector<SelfCheck> checks = check_ops_on(gpu(), "");
  CHECK(checks.size() == 2 * op_cases().size());   // f32 and bf16
  for (const SelfCheck& check : checks) {
    INFO(check.op);
    CHECK(check.failure == "");
  }
}

TEST_CASE("autograd on CUDA: the gradient of a cast has the input's dtype", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Tensor values = detr::test::normal({33}, 1), seed = detr::test::normal({33}, 2);
  for (const auto& [from, to] : {std::pair{DType::f32, DType::bf16}, std::pair{DType::bf16, DType::f32}}) {
    INFO(from << " to " << to);
    Tape tape;
    Context ctx(gpu(), &tape, true);
    const Variable x = tape.input(on_gpu(values, from)), y = cast(ctx, x, to);
    CHECK(y.value().dtype() == to);
    expect_same_bits(from_gpu(y.value()), rounded(values, DType::bf16));   // one of the two is, and the other holds all of it
    tape.backward(ctx, y, on_gpu(seed, to));
    REQUIRE(tape.gradient(x).dtype() == from);
    expect_same_bits(from_gpu(tape.gradient(x)), rounded(seed, DType::bf16));
    CHECK(cast(ctx, x, from).node() == x.node());
  }
}

TEST_CASE("autograd on CUDA: a bf16 weight used twice has its gradients added in f32", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Shape shape{5, 7};
  const Tensor first = detr::test::normal({33, 7}, 1), second = detr::test::normal({33, 7}, 2), weight = detr::test::normal(shape, 3), seed = detr::test::normal({33, 5}, 4);
  // The CPU's in f64, from the same rounded values; there the weight is an input.
  const auto run = [&](const Stream& stream, Tape& tape, const Variable& w, auto placed) {
    Context ctx(stream, &tape, true);
    const Variable y = add(ctx, linear(ctx, Variable(placed(first)), w, {}), linear(ctx, Variable(placed(second)), w, {}));
    tape.backward(ctx, y, placed(seed));
  };
  const auto on_host = [](const Tensor& x) { return rounded(x, DType::bf16); };
  Tape exact_tape;
  const Variable exact_weight = exact_tape.input(on_host(weight));
  run(Stream::cpu(1), exact_tape, exact_weight, on_host);

  ParameterList list;
  const Parameter parameter = list.add("weight", shape, {});
  parameter.state().value = on_gpu(weight, DType::bf16);
  parameter.state().grad = on_gpu(weight, DType::f32);   // of an earlier step: overwritten
  Tape tape;
  run(gpu(), tape, tape.leaf(parameter, 0, shape[0]), [](const Tensor& x) { return on_gpu(x, DType::bf16); });
  CHECK(tape.reached(parameter));
  // Two sums of 33 terms each and one addition in f32: far from what bf16 would leave.
  expect_near(from_gpu(parameter.grad()), exact_tape.gradient(exact_weight), 4 * 67 * roundoff(DType::f32));
}

TEST_CASE("autograd on CUDA: gradients of weights on a side branch have the bits of those in turn", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  // Products that take a while, on a branch that falls behind: a weight used by each layer, one made by an op, whose gradient goes on
  // through the tape, and sums of gradients in place.
  const std::int64_t rows = 20000, width = 256;
  const Shape square{width, width};
  const Stream arena = gpu().with_arena();
  ParameterList list;
  std::vector<Parameter> parameters;
  for (const char* name : {"shared", "bias", "left", "right"}) parameters.push_back(list.add(name, name == std::string("bias") ? Shape{width} : square, {}));
  const auto scaled = [](const Shape& shape, std::uint64_t seed) {
    Tensor x = detr::test::normal(shape, seed);
    for (double& value : x.span<double>()) value /= 16;
    return x;
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].state().value = on_gpu(scaled(parameters[i].shape(), i), DType::f32);
  const Tensor values = on_gpu(scaled({rows, width}, 10), DType::f32), seed = on_gpu(scaled({rows, width}, 11), DType::f32);

  const auto gradients = [&](SideBranch* side) {
    Tape tape;
    Context ctx(arena, &tape, true);
    ctx.side = side;
    for (const Parameter& p : parameters) {
      p.state().grad = on_gpu(host_zeros(p.shape(), DType::f32), DType::f32);
      p.state().written.clear();
    }
    const Variable x = tape.input(values), shared = ctx.leaf(parameters[0]), bias = ctx.leaf(parameters[1]);
    Variable y = x;
    for (int layer = 0; layer < 4; ++layer) {
      const Variable made = add(ctx, ctx.leaf(parameters[2]), ctx.leaf(parameters[3]));
      y = add(ctx, y, linear(ctx, linear(ctx, y, shared, bias), made, bias));
    }
    tape.backward(ctx, y, seed);
    if (side) side->join();
    std::vector<Tensor> found = {from_gpu(tape.gradient(x))};
    for (const Parameter& p : parameters) found.push_back(from_gpu(p.grad()));
    return found;
  };
  const std::vector<Tensor> wanted = gradients(nullptr);
  SideBranch side(arena);
  for (int run = 0; run < 5; ++run) {
    INFO("run " << run);
    const std::vector<Tensor> got = gradients(&side);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      INFO("gradient " << i);
      expect_same_bits(got[i], wanted[i]);
    }
  }
}

// What the tape and its ops do on a GPU above the kernels, which have tests of their own.
#include "autograd/linear.h"
#include "autograd/pointwise.h"
#include "autograd/self_check.h"
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

#include "autograd/tape.h"

#include <array>

#include "autograd/context.h"
#include "autograd/pointwise.h"
#include "tests/autograd/expect_gradients.h"

using namespace detr;
using namespace detr::test;

namespace {

/// Parameters with memory of their own, as a store would give them, and a tape to use them on.
struct Bench {
  ParameterList list;
  Tape tape;
  Context ctx{Stream::cpu(1), &tape, true};
  std::vector<std::string> ready;

  Parameter parameter(const std::string& name, const std::vector<double>& values, bool trainable = true) {
    return parameter(name, {static_cast<std::int64_t>(values.size())}, values, trainable);
  }
  Parameter parameter(const std::string& name, const Shape& shape, const std::vector<double>& values, bool trainable = true) {
    Parameter p = list.add(name, shape, {});
    p.state().value = host_tensor<double>(shape, values);
    p.state().trainable = trainable;
    if (trainable) p.state().grad = host_tensor<double>(shape, std::vector<double>(values.size(), kUntouched));
    return p;
  }
  void backward(const Variable& loss) {
    tape.backward(ctx, loss, [this](const Parameter& p) { ready.push_back(p.name()); });
  }

  static constexpr double kUntouched = -77;
};

using Values = std::vector<double>;

Variable total(Context& ctx, const Variable& x) { return sum(ctx, std::array<Variable, 1>{x}); }

/// sum(x)^2 / 2 in a node of our own: its gradient sum(x) shows in which order things ran and were added.
Variable half_square_of_sum(Context& ctx, const Variable& x) {
  double s = 0;
  for (const double v : values_of(x.value())) s += v;
  return ctx.record("half_square", {x}, host_tensor<double>({1}, Values{s * s / 2}), [s](Context&, const Tensor& dy, Wanted want) {
    for (double& v : want[0]->span<double>()) v = s * dy.data<double>()[0];
  });
}

}  // namespace

TEST_CASE("tape: an input used twice in one op gets both contributions", "[cpu]") {
  Bench b;
  const Variable x = b.tape.input(host_tensor<double>({2}, {1, 2}));
  b.backward(total(b.ctx, add(b.ctx, x, x)));
  CHECK(values_of(b.tape.gradient(x)) == Values{2, 2});
}

TEST_CASE("tape: an input used by several ops", "[cpu]") {
  Bench b;
  const Variable x = b.tape.input(host_tensor<double>({2}, {1, 2}));
  const Variable y = add(b.ctx, x, x);                      // 2 x
  const Variable z = add(b.ctx, y, x);                      // 3 x
  const std::array<Variable, 3> all = {half_square_of_sum(b.ctx, z), y, x};
  b.backward(sum(b.ctx, all));                              // (3 (x0 + x1))^2 / 2 + 3 (x0 + x1)
  CHECK(values_of(b.tape.gradient(x)) == Values{9 * 3 + 3, 9 * 3 + 3});
}

TEST_CASE("tape: a parameter's gradient goes into its buffer, contributions are added", "[cpu]") {
  Bench b;
  const Parameter w = b.parameter("w", {1, 2}), v = b.parameter("v", {5, 6});
  const Variable first = b.ctx.leaf(w), again = b.ctx.leaf(w);
  CHECK(first.node() == again.node());
  const Variable early = half_square_of_sum(b.ctx, first);        // gradient 3
  const Variable twice = add(b.ctx, again, again);                // gradient 2
  const Variable late = add(b.ctx, b.ctx.leaf(w), b.ctx.leaf(v)); // gradient 1 each
  const std::array<Variable, 3> all = {early, twice, late};
  b.backward(sum(b.ctx, all));
  CHECK(values_of(w.grad()) == Values{6, 6});
  CHECK(values_of(v.grad()) == Values{1, 1});
  CHECK(b.tape.reached(w));
  // Backward meets the last op first: v is complete there, w only after the first op of the forward.
  CHECK(b.ready == std::vector<std::string>{"v", "w"});
}

TEST_CASE("tape: several backward passes add up until the rows are marked as unwritten", "[cpu]") {
  Bench b;
  const Parameter w = b.parameter("w", {1, 2});
  for (int i = 0; i < 3; ++i) {
    b.tape.clear();
    b.backward(total(b.ctx, b.ctx.leaf(w)));
  }
  CHECK(values_of(w.grad()) == Values{3, 3});
  CHECK(b.ready.size() == 3);
  w.state().written.clear();
  b.tape.clear();
  b.backward(total(b.ctx, b.ctx.leaf(w)));
  CHECK(values_of(w.grad()) == Values{1, 1});
}

TEST_CASE("tape: parts of a parameter's rows", "[cpu]") {
  Bench b;
  const Parameter w = b.parameter("w", {3, 2}, {1, 2, 3, 4, 5, 6});
  const Variable upper = b.ctx.leaf(w, 0, 2), lower = b.ctx.leaf(w, 2, 3);
  CHECK(values_of(upper.value()) == Values{1, 2, 3, 4});
  CHECK(values_of(lower.value()) == Values{5, 6});
  CHECK(upper.node() != lower.node());
  CHECK(b.ctx.leaf(w, 0, 2).node() == upper.node());
  const std::array<Variable, 3> all = {half_square_of_sum(b.ctx, lower), upper, add(b.ctx, upper, upper)};
  b.backward(sum(b.ctx, all));
  CHECK(values_of(w.grad()) == Values{3, 3, 3, 3, 11, 11});
  CHECK(b.ready == std::vector<std::string>{"w"});   // once, after its last part
}

TEST_CASE("tape: a part that nothing reaches is left alone", "[cpu]") {
  Bench b;
  const Parameter w = b.parameter("w", {3, 1}, {1, 2, 3});
  b.backward(total(b.ctx, b.ctx.leaf(w, 1, 2)));
  CHECK(values_of(w.grad()) == Values{Bench::kUntouched, 1, Bench::kUntouched});
  CHECK(w.state().written == std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 2}});
}

TEST_CASE("tape: overlapping parts are refused", "[cpu]") {
  Bench b;
  const Parameter w = b.parameter("w", {1, 2, 3});
  const std::array<Variable, 2> parts = {b.ctx.leaf(w, 0, 2), b.ctx.leaf(w, 1, 3)};
  const Variable loss = sum(b.ctx, parts);
  expect_throws<InvalidArgument>([&] { b.backward(loss); }, "tape: w is used by overlapping parts of its rows");
  expect_throws<InvalidArgument>([&] { b.ctx.leaf(w, 2, 4); }, "slice: [2, 4) of f64(3)");
}

TEST_CASE("tape: a parameter that the loss does not reach is missing", "[cpu]") {
  Bench b;
  const Parameter used = b.parameter("used", {1}), unused = b.parameter("unused", {2}), aside = b.parameter("aside", {3});
  b.ctx.leaf(unused);
  const Variable x = b.ctx.leaf(used);
  add(b.ctx, x, b.ctx.leaf(aside));   // an op whose result the loss ignores
  b.backward(total(b.ctx, x));
  CHECK(b.tape.reached(used));
  CHECK_FALSE(b.tape.reached(unused));
  CHECK_FALSE(b.tape.reached(aside));
  CHECK(values_of(used.grad()) == Values{1});
  CHECK(values_of(unused.grad()) == Values{Bench::kUntouched});
  CHECK(values_of(aside.grad()) == Values{Bench::kUntouched});
  CHECK(unused.state().written.empty());
  CHECK(b.ready == std::vector<std::string>{"used"});
}

TEST_CASE("tape: what runs after the loss is not waited for", "[cpu]") {
  Bench b;
  const Parameter w = b.parameter("w", {1});
  const Variable loss = total(b.ctx, b.ctx.leaf(w));
  half_square_of_sum(b.ctx, b.ctx.leaf(w));
  b.backward(loss);
  CHECK(values_of(w.grad()) == Values{1});
  CHECK(b.ready == std::vector<std::string>{"w"});
}

TEST_CASE("tape: a frozen parameter is a constant", "[cpu]") {
  Bench b;
  const Parameter frozen = b.parameter("frozen", {1, 2}, false), w = b.parameter("w", {3, 4});
  const Variable constant = b.ctx.leaf(frozen);
  CHECK_FALSE(constant.wants_grad());
  CHECK_FALSE(add(b.ctx, constant, constant).wants_grad());   // nothing is recorded for it
  CHECK(b.tape.size() == 0);
  b.backward(total(b.ctx, add(b.ctx, b.ctx.leaf(w), constant)));
  CHECK(values_of(w.grad()) == Values{1, 1});
  CHECK_FALSE(b.tape.reached(frozen));
  CHECK(b.ready == std::vector<std::string>{"w"});
}

TEST_CASE("tape: backward of a constant reaches nothing", "[cpu]") {
  Bench b;
  const Parameter w = b.parameter("w", {1});
  b.backward(total(b.ctx, b.ctx.leaf(w)));
  b.backward(Variable(host_tensor<double>({1}, {5})));
  CHECK_FALSE(b.tape.reached(w));
  CHECK(b.ready.size() == 1);
}

TEST_CASE("tape: detach and a context without a tape cut the gradient", "[cpu]") {
  Bench b;
  const Parameter w = b.parameter("w", {1, 2});
  const Variable x = b.tape.input(host_tensor<double>({2}, {3, 4}));
  const Variable doubled = add(b.ctx, x, x);
  CHECK_FALSE(doubled.detach().wants_grad());
  CHECK(doubled.detach().value().raw() == doubled.value().raw());
  Context aside = b.ctx.without_tape();
  const Variable constant = add(aside, aside.leaf(w), x);
  CHECK_FALSE(constant.wants_grad());
  CHECK(aside.training());
  b.backward(total(b.ctx, add(b.ctx, add(b.ctx, x, doubled.detach()), constant)));
  CHECK(values_of(b.tape.gradient(x)) == Values{1, 1});
  CHECK_FALSE(b.tape.reached(w));
}

TEST_CASE("tape: parameters without dimensions", "[cpu]") {
  Bench b;
  const Parameter scalar = b.parameter("scalar", Shape{}, Values{3});
  Context aside = b.ctx.without_tape();
  CHECK(values_of(aside.leaf(scalar).value()) == Values{3});
  const Variable x = b.ctx.leaf(scalar);
  CHECK(x.shape() == Shape{});
  b.backward(total(b.ctx, add(b.ctx, x, x)));
  CHECK(values_of(scalar.grad()) == Values{2});
}

TEST_CASE("tape: a leaf as the output", "[cpu]") {
  Bench b;
  const Parameter w = b.parameter("w", {1, 2});
  const Tensor seed = host_tensor<double>({2}, {7, 8});
  const Variable x = b.tape.input(host_tensor<double>({2}, {0, 0}));
  b.tape.backward(b.ctx, x, seed);
  expect_same_bits(b.tape.gradient(x), seed);
  for (int i = 1; i <= 2; ++i) {
    b.tape.clear();
    b.tape.backward(b.ctx, b.ctx.leaf(w), seed, [&](const Parameter& p) { b.ready.push_back(p.name()); });
    CHECK(b.tape.reached(w));
    CHECK(values_of(w.grad()) == Values{7.0 * i, 8.0 * i});
  }
  CHECK(b.ready == std::vector<std::string>{"w", "w"});
}

TEST_CASE("tape: an input that the output ignores has no gradient", "[cpu]") {
  Bench b;
  const Variable x = b.tape.input(normal(Shape{2})), y = b.tape.input(normal(Shape{2}));
  b.backward(total(b.ctx, x));
  CHECK(b.tape.gradient(x).defined());
  CHECK_FALSE(b.tape.gradient(y).defined());
}

TEST_CASE("tape: an op is told which inputs want a gradient", "[cpu]") {
  Bench b;
  const Variable x = b.tape.input(normal(Shape{2})), constant(normal(Shape{2}));
  std::vector<bool> wanted;
  const Variable y = b.ctx.record("probe", {constant, x, Variable()}, normal(Shape{1}), [&](Context&, const Tensor&, Wanted want) {
    for (const Tensor* w : want) wanted.push_back(w != nullptr);
    for (double& v : want[1]->span<double>()) v = 1;
  });
  b.backward(y);
  CHECK(wanted == std::vector<bool>{false, true, false});
}

TEST_CASE("tape: the observer sees every node's output gradient, last op first", "[cpu]") {
  Bench b;
  std::vector<std::string> names;
  std::vector<Values> gradients;
  b.tape.observer = [&](const std::string& name, const Tensor& gradient) {
    names.push_back(name);
    gradients.push_back(values_of(gradient));
  };
  const Variable x = b.tape.input(host_tensor<double>({2}, {1, 2}));
  b.backward(half_square_of_sum(b.ctx, add(b.ctx, x, x)));
  CHECK(names == std::vector<std::string>{"half_square", "add"});
  CHECK(gradients == std::vector<Values>{{1}, {6, 6}});
}

TEST_CASE("tape: what an op saved is freed as backward goes", "[cpu]") {
  Bench b;
  const std::shared_ptr<int> saved = std::make_shared<int>(1);
  const Variable x = b.tape.input(normal(Shape{1}));
  long during = 0;
  const Variable y = b.ctx.record("first", {x}, normal(Shape{1}), [&](Context&, const Tensor&, Wanted want) {
    during = saved.use_count();
    want[0]->data<double>()[0] = 1;
  });
  const Variable z = b.ctx.record("second", {y}, normal(Shape{1}),
                                  [saved](Context&, const Tensor&, Wanted want) { want[0]->data<double>()[0] = *saved; });
  CHECK(saved.use_count() == 2);
  b.backward(z);
  CHECK(during == 1);   // the second op's memory was gone when the first one's backward ran
}

TEST_CASE("tape: broken contracts", "[cpu]") {
  Bench b;
  const Variable x = b.tape.input(normal(Shape{2}));
  const Variable y = add(b.ctx, x, x), loss = total(b.ctx, y);
  expect_throws<InvalidArgument>([&] { b.backward(y); }, "backward: the loss must have one element, got f64(2)");
  expect_throws<InvalidArgument>([&] { b.tape.backward(b.ctx, y, normal(Shape{3})); }, "backward: seed must be f64(2), got f64(3)");
  expect_throws<InvalidArgument>([&] { b.tape.gradient(y); }, "tape: gradient of something that is no input");
  expect_throws<InvalidArgument>([&] { b.tape.gradient(Variable()); }, "tape: gradient of something that is no input");
  const std::vector<Variable> many(33, x);
  expect_throws<InvalidArgument>([&] { b.tape.record("sum", many, x.value(), {}); }, "sum: 33 inputs, at most 32");
  b.backward(loss);
  expect_throws<InvalidArgument>([&] { b.backward(loss); }, "tape: backward has run already");
}

TEST_CASE("tape: a ReLU's gradient is taken back by the last op that uses it, where it can be", "[cpu]") {
  // The gradient of each op is dy; back through the ReLU that made its input it is 0 where that is not above 0.
  const auto use = [](Context& ctx, const Variable& x, bool can, std::vector<std::string>& log, const std::string& name) {
    return ctx.record("use", {x}, x.value(), [&log, name, x = x.value()](Context& c, const Tensor& dy, Wanted want) {
      log.push_back(name + (c.masks(0) ? " takes it back" : "") + (c.adds(0) ? ", adds" : ""));
      for (std::int64_t i = 0; i < dy.numel(); ++i) {
        double& dx = want[0]->data<double>()[i];
        dx = c.masks(0) && x.data<double>()[i] <= 0 ? 0 : dy.data<double>()[i] + (c.adds(0) ? dx : 0);
      }
    }, {.adds = can ? 1U : 0U, .masks = can ? 1U : 0U});
  };
  const auto relu = [](Context& ctx, const Variable& x, const Variable& residual, const Values& y, std::vector<std::string>& log) {
    return ctx.record("relu", {x, residual}, host_tensor<double>({2}, y), [&log, y](Context& c, const Tensor& dy, Wanted want) {
      log.push_back(c.before_relu() ? "ReLU is done" : "ReLU");
      for (Tensor* dx : want) {
        for (std::int64_t i = 0; dx && i < 2; ++i) dx->data<double>()[i] = !c.before_relu() && y[static_cast<std::size_t>(i)] <= 0 ? 0 : dy.data<double>()[i];
      }
    }, {.ends_in_relu = true, .passes_before_relu = 2});
  };
  using Log = std::vector<std::string>;
  for (const bool earlier_can : {true, false}) {
    Log log;
    Bench b;
    const Variable x = b.tape.input(host_tensor<double>({2}, {1, 2})), z = b.tape.input(host_tensor<double>({2}, {3, 4}));
    const Variable inner = relu(b.ctx, x, {}, {0, 5}, log);
    const Variable early = use(b.ctx, inner, earlier_can, log, "early"), outer = relu(b.ctx, early, inner, {6, 7}, log);
    const std::array<Variable, 2> all = {use(b.ctx, outer, true, log, "late"), use(b.ctx, z, true, log, "aside")};
    b.backward(sum(b.ctx, all));
    CHECK(values_of(b.tape.gradient(x)) == Values{0, 2});   // twice, and not where the inner ReLU lets nothing through
    CHECK(values_of(b.tape.gradient(z)) == Values{1, 1});
    if (earlier_can) CHECK(log == Log{"aside", "late takes it back", "ReLU is done", "early takes it back, adds", "ReLU is done"});
    else CHECK(log == Log{"aside", "late takes it back", "ReLU is done", "early", "ReLU"});
  }
}

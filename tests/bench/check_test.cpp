#include "bench/check.h"

#include <cmath>
#include <limits>
#include <memory>

#include "bench/machine.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::bench;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Tensor floats(const std::vector<float>& values) { return host_tensor<float>({std::ssize(values)}, values); }
Tensor integers(const std::vector<std::int64_t>& values) { return host_tensor<std::int64_t>({std::ssize(values)}, values); }

const RandomPool& pool() {
  static const RandomPool pool(Stream::cpu(1), DType::f32);
  return pool;
}

/// A case whose output is what `value` gives for each run.
Case case_of(const std::function<float()>& value, DType dtype = DType::f32) {
  Case c{.op = "test", .dtype = dtype};
  c.make = [value](Inputs& in, std::int64_t size) {
    Tensor y = in.wide_empty({size, 2});
    return Work{[=](const Stream&) {
                  for (float& v : y.span<float>()) v = value();
                },
                {y}};
  };
  return c;
}

TEST_CASE("bench difference: relative error of numbers, share of integers", "[cpu]") {
  test::expect_close(difference(floats({3, 4.5}), floats({3, 4})), 0.1, 1e-12);
  CHECK(difference(floats({0, 0}), floats({0, 0})) == 0);
  CHECK(std::isinf(difference(floats({1, 0}), floats({0, 0}))));
  CHECK(std::isinf(difference(floats({kNaN}), floats({1}))));
  CHECK(difference(integers({1, 2, 3, 4}), integers({1, 2, 9, 4})) == 0.25);
  CHECK(difference(floats({}), floats({})) == 0);
  test::expect_throws<InvalidArgument>([] { difference(floats({1}), floats({1, 2})); }, "difference");
  test::expect_throws<InvalidArgument>([] { difference(host_zeros({1}, DType::u8), host_zeros({1}, DType::u8)); }, "i64");
}

TEST_CASE("bench check: a sound case passes", "[cpu]") {
  const Check alone = check_case(case_of([] { return 1.0F; }), pool(), nullptr);
  CHECK(alone.ok);
  CHECK(alone.max_error == -1);
  const Check compared = check_case(case_of([] { return 1.0F; }), pool(), &pool());
  CHECK(compared.ok);
  CHECK(compared.max_error == 0);
}

TEST_CASE("bench check: faults are found", "[cpu]") {
  const Check nan = check_case(case_of([] { return kNaN; }), pool(), nullptr);
  CHECK(!nan.ok);
  CHECK(nan.fault == "an output is not finite");
  const auto count = std::make_shared<int>(0);
  const Check unsteady = check_case(case_of([count] { return static_cast<float>(++*count); }), pool(), nullptr);
  CHECK(!unsteady.ok);
  CHECK(unsteady.fault == "two runs differ");
  // Three runs of two elements each are right, the fourth, the oracle's, is 1 % lower: within the tolerance of bf16 alone.
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto calls = std::make_shared<int>(0);
    const Check other = check_case(case_of([calls] { return (*calls)++ < 6 ? 1.0F : 0.99F; }, dtype), pool(), &pool());
    CHECK(other.ok == (dtype == DType::bf16));
    test::expect_close(other.max_error, 0.01 / 0.99, 1e-4);
  }
}

TEST_CASE("bench machine: reasons why clocks are low", "[cpu]") {
  CHECK(throttle_text(0) == "no");
  CHECK(throttle_text(0x3) == "no");   // idle, clocks set by an application
  CHECK(throttle_text(0x4) == "power cap");
  CHECK(throttle_text(0x24) == "power cap, temperature (driver)");
}

}  // namespace

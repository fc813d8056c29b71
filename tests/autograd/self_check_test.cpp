#include "autograd/self_check.h"

#include <algorithm>

#include "tests/support.h"

using namespace detr;
using namespace detr::test;

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

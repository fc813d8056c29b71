#include "models/detr/postprocess.h"

#include <cmath>

#include "tests/support.h"

using namespace detr;
using namespace detr::test;

namespace {
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
}  // namespace

TEST_CASE("postprocess: best pairs of query and class", "[cpu]") {
  // Query 1 is best for class 2 and second best for class 0; boxes are not clipped.
  const Tensor logits = host_tensor<float>({1, 2, 3}, {-1, -2, -3, 1.5, -4, 2});
  const Tensor boxes = host_tensor<float>({1, 2, 4}, {0.5f, 0.5f, 0.2f, 0.4f, 0.1f, 0.25f, 0.4f, 0.5f});
  const auto result = models::postprocess(Stream::cpu(1), logits, boxes, {200}, {100}, 3);
  REQUIRE(result.size() == 1);
  REQUIRE(result[0].size() == 3);
  const auto& best = result[0];
  CHECK(best[0].label == 2);
  CHECK(best[1].label == 0);
  CHECK(best[2].label == 0);
  expect_close(best[0].score, sigmoid(2), 1e-6);
  expect_close(best[1].score, sigmoid(1.5), 1e-6);
  expect_close(best[2].score, sigmoid(-1), 1e-6);
  const std::vector<double> second = {-20, 0, 60, 50}, first = {80, 30, 120, 70};
  for (std::size_t k = 0; k < 4; ++k) {
    expect_close(best[0].xyxy_px[k], second[k], 0, 1e-4);
    expect_close(best[1].xyxy_px[k], second[k], 0, 1e-4);
    expect_close(best[2].xyxy_px[k], first[k], 0, 1e-4);
  }
}

TEST_CASE("postprocess: sizes and more asked than there is", "[cpu]") {
  const Tensor logits = host_tensor<double>({2, 1, 2}, {0, 1, 3, 2}), boxes = host_tensor<double>({2, 1, 4}, {0.5, 0.5, 1, 1, 0.5, 0.5, 1, 1});
  const auto result = models::postprocess(Stream::cpu(1), logits, boxes, {10, 30}, {20, 40});
  REQUIRE(result.size() == 2);
  CHECK(result[0].size() == 2);
  CHECK(result[0][0].label == 1);
  CHECK(result[1][0].label == 0);
  CHECK(result[0][0].xyxy_px == std::array<double, 4>{0, 0, 10, 20});
  CHECK(result[1][1].xyxy_px == std::array<double, 4>{0, 0, 30, 40});
  expect_throws<InvalidArgument>([&] { models::postprocess(Stream::cpu(1), logits, boxes, {10}, {20, 40}); }, "postprocess: sizes of 1 pictures for 2");
}

#include "bench/roofline.h"

#include <array>
#include <cmath>

#include "bench/model_cost.h"
#include "models/detr/rtdetr.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::bench;
using detr::test::expect_close;

namespace {

/// Floors in ms as docs/performance.md's design table has them, rounded to its digits.
struct PartFloors {
  const char* variant;
  std::int64_t images;
  double stem, backbone, encoder_convs, decoder_input, batch_norm, aifi, heads, values, decoder, sum;
};
constexpr std::array kParts = {
    PartFloors{"r50", 16, 0.16, 6.06, 3.37, 0.11, 1.34, 0.05, 0.40, 0.40, 0.66, 12.6},
    PartFloors{"r50", 64, 0.64, 24.24, 13.46, 0.45, 5.38, 0.21, 1.60, 1.61, 2.62, 50.2},
    PartFloors{"r18", 64, 1.95, 7.29, 5.82, 0.45, 9.71, 0.21, 1.60, 0.80, 1.31, 29.2},
    PartFloors{"r101", 16, 0.16, 10.34, 6.87, 0.14, 1.96, 0.12, 0.40, 0.40, 0.66, 21.0},
};

/// Two percent, and half a unit of the table's last digit.
void expect_floor(const Cost& cost, double wanted, double unit) {
  INFO("wanted " << wanted << " ms, got " << cost.floor_ms);
  CHECK(std::abs(cost.floor_ms - wanted) <= 0.02 * wanted + unit / 2);
}

TEST_CASE("roofline: a kernel takes the longer of its two times", "[cpu]") {
  expect_close(kernel_cost(395e9, 0).floor_ms, 1, 1e-12);      // 790 GFLOP at 790 TFLOP/s
  expect_close(kernel_cost(395e9, 4.3e9).floor_ms, 1, 1e-12);
  expect_close(kernel_cost(395e9, 8.6e9).floor_ms, 2, 1e-12);
  const Cost sum = kernel_cost(395e9, 0) + 2.0 * kernel_cost(0, 4.3e9);
  expect_close(sum.floor_ms, 3, 1e-12);
  CHECK(sum.mac == 395e9);
  CHECK(sum.bytes == 8.6e9);
}

TEST_CASE("roofline: convolutions by hand", "[cpu]") {
  // 2 images of 5 x 4 with 3 channels to 3 x 2 with 7, kernel 3, stride 2: X = 120, Y = 84, W = 189.
  const ConvGeometry g{2, 5, 4, 3, 7, 3, 2};
  CHECK(g.out_h() == 3);
  CHECK(g.out_w() == 2);
  CHECK(g.mac() == 84 * 27);
  CHECK(conv_forward(g, 2).bytes == 2 * (120 + 84 + 189));
  CHECK(conv_forward(g, 2, 1).bytes == 2 * (120 + 2 * 84 + 189));
  CHECK(conv_data_gradient(g, 2, 2).bytes == 2 * (3 * 120 + 84 + 189));
  CHECK(conv_weight_gradient(g, 2).bytes == 2 * (120 + 84) + 4 * 189);
  for (const Cost& cost : {conv_forward(g, 2), conv_data_gradient(g, 2), conv_weight_gradient(g, 2)}) CHECK(cost.mac == 84 * 27);
}

TEST_CASE("roofline: the other kernels by hand", "[cpu]") {
  CHECK(linear_product(10, 3, 5, 2).mac == 150);
  CHECK(linear_product(10, 3, 5, 2).bytes == 160);
  const AttentionGeometry a{2, 4, 5, 7, 8};
  CHECK(attention_forward(a, 2).mac == 2 * 2 * 4 * 5 * 7 * 8);
  CHECK(attention_forward(a, 2).bytes == 2 * 2 * 4 * 8 * (2 * 5 + 2 * 7));
  CHECK(attention_backward(a, 2).mac == 2.5 * attention_forward(a, 2).mac);
  const SamplerGeometry s{2, 100, 5, 4, 6, 8};   // 2 x 5 x 4 x 6 = 240 samples
  CHECK(sampler_forward(s, 2).mac == 4 * 8 * 240);
  CHECK(sampler_forward(s, 2).bytes == 2 * 2 * (100 * 32 + 5 * 32 + 3 * 120));
  CHECK(sampler_backward(s, 2).mac == 8 * 8 * 240);
  CHECK(sampler_backward(s, 2).bytes == 2 * 2 * (2 * 100 * 32 + 5 * 32 + 6 * 120));
  CHECK(batch_norm_forward(100, 2, false).bytes + batch_norm_backward(100, 2, true, 0, false).bytes == 8 * 200);
  CHECK(batch_norm_forward(100, 2, true).bytes == 4 * 200);
  CHECK(batch_norm_inference(100, 2, false).bytes == 2 * 200);
  CHECK(batch_norm_backward(100, 2, true, 1, true).bytes == (2 * 3 + 2) * 200);
  CHECK(batch_norm_backward(100, 2, false, 1, true).bytes == 4 * 200);
  CHECK(layer_norm_forward(10, 4, 2, true).bytes == 10 * (4 * 2 * 4 + 8));
  CHECK(layer_norm_backward(10, 4, 2).bytes == 10 * (4 * 2 * 3 + 8));
  CHECK(detection_loss(2, 5, 3, 2).bytes == 120);
}

TEST_CASE("roofline: floors of the sampler at a step's shapes", "[cpu]") {
  const SamplerGeometry decoder{16, 8400, 500, 8, 12, 32}, encoder{2, 22223, 22223, 8, 16, 32};
  expect_floor(sampler_forward(decoder, 2), 0.018, 0.001);
  expect_floor(sampler_backward(decoder, 2), 0.035, 0.001);
  expect_floor(sampler_forward(encoder, 2), 0.019, 0.001);
  expect_floor(sampler_backward(encoder, 2), 0.032, 0.001);
}

TEST_CASE("model cost: floors by part", "[cpu]") {
  for (const PartFloors& row : kParts) {
    INFO(row.variant << " with " << row.images << " images");
    const ModelCost cost = training_cost(models::variant_config(row.variant), row.images, 640, 500);
    expect_floor(cost.stem, row.stem, 0.01);
    expect_floor(cost.backbone, row.backbone, 0.01);
    expect_floor(cost.encoder_convs, row.encoder_convs, 0.01);
    expect_floor(cost.decoder_input, row.decoder_input, 0.01);
    expect_floor(cost.batch_norm, row.batch_norm, 0.01);
    expect_floor(cost.aifi, row.aifi, 0.01);
    expect_floor(cost.heads, row.heads, 0.01);
    expect_floor(cost.values, row.values, 0.01);
    expect_floor(cost.decoder, row.decoder, 0.01);
    expect_floor(cost.total(), row.sum, 0.1);
  }
}

TEST_CASE("model cost: GFLOP of a training picture", "[cpu]") {
  expect_close(2e-9 * training_cost(models::variant_config("r50"), 1, 640, 500).total().mac, 412.5, 0.005);
}

TEST_CASE("model cost: other picture sizes", "[cpu]") {
  const auto floor = [](std::int64_t size) { return training_cost(models::variant_config("r50"), 16, size, 500).total(); };
  expect_floor(floor(480), 7.4, 0.1);
  expect_floor(floor(544), 9.3, 0.1);
  expect_floor(floor(736), 16.5, 0.1);
  expect_floor(floor(800), 19.4, 0.1);
}

TEST_CASE("model cost: the walk meets every convolution of the model", "[cpu]") {
  for (const char* variant : {"r18", "r34", "r50m", "r50", "r101"}) {
    INFO(variant);
    const models::ModelConfig config = models::variant_config(variant);
    std::int64_t convolutions = 0, weights = 0;
    const models::RtDetr model(config);
    for (const Parameter& parameter : model.parameters().all()) {
      if (parameter.shape().rank() != 4) continue;
      ++convolutions;
      weights += parameter.shape().numel();
    }
    const ModelCost cost = training_cost(config, 1, 640, 500);
    CHECK(cost.convolutions == convolutions);
    CHECK(cost.conv_weights == weights);
  }
  CHECK(training_cost(models::variant_config("r50"), 1, 640, 500).convolutions == 94 + 3);   // three of them the decoder's
}

TEST_CASE("model cost: sizes that no model takes are refused", "[cpu]") {
  test::expect_throws<InvalidArgument>([] { training_cost(models::variant_config("r50"), 1, 650, 500); }, "multiple of 32");
  models::ModelConfig config = models::variant_config("r50");
  config.backbone.depth = 7;
  test::expect_throws<ConfigError>([&] { training_cost(config, 1, 640, 500); }, "depth 7");
}

}  // namespace

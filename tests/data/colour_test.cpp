#include <array>
#include <limits>
#include <string>

#include "data/colour.h"
#include "tests/catch.h"
#include "tests/data/image_support.h"
#include "tests/support.h"

namespace detr::data {
namespace {

using test::expect_throws;
using test::pattern;
using test::sha256;
using Adjust = void (*)(Image&, double);

TEST_CASE("adjust_...: the bytes of Pillow 11.3 and torchvision 0.29", "[cpu]") {
  struct Case {
    Adjust adjust;
    double factor;
    const char* hash;
  };
  // sha256 of torchvision.transforms.functional.adjust_...(Image.fromarray(pattern(160, 120)), factor).tobytes()
  const std::array<Case, 22> cases = {{
      {adjust_brightness, 0.5, "d4c56294a71a5fa77ab2aeb8cf9cbf0fcd848b58adc9bdb6cd258399c1360d68"},
      {adjust_brightness, 0.875, "424534a144c74941a8b45e66c7e44ea24188b53078b6152a9ccdd6cf8137aed9"},
      {adjust_brightness, 1.125, "b7984c819af49efe39a46c95b0d4f73193265a62a5203bd76e532eb6c0a8daca"},
      {adjust_brightness, 1.5, "a1f647ad45adbe4f9c444726bbc03f5bd1ba3441983c4bede89e4339526479d1"},
      {adjust_brightness, 2.7, "5049c74c8626022521fff2ba7ed455ca2a17d319fa1e8af24a8a10dc83429dfb"},
      {adjust_contrast, 0.5, "9d2c5d16f195af4cee4b6821d2e1f45fc023baf6fd71ba6ca555e1cfbef06604"},
      {adjust_contrast, 0.875, "845dc4f7c5d010fa40e75611cee2edee8cc9c0e8ed2515ef66e9253eeaef6278"},
      {adjust_contrast, 1.125, "91b2f524bc55fcd0165e6364259c1218cd1ad339b4d24fa0f587df1586db5571"},
      {adjust_contrast, 1.5, "1f9458e4c87af52b788f7ed4d2d8ebd16223359e85c762cdf49a74f0610413a9"},
      {adjust_contrast, 2.7, "69b9fe27b5bf2aaab2580a287949f51dac6a8a3f669683781651bf258024816d"},
      {adjust_saturation, 0.5, "fadeae4bc16b4da6af56f06dd0fef1aa5c3a6a9491eae26fd257d54a71639cc9"},
      {adjust_saturation, 0.875, "93082d393b387aaaa1013e969f7e995143b392fb32e3c4f37913d9d3fb96adbb"},
      {adjust_saturation, 1.125, "36eda2b7f1aa0651b7604d10ec190ccae3add922a1d30d1c67b5a30e81eea056"},
      {adjust_saturation, 1.5, "c7749b7da6ec54dc82e26655e5697ee4f9e5501ba5c5f1eb776c17a68c2e8981"},
      {adjust_saturation, 2.7, "5c0058b293c62410fde07386f8dd70c37128739e3f803b3dfad8b08a2ac2afd8"},
      {adjust_hue, -0.5, "a4846f4571253da8e995eb254d95e759ffd52fe824cddcc7b7806e39def52740"},
      {adjust_hue, -0.05, "1dadb90f88aa71a320452e2bdc705f86c2c55954c8f7ab3c2918b23954f681b6"},
      {adjust_hue, -0.001, "995c579b6228056089d5e5fb828ac26dc34341d6bb5ea9133648a9553506fdda"},
      {adjust_hue, 0, "995c579b6228056089d5e5fb828ac26dc34341d6bb5ea9133648a9553506fdda"},
      {adjust_hue, 0.013, "b560d8f0a7ec050a969252af31d2ae33110c2459d26853ac00eea8fa7cbe67ec"},
      {adjust_hue, 0.05, "c49522e53bf43ef0dc36b5757258322fca27949dc5bc2ead23f828b4201d6437"},
      {adjust_hue, 0.5, "492d63bffff6083966867abebb98fc4f06b4a657eb0dbab23a23028b0c0ae4af"},
  }};
  for (std::size_t i = 0; i < cases.size(); ++i) {
    Image image = pattern(160, 120);
    cases[i].adjust(image, cases[i].factor);
    INFO("case " << i << ", factor " << cases[i].factor);
    CHECK(sha256(image.rgb) == cases[i].hash);
  }
}

TEST_CASE("adjust_...: numbers worked by hand", "[cpu]") {
  const auto adjusted = [](Adjust adjust, double factor, std::vector<std::uint8_t> pixels) {
    Image image(static_cast<std::int64_t>(pixels.size() / 3), 1);
    image.rgb = std::move(pixels);
    adjust(image, factor);
    return image.rgb;
  };
  using Bytes = std::vector<std::uint8_t>;
  CHECK(adjusted(adjust_brightness, 1.5, {10, 200, 91}) == Bytes{15, 255, 136});   // 136.5 is cut
  CHECK(adjusted(adjust_brightness, 0, {10, 200, 91}) == Bytes{0, 0, 0});
  // Mean luma of 0 and 101 is 50.5, rounded to 51: 51 - 25.5 is cut to 25, and 51 + 25 is 76.
  CHECK(adjusted(adjust_contrast, 0.5, {0, 0, 0, 101, 101, 101}) == Bytes{25, 25, 25, 76, 76, 76});
  // Luma of pure red: (255 * 19595 + 32768) / 65536 = 76.
  CHECK(adjusted(adjust_saturation, 0, {255, 0, 0}) == Bytes{76, 76, 76});
  CHECK(adjusted(adjust_saturation, 2, {255, 0, 0, 7, 7, 7}) == Bytes{255, 0, 0, 7, 7, 7});
  // A tenth of the circle is 25 of 255 steps: red with 25 * 6 / 255 of the way to yellow, 0.588 * 255 = 150.
  CHECK(adjusted(adjust_hue, 0.1, {255, 0, 0}) == Bytes{255, 150, 0});
  CHECK(adjusted(adjust_hue, 0.3, {90, 90, 90}) == Bytes{90, 90, 90});
}

TEST_CASE("adjust_...: a factor of 1 changes nothing, an empty picture is no trouble", "[cpu]") {
  for (const Adjust adjust : {adjust_brightness, adjust_contrast, adjust_saturation}) {
    Image image = pattern(31, 7), empty;
    adjust(image, 1);
    CHECK(image.rgb == pattern(31, 7).rgb);
    adjust(empty, 1.5);
    CHECK(empty.rgb.empty());
  }
}

TEST_CASE("adjust_...: errors", "[cpu]") {
  Image image = pattern(2, 2);
  expect_throws<InvalidArgument>([&] { adjust_brightness(image, -0.1); }, "adjust_brightness: factor");
  expect_throws<InvalidArgument>([&] { adjust_contrast(image, std::numeric_limits<double>::infinity()); }, "adjust_contrast: factor");
  expect_throws<InvalidArgument>([&] { adjust_saturation(image, std::numeric_limits<double>::quiet_NaN()); },
                                 "adjust_saturation: factor");
  expect_throws<InvalidArgument>([&] { adjust_hue(image, 0.51); }, "adjust_hue: factor must be -0.5 to 0.5, got 0.51");
}

}  // namespace
}  // namespace detr::data

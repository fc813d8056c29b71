#include <array>
#include <string>

#include "data/image.h"
#include "tests/catch.h"
#include "tests/data/image_support.h"
#include "tests/support.h"

namespace detr::data {
namespace {

using test::expect_throws;
using test::pattern;
using test::sha256;

TEST_CASE("resize_bilinear: the bytes of Pillow 11.3", "[cpu]") {
  struct Case {
    std::int64_t width, height, to_width, to_height;
    const char* hash;
  };
  // sha256(Image.fromarray(pattern).resize((to_width, to_height), Image.BILINEAR).tobytes())
  const std::array<Case, 11> cases = {{
      {64, 48, 96, 80, "35a9e3fe00b85d286dec1316c9a0e3d183c4bcffbf842e8bdcaceed933ec5e2b"},
      {64, 48, 20, 33, "8d579860d3be913abc994ad6ac3297deac0bbf136e1ccefb32e58a99a16d3ee6"},
      {37, 53, 91, 20, "e8c2107a3bf596ad18c9c2f9e5796a7531b64668eaa3862d0c969617776d692a"},
      {53, 37, 20, 91, "3b75ee2452c610d8afad1b093c554d690518119b807efb02a3fd1af05f41cd8b"},
      {64, 48, 64, 20, "45260abbf5737e3a15d1c1836d1fcc9f698994f1d95ee392f27bf81a00bae59d"},
      {64, 48, 20, 48, "b9eb3314807c226f5c5e21a17b1df0ec6dd060595f88e3065f56e465e03c2fc4"},
      {1, 1, 7, 9, "f0bb46cee20489136bc1fc1c55b978a85cc242a550ea27cb9d8dad63137e915c"},
      {2, 1, 640, 3, "5c6294fdbb2515a249285482c8b7194dc19aff48b4c28b475936cd130b32476f"},
      {75, 3, 32, 32, "82db8ac7f33e018a7d49b542782c15b0c9def3dfb5aace73b583a64abb44de5f"},
      {129, 97, 1, 1, "405f9c173412b8ad313fcfff01f7843846ed0b929e1921838fe85af9f7571be6"},
      {200, 5, 3, 200, "ce272e673178e045eb1bd0f2beab12d8226e4d59a224497d8b1e255c6d974e1b"},
  }};
  for (const Case& c : cases) {
    const Image resized = resize_bilinear(pattern(c.width, c.height), c.to_width, c.to_height);
    INFO(c.width << " x " << c.height << " to " << c.to_width << " x " << c.to_height);
    CHECK(resized.width == c.to_width);
    CHECK(resized.height == c.to_height);
    CHECK(sha256(resized.rgb) == c.hash);
  }
}

TEST_CASE("resize_bilinear: numbers worked by hand", "[cpu]") {
  Image two(2, 1);
  two.rgb = {0, 10, 255, 100, 20, 0};
  // Twice as wide: new centres lie a quarter of a pixel beside the old ones, so the weights are 3/4 and 1/4; halves round up.
  CHECK(resize_bilinear(two, 4, 1).rgb == std::vector<std::uint8_t>{0, 10, 255, 25, 13, 191, 75, 18, 64, 100, 20, 0});

  Image four(4, 1);
  four.rgb = {0, 0, 0, 70, 70, 70, 140, 140, 140, 210, 210, 210};
  // Half as wide: the triangle reaches 2 pixels to each side, weights 1/4, 3/4, 3/4, 1/4 over what lies in the picture.
  // Left: (3/4 0 + 3/4 70 + 1/4 140) / (7/4) = 50.
  CHECK(resize_bilinear(four, 2, 1).rgb == std::vector<std::uint8_t>{50, 50, 50, 160, 160, 160});
}

TEST_CASE("resize_bilinear: a size that stays is not touched, a flat picture stays flat", "[cpu]") {
  const Image image = pattern(33, 17);
  CHECK(resize_bilinear(image, 33, 17).rgb == image.rgb);
  Image flat(5, 4);
  flat.rgb.assign(flat.rgb.size(), 255);
  const Image large = resize_bilinear(flat, 641, 3);
  CHECK(large.rgb == std::vector<std::uint8_t>(641 * 3 * 3, 255));
}

TEST_CASE("resize_bilinear: errors", "[cpu]") {
  expect_throws<InvalidArgument>([] { resize_bilinear(Image(), 4, 4); }, "picture is empty");
  expect_throws<InvalidArgument>([] { resize_bilinear(Image(4, 4), 0, 4); }, "must be positive, got 0 x 4");
}

}  // namespace
}  // namespace detr::data

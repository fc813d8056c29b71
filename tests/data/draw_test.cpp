#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "data/draw.h"
#include "data/font.h"
#include "tests/catch.h"
#include "tests/support.h"

namespace detr::data {
namespace {

using Colour = std::array<std::uint8_t, 3>;
constexpr Colour kBlack = {0, 0, 0}, kWhite = {255, 255, 255}, kGrey = {128, 128, 128};

Image grey_picture(std::int64_t width, std::int64_t height) {
  Image image(width, height);
  image.rgb.assign(image.rgb.size(), 128);
  return image;
}

Colour colour_at(const Image& image, std::int64_t x, std::int64_t y) {
  const std::uint8_t* pixel = image.at(x, y);
  return {pixel[0], pixel[1], pixel[2]};
}

/// Left, top, right and bottom (exclusive) of all pixels of one colour; four zeros if there is none.
std::array<std::int64_t, 4> extent(const Image& image, const Colour& colour) {
  std::array<std::int64_t, 4> box = {image.width, image.height, 0, 0};
  for (std::int64_t y = 0; y < image.height; ++y) {
    for (std::int64_t x = 0; x < image.width; ++x) {
      if (colour_at(image, x, y) != colour) continue;
      box = {std::min(box[0], x), std::min(box[1], y), std::max(box[2], x + 1), std::max(box[3], y + 1)};
    }
  }
  return box[2] == 0 ? std::array<std::int64_t, 4>{} : box;
}

using Extent = std::array<std::int64_t, 4>;

TEST_CASE("draw_boxes: outline of 2 px inside the box, nothing else", "[cpu]") {
  Image image = grey_picture(100, 80);
  const std::vector<DrawnBox> boxes = {{{10.4, 20, 50, 60.2}, 3, "", false}};
  draw_boxes(image, boxes);
  const Colour colour = class_colour(3);
  CHECK(extent(image, colour) == Extent{10, 20, 50, 61});
  CHECK(std::count(image.rgb.begin(), image.rgb.end(), 128) == (100 * 80 - (40 * 41 - 36 * 37)) * 3);
  CHECK(colour_at(image, 11, 30) == colour);
  CHECK(colour_at(image, 12, 30) == kGrey);
  CHECK(colour_at(image, 48, 30) == colour);
}

TEST_CASE("draw_boxes: the outline is 1/300 of the longer side", "[cpu]") {
  Image image = grey_picture(40, 1500);
  draw_boxes(image, std::vector<DrawnBox>{{{5, 100, 35, 1400}, 0, "", false}});
  CHECK(colour_at(image, 9, 700) == class_colour(0));
  CHECK(colour_at(image, 10, 700) == kGrey);
}

TEST_CASE("draw_boxes: truth is dashed", "[cpu]") {
  Image image = grey_picture(100, 80);
  draw_boxes(image, std::vector<DrawnBox>{{{10, 20, 70, 60}, 3, "", true}});
  // Dashes and gaps of three outline widths.
  CHECK(colour_at(image, 15, 20) == class_colour(3));
  CHECK(colour_at(image, 16, 20) == kGrey);
  CHECK(colour_at(image, 21, 20) == kGrey);
  CHECK(colour_at(image, 22, 20) == class_colour(3));
  CHECK(colour_at(image, 10, 31) == kGrey);
}

TEST_CASE("draw_boxes: the label is above the box, or inside at the upper edge, and never leaves the picture", "[cpu]") {
  const auto strip = [](const std::array<double, 4>& box, const std::string& text) {
    Image image = grey_picture(200, 100);
    draw_boxes(image, std::vector<DrawnBox>{{box, 0, text, false}});
    Image outline = grey_picture(200, 100);
    draw_boxes(outline, std::vector<DrawnBox>{{box, 0, "", false}});
    Image only = grey_picture(200, 100);   // what the label changed
    for (std::size_t i = 0; i < only.rgb.size(); i += 3) {
      if (!std::equal(&image.rgb[i], &image.rgb[i] + 3, &outline.rgb[i])) std::fill_n(&only.rgb[i], 3, std::uint8_t{1});
    }
    return extent(only, {1, 1, 1});
  };
  CHECK(strip({20, 50, 80, 90}, "cat") == Extent{20, 36, 40, 50});
  CHECK(strip({20, 5, 80, 90}, "cat")[1] == 7);           // from 5 on, but the outline has the same colour
  CHECK(strip({20, 5, 80, 90}, "cat")[3] == 19);
  CHECK(strip({190, 50, 199, 90}, "cat 0.87") == Extent{150, 36, 200, 50});
  const Extent cut = strip({20, 50, 80, 90}, std::string(80, 'm'));
  CHECK(cut == Extent{0, 36, 200, 50});
}

TEST_CASE("draw_boxes: text in black or white by contrast", "[cpu]") {
  const auto has = [](std::int64_t label, const Colour& colour) {
    Image image = grey_picture(200, 100);
    draw_boxes(image, std::vector<DrawnBox>{{{20, 50, 80, 90}, label, "cat", false}});
    return extent(image, colour) != Extent{};
  };
  CHECK(has(9, kBlack));    // yellow
  CHECK(!has(9, kWhite));
  CHECK(has(2, kWhite));    // blue
  CHECK(!has(2, kBlack));
}

TEST_CASE("draw_boxes: boxes beside, beyond or without sense, and pictures of any size", "[cpu]") {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  const std::vector<DrawnBox> absent = {{{-9, 2, -1, 5}, 0, "x", false},        {{300, 2, 400, 5}, 0, "x", false},
                                        {{nan, 2, 4, 5}, 0, "x", false},        {{0, 2, infinity, 5}, 0, "x", false},
                                        {{40, 2, 20, 5}, 0, "turned", false}};
  Image image = grey_picture(60, 40);
  draw_boxes(image, absent);
  CHECK(image.rgb == grey_picture(60, 40).rgb);

  const std::vector<DrawnBox> odd = {{{-1e30, -1e30, 1e30, 1e30}, -7, "everywhere", true}, {{3, 3, 3, 3}, 1, "point", false}};
  draw_boxes(image, odd);
  CHECK(colour_at(image, 0, 39) == class_colour(-7));
  for (const auto& [width, height] : {std::pair{1, 1}, std::pair{1, 2}, std::pair{700, 1}, std::pair{3, 900}, std::pair{0, 0}}) {
    Image small = grey_picture(width, height);
    draw_boxes(small, odd);
    CHECK(small.rgb.size() == static_cast<std::size_t>(width * height * 3));
  }
}

TEST_CASE("class_colour: twenty distinct hues, then again from the first", "[cpu]") {
  std::set<Colour> colours;
  for (std::int64_t label = 0; label < 20; ++label) colours.insert(class_colour(label));
  CHECK(colours.size() == 20);
  CHECK(class_colour(0) == Colour{255, 38, 38});
  CHECK(class_colour(23) == class_colour(3));
  CHECK(class_colour(-1) == class_colour(19));
}

TEST_CASE("glyph_of: Latin-1 has distinct drawings, the rest is a hollow box", "[cpu]") {
  const Glyph hollow = glyph_of(0x65e5);
  CHECK(hollow == Glyph{0, 0, 0, 31, 17, 17, 17, 17, 17, 31, 0, 0});
  std::set<Glyph> seen = {hollow};
  for (char32_t code = 32; code < 256; ++code) {
    INFO("code " << static_cast<unsigned>(code));
    const Glyph glyph = glyph_of(code);
    if (code >= 127 && code < 160) {
      CHECK(glyph == hollow);
    } else if (code == 0xa0 || code == 0xad) {
      CHECK(glyph == glyph_of(code == 0xa0 ? ' ' : '-'));
    } else {
      CHECK(seen.insert(glyph).second);
    }
    CHECK(std::all_of(glyph.begin(), glyph.end(), [](std::uint8_t row) { return row < 32; }));
  }
  CHECK(glyph_of('L') == Glyph{0, 0, 0, 16, 16, 16, 16, 16, 16, 31, 0, 0});
  // Accents: a letter keeps its rows below, an i loses its dot.
  CHECK(glyph_of(0xc8) == Glyph{8, 4, 0, 31, 16, 16, 30, 16, 16, 31, 0, 0});
  CHECK(glyph_of(0xec) == Glyph{0, 0, 8, 4, 0, 12, 4, 4, 4, 14, 0, 0});
}

TEST_CASE("decode_utf8: characters, and one replacement for each broken sequence", "[cpu]") {
  CHECK(decode_utf8("a\xc3\xa4\xe6\x97\xa5\xf0\x9f\x98\x80") == U"a\u00e4\u65e5\U0001f600");
  CHECK(decode_utf8("\xff" "b\xc3" "c\xe6\x97") == U"\ufffd" U"b\ufffd" U"c\ufffd");
  CHECK(decode_utf8("").empty());
}

}  // namespace
}  // namespace detr::data

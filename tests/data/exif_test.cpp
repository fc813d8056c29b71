#include "data/exif.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "tests/catch.h"
#include "tests/data/image_support.h"
#include "tests/support.h"

namespace detr::data {
namespace {

using namespace test::bytes;
using test::pattern;

/// What an orientation means, by where the stored first row and first column are shown (EXIF 2.3, table of tag 0x0112): the
/// stored pixel behind a shown one.
std::array<std::int64_t, 2> stored_pixel(int orientation, std::int64_t width, std::int64_t height, std::int64_t x, std::int64_t y) {
  switch (orientation) {
    case 1: return {x, y};                            // row at the top, column on the left
    case 2: return {width - 1 - x, y};                // top, right
    case 3: return {width - 1 - x, height - 1 - y};   // bottom, right
    case 4: return {x, height - 1 - y};               // bottom, left
    case 5: return {y, x};                            // left, top
    case 6: return {y, height - 1 - x};               // right, top
    case 7: return {width - 1 - y, height - 1 - x};   // right, bottom
    default: return {width - 1 - y, x};               // left, bottom
  }
}

void expect_shown(const Image& shown, const Image& stored, int orientation) {
  const bool swapped = orientation >= 5;
  REQUIRE(shown.width == (swapped ? stored.height : stored.width));
  REQUIRE(shown.height == (swapped ? stored.width : stored.height));
  bool same = true;
  for (std::int64_t y = 0; y < shown.height; ++y) {
    for (std::int64_t x = 0; x < shown.width; ++x) {
      const auto [from_x, from_y] = stored_pixel(orientation, stored.width, stored.height, x, y);
      same = same && std::equal(shown.at(x, y), shown.at(x, y) + 3, stored.at(from_x, from_y));
    }
  }
  CHECK(same);
}

TEST_CASE("apply_orientation: all eight, across tiles and down to one pixel", "[cpu]") {
  for (int orientation = 1; orientation <= 8; ++orientation) {
    INFO("orientation " << orientation);
    for (const auto& [width, height] : {std::pair{150, 67}, std::pair{2, 1}, std::pair{1, 1}}) {
      expect_shown(apply_orientation(pattern(width, height), orientation), pattern(width, height), orientation);
    }
  }
  test::expect_throws<InvalidArgument>([] { apply_orientation(pattern(2, 2), 9); }, "orientation must be 1 to 8, got 9");
  test::expect_throws<InvalidArgument>([] { apply_orientation(pattern(2, 2), 0); }, "orientation must be 1 to 8, got 0");
}

TEST_CASE("decode_image: all eight orientations in a JPEG and a PNG, in both byte orders", "[cpu]") {
  const test::TempDir folder;
  const auto write = [&](const Bytes& bytes) { test::write_text(folder / "x", std::string(bytes.begin(), bytes.end())); };
  const Image image = pattern(20, 12);
  const Bytes jpeg = encode_jpeg(image), png = encode_png(image);
  write(jpeg);
  const Image lossy = decode_image(folder / "x").image;
  for (int orientation = 1; orientation <= 8; ++orientation) {
    for (const bool big_endian : {false, true}) {
      INFO("orientation " << orientation << ", big endian " << big_endian);
      const Bytes block = tiff(static_cast<std::uint32_t>(orientation), big_endian);
      write(with_markers(jpeg, exif_marker(block)));
      const DecodeResult result = decode_image(folder / "x");
      expect_shown(result.image, lossy, orientation);
      CHECK(result.orientation == orientation);
      CHECK(result.turned == (orientation != 1));
      CHECK(result.stored_width == 20);
      CHECK(decode_image(folder / "x", Exif::ignore).image.rgb == lossy.rgb);
      CHECK(read_image_header(folder / "x").orientation == orientation);

      // The chunk may stand before or behind the pixel data.
      for (const std::ptrdiff_t at : {std::ptrdiff_t{33}, static_cast<std::ptrdiff_t>(png.size()) - 12}) {
        Bytes with_chunk = png;
        const Bytes chunk = png_chunk("eXIf", block);
        with_chunk.insert(with_chunk.begin() + at, chunk.begin(), chunk.end());
        write(with_chunk);
        expect_shown(decode_image(folder / "x").image, image, orientation);
        CHECK(read_image_header(folder / "x").orientation == orientation);
      }
    }
  }
}

TEST_CASE("exif_orientation: a wrong block states nothing", "[cpu]") {
  CHECK(exif_orientation(tiff(6, false)) == 6);
  CHECK(exif_orientation(tiff(6, true, 4)) == 6);
  CHECK(exif_orientation(Bytes{'E', 'x', 'i', 'f', 0, 0} + tiff(3, true)) == 3);
  for (const std::uint32_t value : {0u, 9u, 65535u}) CHECK(exif_orientation(tiff(value, false)) == 0);
  CHECK(exif_orientation(tiff(0x10006, false, 4)) == 0);
  CHECK(exif_orientation(tiff(6, false, 2)) == 0);   // text
  CHECK(exif_orientation({}) == 0);
  CHECK(exif_orientation(bytes_of("http://ns.adobe.com/xap/1.0/")) == 0);
  const Bytes block = tiff(6, false);
  for (std::size_t count = 0; count < block.size(); ++count) {
    INFO(count << " bytes");
    CHECK(exif_orientation(first(block, count)) == (count < 34 ? 0 : 6));   // 8 + 2 + two entries of 12
  }
  Bytes far = block;
  far[7] = 0xff;   // the directory lies beyond the block
  CHECK(exif_orientation(far) == 0);
  Bytes many(8, 0);
  many = first(block, 8) + Bytes{0xff, 0xff} + Bytes(30);   // 65535 entries
  CHECK(exif_orientation(many) == 0);
}

TEST_CASE("exif_orientation: rubbish stays within bounds", "[cpu]") {
  std::uint32_t state = 1;
  const auto random_byte = [&] {
    state = state * 1664525 + 1013904223;
    return static_cast<std::uint8_t>(state >> 24);
  };
  for (int round = 0; round < 2000; ++round) {
    Bytes block = round % 2 ? tiff(6, round % 4 == 1) : first(tiff(6, round % 4 == 0), 8) + Bytes(40);
    for (int i = 0; i < 4; ++i) block[random_byte() % block.size()] = random_byte();
    const int orientation = exif_orientation(block);
    REQUIRE(orientation >= 0);
    REQUIRE(orientation <= 8);
  }
}

TEST_CASE("decode_image: several EXIF blocks, the first that states an orientation counts", "[cpu]") {
  const test::TempDir folder;
  const auto orientation = [&](const Bytes& segments) {
    const Bytes bytes = with_markers(encode_jpeg(pattern(8, 8)), segments);
    test::write_text(folder / "x.jpg", std::string(bytes.begin(), bytes.end()));
    CHECK(read_image_header(folder / "x.jpg").orientation == decode_image(folder / "x.jpg").orientation);
    return decode_image(folder / "x.jpg").orientation;
  };
  const Bytes rubbish = exif_marker(bytes_of("rubbish")), xmp = marker(0xe1, bytes_of("http://ns.adobe.com/xap/1.0/"));
  CHECK(orientation({}) == 1);
  CHECK(orientation(rubbish) == 1);
  CHECK(orientation(exif_marker(tiff(77, true))) == 1);
  CHECK(orientation(rubbish + xmp + exif_marker(tiff(8, true))) == 8);
  CHECK(orientation(exif_marker(tiff(3, true)) + exif_marker(tiff(6, true))) == 3);
}

TEST_CASE("exif_turns: unless only the stored size fits the json's", "[cpu]") {
  const ImageHeader turned{100, 40, 6}, mirrored{100, 40, 2}, square{50, 50, 6}, plain{100, 40, 1};
  CHECK(exif_turns(turned, Exif::automatic, 40, 100));
  CHECK(!exif_turns(turned, Exif::automatic, 100, 40));
  CHECK(exif_turns(turned, Exif::automatic, 0, 0));
  CHECK(exif_turns(turned, Exif::automatic, -1, -1));
  CHECK(exif_turns(turned, Exif::automatic, 80, 200));
  CHECK(exif_turns(turned, Exif::apply, 100, 40));
  CHECK(!exif_turns(turned, Exif::ignore, 40, 100));
  CHECK(exif_turns(mirrored, Exif::automatic, 100, 40));
  CHECK(exif_turns(square, Exif::automatic, 50, 50));
  CHECK(!exif_turns(plain, Exif::apply, 40, 100));

  const test::TempDir folder;
  const Bytes bytes = with_markers(encode_jpeg(pattern(100, 40)), exif_marker(tiff(6, true)));
  test::write_text(folder / "x.jpg", std::string(bytes.begin(), bytes.end()));
  CHECK(decode_image(folder / "x.jpg", Exif::automatic, 40, 100).image.width == 40);
  const DecodeResult as_stored = decode_image(folder / "x.jpg", Exif::automatic, 100, 40);
  CHECK(as_stored.image.width == 100);
  CHECK(!as_stored.turned);
  CHECK(as_stored.orientation == 6);
}

}  // namespace
}  // namespace detr::data

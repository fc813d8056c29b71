#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

// jpeglib.h needs FILE from <cstdio>.
#include <jpeglib.h>

#include "data/exif.h"
#include "data/image.h"
#include "tests/catch.h"
#include "tests/data/image_support.h"
#include "tests/support.h"

namespace detr::data {
namespace {

namespace fs = std::filesystem;
using namespace test::bytes;
using test::expect_throws;
using test::pattern;

/// A folder with one file that is written anew for each decoding.
class Scratch {
 public:
  fs::path write(const Bytes& bytes, const std::string& name = "x.jpg") const {
    test::write_text(folder_ / name, std::string(bytes.begin(), bytes.end()));
    return folder_ / name;
  }
  DecodeResult decode(const Bytes& bytes, Exif exif = Exif::automatic, std::int64_t width = 0, std::int64_t height = 0) const {
    return decode_image(write(bytes), exif, width, height);
  }
  /// Fails the test unless decoding throws a DataError of one line that names the file and contains `text`.
  void expect_error(const Bytes& bytes, const std::string& text) const {
    expect_throws<DataError>([&] { decode(bytes); }, text);
    expect_throws<DataError>([&] { decode(bytes); }, (folder_ / "x.jpg").string() + ": ");
  }
  const test::TempDir& folder() const { return folder_; }

 private:
  test::TempDir folder_;
};

double mean_difference(const Image& a, const Image& b) {
  REQUIRE(a.rgb.size() == b.rgb.size());
  double sum = 0;
  for (std::size_t i = 0; i < a.rgb.size(); ++i) sum += std::abs(a.rgb[i] - b.rgb[i]);
  return sum / static_cast<double>(a.rgb.size());
}

/// Broad bars, which JPEG keeps well.
Image bars(std::int64_t width, std::int64_t height) {
  Image image(width, height);
  for (std::int64_t y = 0; y < height; ++y) {
    for (std::int64_t x = 0; x < width; ++x) {
      image.at(x, y)[0] = static_cast<std::uint8_t>(x * 255 / width);
      image.at(x, y)[1] = static_cast<std::uint8_t>(y * 255 / height);
      image.at(x, y)[2] = y / 8 % 2 ? 200 : 60;
    }
  }
  return image;
}

/// A JPEG of another kind than encode_jpeg makes, by libjpeg directly: `configure` runs before the start.
Bytes special_jpeg(const Bytes& samples, J_COLOR_SPACE space, int components, std::int64_t width,
                   const std::function<void(jpeg_compress_struct&)>& configure) {
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* memory = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &memory, &size);
  info.image_width = static_cast<JDIMENSION>(width);
  info.image_height = static_cast<JDIMENSION>(static_cast<std::int64_t>(samples.size()) / width / components);
  info.input_components = components;
  info.in_color_space = space;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, 100, TRUE);
  configure(info);
  jpeg_start_compress(&info, TRUE);
  Bytes row(static_cast<std::size_t>(width * components));
  while (info.next_scanline < info.image_height) {
    std::copy_n(samples.begin() + static_cast<std::ptrdiff_t>(info.next_scanline * row.size()), row.size(), row.begin());
    JSAMPROW pointer = row.data();
    jpeg_write_scanlines(&info, &pointer, 1);
  }
  jpeg_finish_compress(&info);
  const Bytes bytes(memory, memory + size);
  jpeg_destroy_compress(&info);
  std::free(memory);
  return bytes;
}

Bytes progressive_jpeg(const Image& image) {
  return special_jpeg(image.rgb, JCS_RGB, 3, image.width, [](jpeg_compress_struct& info) { jpeg_simple_progression(&info); });
}

const Bytes kPngSignature = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
Bytes png_header(std::uint32_t width, std::uint32_t height, std::uint8_t depth, std::uint8_t colour) {
  Bytes data;
  append(data, width, 4, true);
  append(data, height, 4, true);
  return kPngSignature + png_chunk("IHDR", data + Bytes{depth, colour, 0, 0, 0});
}
/// A zlib stream of one stored block.
Bytes stored(const Bytes& raw) {
  std::uint32_t a = 1, b = 0;
  for (const std::uint8_t byte : raw) a = (a + byte) % 65521, b = (b + a) % 65521;
  Bytes out = {0x78, 0x01, 0x01};
  append(out, static_cast<std::uint32_t>(raw.size()), 2, false);
  append(out, ~static_cast<std::uint32_t>(raw.size()), 2, false);
  out = out + raw;
  append(out, b << 16 | a, 4, true);
  return out;
}

/// Mean RGB of the quadrants in the order of expected.json; with an odd side the middle line counts in both halves.
std::array<std::array<double, 3>, 4> quadrant_means(const Image& image) {
  std::array<std::array<double, 3>, 4> means{};
  for (int quadrant = 0; quadrant < 4; ++quadrant) {
    const std::int64_t left = quadrant % 2 ? image.width / 2 : 0, right = quadrant % 2 ? image.width : (image.width + 1) / 2;
    const std::int64_t top = quadrant / 2 ? image.height / 2 : 0, bottom = quadrant / 2 ? image.height : (image.height + 1) / 2;
    for (std::int64_t y = top; y < bottom; ++y) {
      for (std::int64_t x = left; x < right; ++x) {
        for (int c = 0; c < 3; ++c) means[quadrant][c] += image.at(x, y)[c];
      }
    }
    for (double& mean : means[quadrant]) mean /= static_cast<double>((right - left) * (bottom - top));
  }
  return means;
}

TEST_CASE("decode_image: every file of awkward-images as expected.json says", "[cpu]") {
  const fs::path folder = test::shared_data().empty() ? fs::path() : test::shared_data() / "awkward-images";
  if (folder.empty() || !fs::exists(folder / "expected.json")) SKIP("no shared/data/awkward-images");
  const nlohmann::json expected = nlohmann::json::parse(test::read_text(folder / "expected.json"));
  CHECK(expected.size() == 25);
  for (const auto& [name, want] : expected.items()) {
    INFO(name);
    const std::string rule = want["decode"];
    DecodeResult result;
    try {
      result = decode_image(folder / "files" / name);
    } catch (const DataError& error) {
      CHECK(rule != "ok");
      CHECK(std::string(error.what()).find(name) != std::string::npos);
      continue;
    }
    CHECK(rule != "must-fail-cleanly");
    if (rule == "fail-or-warn") CHECK(!result.warning.empty());
    const ImageHeader header = read_image_header(folder / "files" / name);
    CHECK(result.stored_width == want["stored"][0]);
    CHECK(header.stored_height == want["stored"][1]);
    CHECK(result.image.width == want["shown"][0]);
    CHECK(header.shown_height() == want["shown"][1]);
    CHECK(result.orientation == want.value("orientation", 1));
    CHECK(header.orientation == result.orientation);
    if (want.contains("rgb_sha256")) CHECK(test::sha256(result.image.rgb) == want["rgb_sha256"]);
    if (!want.contains("quadrant_mean_rgb")) continue;
    const auto means = quadrant_means(result.image);
    for (int quadrant = 0; quadrant < 4; ++quadrant) {
      for (int c = 0; c < 3; ++c) CHECK(std::abs(means[quadrant][c] - want["quadrant_mean_rgb"][quadrant][c].get<double>()) < 0.1);
    }
  }
}

TEST_CASE("decode_image: what the writers wrote comes back, whatever the name", "[cpu]") {
  const Scratch scratch;
  const Image sharp = pattern(37, 23), smooth = bars(37, 23);
  CHECK(scratch.decode(encode_png(sharp)).image.rgb == sharp.rgb);
  CHECK(mean_difference(scratch.decode(encode_jpeg(smooth)).image, smooth) < 6);
  CHECK(mean_difference(scratch.decode(encode_jpeg(smooth, 100)).image, smooth) < 3);
  CHECK(mean_difference(scratch.decode(progressive_jpeg(smooth)).image, smooth) < 3);

  write_image(scratch.folder() / "a.PNG", sharp);
  write_image(scratch.folder() / "a.png.jpeg", smooth);
  CHECK(decode_image(scratch.folder() / "a.PNG").image.rgb == sharp.rgb);
  CHECK(decode_image(scratch.folder() / "a.png.jpeg").image.rgb == scratch.decode(encode_jpeg(smooth)).image.rgb);
  CHECK(std::distance(fs::directory_iterator(scratch.folder().path()), fs::directory_iterator()) == 3);   // with x.jpg
}

TEST_CASE("write_image: errors", "[cpu]") {
  const test::TempDir folder;
  expect_throws<StorageError>([&] { write_image(folder / "none" / "a.png", pattern(2, 2)); }, "a.png: cannot be created: ");
  fs::create_directory(folder / "taken.jpg");
  test::write_text(folder / "taken.jpg" / "x", "");
  expect_throws<StorageError>([&] { write_image(folder / "taken.jpg", pattern(2, 2)); }, "taken.jpg: cannot be renamed into place: ");
  CHECK(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()) == 1);
  expect_throws<InvalidArgument>([] { encode_png(Image()); }, "encode_png: the picture is empty");
  Image large;   // its pixels are never touched
  large.width = 20'000, large.height = 10'000;
  expect_throws<InvalidArgument>([&] { encode_png(large); }, "encode_png: the picture is too large: 20000 x 10000");
  expect_throws<InvalidArgument>([] { encode_jpeg(Image()); }, "encode_jpeg: the picture is empty");
  expect_throws<InvalidArgument>([] { encode_jpeg(Image(65'501, 1)); }, "encode_jpeg: at most 65500 pixels a side");
  expect_throws<InvalidArgument>([] { encode_jpeg(pattern(2, 2), 0); }, "quality must be 1 to 100, got 0");
}

TEST_CASE("decode_image: what is no picture is named", "[cpu]") {
  const Scratch scratch;
  expect_throws<DataError>([&] { decode_image(scratch.folder() / "none.jpg"); }, "none.jpg: no such image file");
  fs::create_directory(scratch.folder() / "folder.jpg");
  expect_throws<DataError>([&] { decode_image(scratch.folder() / "folder.jpg"); }, "folder.jpg: is a folder");
  expect_throws<DataError>([&] { decode_image("/dev/null"); }, "not a regular file");
  expect_throws<DataError>([&] { read_image_header(scratch.folder() / "line\nbreak.jpg"); }, "line\\nbreak.jpg: no such image file");
  scratch.expect_error({}, "the image file is empty");
  scratch.expect_error(bytes_of("<html>404</html>"), "not an image (it holds text)");
  scratch.expect_error({1, 2, 3, 0}, "not an image (unknown content)");
  scratch.expect_error({0xff, 0xd8}, "truncated");
  scratch.expect_error({0xff, 0xd8, 0xff}, "truncated");
  scratch.expect_error(first(kPngSignature, 7), "not an image");
  scratch.expect_error(kPngSignature, "truncated");
  scratch.expect_error(bytes_of("RIFF1234WEBPVP8 "), "unsupported image format WebP; convert it");
  scratch.expect_error(Bytes{'I', 'I', '*', 0, 8, 0, 0, 0}, "unsupported image format TIFF");
  scratch.expect_error(Bytes{0, 0, 0, 32} + bytes_of("ftypavif"), "unsupported image format AVIF");
  scratch.expect_error(Bytes{0, 0, 0, 32} + bytes_of("ftypheic"), "unsupported image format HEIF");
  scratch.expect_error(Bytes{0, 0, 0, 12} + bytes_of("jP  \r\n"), "unsupported image format JPEG 2000");
  scratch.expect_error(Bytes{0, 0, 0, 12} + bytes_of("JXL \r\n"), "unsupported image format JPEG XL");
  scratch.expect_error(bytes_of("8BPS") + Bytes{0, 1}, "unsupported image format Photoshop");
}

TEST_CASE("decode_image: sizes are checked before anything is decoded", "[cpu]") {
  const Scratch scratch;
  scratch.expect_error(png_header(65535, 65535, 8, 2) + png_chunk("IDAT", {0}) + png_chunk("IEND", {}), "too large: 65535 x 65535 pixels");
  CHECK(read_image_header(scratch.folder() / "x.jpg").stored_width == 65535);
  Bytes jpeg = encode_jpeg(bars(16, 16));
  const Bytes frame = {0xff, 0xc0, 0, 17, 8};
  const auto at = std::search(jpeg.begin(), jpeg.end(), frame.begin(), frame.end());
  REQUIRE(at != jpeg.end());
  std::fill_n(at + 5, 4, std::uint8_t{0xf0});
  scratch.expect_error(jpeg, "too large: 61680 x 61680 pixels");

  const fs::path file = scratch.write(encode_png(pattern(20, 10)));
  expect_throws<DataError>([&] { decode_image(file, Exif::ignore, 0, 0, {.max_pixels = 199}); }, "20 x 10 pixels; at most 16384 a side and 199");
  expect_throws<DataError>([&] { decode_image(file, Exif::ignore, 0, 0, {.max_side = 19}); }, "at most 19 a side");
  CHECK(decode_image(file, Exif::ignore, 0, 0, {.max_pixels = 200, .max_side = 20}).image.width == 20);
}

TEST_CASE("decode_image: a JPEG cut anywhere fails, or warns and lacks nothing", "[cpu]") {
  const Scratch scratch;
  const Image image = bars(24, 17);
  const auto cut_everywhere = [&](const Bytes& bytes, std::size_t step) {
    const Image whole = scratch.decode(bytes).image;
    std::size_t decoded = 0;
    for (std::size_t count = 0; count < bytes.size(); count += count + 8 < bytes.size() ? step : 1) {
      INFO(count << " of " << bytes.size() << " bytes");
      try {
        const DecodeResult result = scratch.decode(first(bytes, count));
        CHECK(!result.warning.empty());
        CHECK(result.image.rgb == whole.rgb);
        ++decoded;
      } catch (const DataError& error) {
        const std::string text = error.what();
        if (count > 2) CHECK(text.find("truncated") != std::string::npos);
      }
    }
    return decoded;
  };
  // Of a sequential file all but the end marker (2 bytes) and a bit of padding is needed.
  const std::size_t decoded = cut_everywhere(encode_jpeg(image), 9);
  CHECK(decoded >= 2);
  CHECK(decoded <= 3);
  CHECK(cut_everywhere(special_jpeg(image.rgb, JCS_RGB, 3, 24, [](jpeg_compress_struct& info) { info.restart_interval = 2; }), 29) <= 3);
  CHECK(cut_everywhere(progressive_jpeg(image), 29) == 0);
  CHECK(cut_everywhere(special_jpeg(image.rgb, JCS_RGB, 3, 24, [](jpeg_compress_struct& info) { info.arith_code = TRUE; }), 29) == 0);
}

TEST_CASE("decode_image: a PNG cut anywhere fails, or warns and lacks nothing", "[cpu]") {
  const Scratch scratch;
  const Image image = pattern(19, 5);
  const Bytes bytes = encode_png(image);
  for (std::size_t count = 8; count < bytes.size(); count += count > 60 && count + 40 < bytes.size() ? 9 : 1) {
    INFO(count << " of " << bytes.size() << " bytes");
    if (count == bytes.size() - 12) {   // only the empty end chunk is missing
      const DecodeResult result = scratch.decode(first(bytes, count));
      CHECK(result.warning == "the PNG has no end marker");
      CHECK(result.image.rgb == image.rgb);
      CHECK(read_image_header(scratch.folder() / "x.jpg").stored_width == 19);
    } else {
      expect_throws<DataError>([&] { scratch.decode(first(bytes, count)); }, "truncated");
      expect_throws<DataError>([&] { read_image_header(scratch.folder() / "x.jpg"); }, "truncated");
    }
  }
  // A stream that ends too early within whole chunks.
  const Bytes short_data = png_header(2, 2, 8, 2) + png_chunk("IDAT", stored({0, 1, 2, 3, 4, 5, 6}));
  scratch.expect_error(short_data, "truncated: the PNG lacks pixel data");
  scratch.expect_error(short_data + png_chunk("IEND", {}), "corrupt PNG");
}

TEST_CASE("decode_image: flipped bytes never crash, and never change a PNG in silence", "[cpu]") {
  const Scratch scratch;
  const auto flip_everywhere = [&](const Bytes& bytes, std::size_t step, const std::function<void(const DecodeResult&)>& check) {
    for (std::size_t i = 2; i < bytes.size(); i += step) {
      const std::uint8_t mask = Bytes{0x01, 0x80, 0xff}[i % 3];
      Bytes flipped = bytes;
      flipped[i] ^= mask;
      INFO("byte " << i << " xor " << int{mask});
      try {
        check(scratch.decode(flipped));
      } catch (const DataError&) {
        continue;
      }
    }
  };
  const auto any = [](const DecodeResult& result) {
    CHECK(result.image.rgb.size() == static_cast<std::size_t>(result.image.width * result.image.height * 3));
  };
  flip_everywhere(encode_jpeg(bars(33, 21)), 7, any);
  flip_everywhere(progressive_jpeg(bars(33, 21)), 23, any);
  const Image image = pattern(9, 5);
  const Bytes exif = png_chunk("eXIf", tiff(6, true));
  Bytes png = encode_png(image);
  png.insert(png.end() - 12, exif.begin(), exif.end());
  flip_everywhere(png, 1, [&](const DecodeResult& result) {
    CHECK(result.image.rgb == (result.turned ? apply_orientation(image, 6) : image).rgb);
  });
}

TEST_CASE("decode_image: one grey component, CMYK and YCCK with Adobe's inversion", "[cpu]") {
  const Scratch scratch;
  Bytes ramp(24 * 16);
  for (std::size_t i = 0; i < ramp.size(); ++i) ramp[i] = static_cast<std::uint8_t>(i % 24 * 10);
  const Image grey = scratch.decode(special_jpeg(ramp, JCS_GRAYSCALE, 1, 24, [](jpeg_compress_struct&) {})).image;
  for (std::int64_t x = 0; x < 24; ++x) {
    const std::uint8_t* pixel = grey.at(x, 5);
    CHECK(pixel[0] == pixel[1]);
    CHECK(pixel[1] == pixel[2]);
    CHECK(std::abs(pixel[0] - x * 10) <= 2);
  }

  // Inverted: 255 is no ink. Cyan ink 55, magenta 155, yellow 0, black 51 of 255: r = 204 (1 - 55/255) = 160, g = 80, b = 204.
  Bytes inks;
  for (int i = 0; i < 16 * 16; ++i) inks = inks + Bytes{200, 100, 255, 204};
  for (const J_COLOR_SPACE space : {JCS_CMYK, JCS_YCCK}) {
    const Bytes jpeg = special_jpeg(inks, JCS_CMYK, 4, 16, [&](jpeg_compress_struct& info) { jpeg_set_colorspace(&info, space); });
    const Image image = scratch.decode(jpeg).image;
    CHECK(std::abs(image.at(7, 9)[0] - 160) <= 2);
    CHECK(std::abs(image.at(7, 9)[1] - 80) <= 2);
    CHECK(std::abs(image.at(7, 9)[2] - 204) <= 2);
  }
}

TEST_CASE("decode_image: PNG kinds", "[cpu]") {
  const Scratch scratch;
  const auto decode = [&](const Bytes& head, const Bytes& raw) {
    return scratch.decode(head + png_chunk("IDAT", stored(raw)) + png_chunk("IEND", {})).image.rgb;
  };
  CHECK(decode(png_header(2, 1, 8, 6), {0, 1, 2, 3, 0, 4, 5, 6, 128}) == Bytes{1, 2, 3, 4, 5, 6});          // alpha dropped
  CHECK(decode(png_header(2, 1, 16, 0), {0, 0x12, 0xff, 0xfe, 0x80}) == Bytes{18, 18, 18, 254, 254, 254});  // high byte
  CHECK(decode(png_header(2, 1, 16, 4), {0, 9, 8, 0, 0, 7, 255, 1, 1}) == Bytes{9, 9, 9, 7, 7, 7});
  CHECK(decode(png_header(3, 1, 1, 0), {0, 0b10100000}) == Bytes{255, 255, 255, 0, 0, 0, 255, 255, 255});
  CHECK(decode(png_header(2, 1, 4, 0), {0, 0x5f}) == Bytes{85, 85, 85, 255, 255, 255});
  const Bytes colours = png_chunk("PLTE", {1, 2, 3, 4, 5, 6}), transparent = png_chunk("tRNS", {0, 128});
  CHECK(decode(png_header(3, 1, 8, 3) + colours + transparent, {0, 1, 0, 1}) == Bytes{4, 5, 6, 1, 2, 3, 4, 5, 6});
  CHECK(decode(png_header(2, 1, 8, 3) + colours, {0, 1, 77}) == Bytes{4, 5, 6, 0, 0, 0});   // beyond the palette: black

  const Bytes end = png_chunk("IDAT", stored({0, 1, 2, 3})) + png_chunk("IEND", {});
  scratch.expect_error(png_header(1, 1, 3, 2) + end, "unknown kind (colour type 2, 3 bits");
  scratch.expect_error(png_header(0, 1, 8, 2) + end, "corrupt PNG: 0 x 1 pixels");
  scratch.expect_error(png_header(1, 1, 8, 3) + end, "corrupt PNG: no palette");
  scratch.expect_error(png_header(1, 1, 8, 3) + png_chunk("PLTE", {1, 2}) + end, "palette of 2 bytes");
  scratch.expect_error(png_header(1, 1, 8, 2) + png_chunk("IEND", {}), "corrupt: the PNG has no pixel data");
  scratch.expect_error(png_header(1, 1, 8, 2) + png_chunk("ABCD", {}) + end, "unknown critical chunk");
  scratch.expect_error(kPngSignature + end, "does not begin with its header");
  scratch.expect_error(kPngSignature + png_chunk("IHDR", {1, 2}) + end, "header of 2 bytes");
  scratch.expect_error(png_header(1, 1, 8, 2) + png_chunk("IHDR", {0, 0, 0, 1, 0, 0, 0, 1, 8, 2, 0, 0, 0}) + end, "two headers");
  // A megabyte of zeros behind the one pixel that the header promises is not an error, and no more than a megabyte.
  CHECK(decode(png_header(1, 1, 8, 2), Bytes{0, 1, 2, 3} + Bytes(60'000)) == Bytes{1, 2, 3});
}

TEST_CASE("decode_image: BMP and GIF", "[cpu]") {
  const Scratch scratch;
  const auto bmp = [](std::uint32_t width, std::uint32_t height, std::uint32_t bits, const Bytes& palette, const Bytes& rows) {
    Bytes out = bytes_of("BM");
    append(out, static_cast<std::uint32_t>(54 + palette.size() + rows.size()), 4, false);
    append(out, 0, 4, false);
    append(out, static_cast<std::uint32_t>(54 + palette.size()), 4, false);
    append(out, 40, 4, false);
    append(out, width, 4, false);
    append(out, height, 4, false);
    append(out, 1, 2, false);
    append(out, bits, 2, false);
    for (int i = 0; i < 6; ++i) append(out, 0, 4, false);
    return out + palette + rows;
  };
  const Bytes rows = {1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 9, 10, 11, 12, 0, 0};   // BGR, lowest row first
  const Bytes plain = bmp(2, 2, 24, {}, rows);
  CHECK(scratch.decode(plain).image.rgb == Bytes{9, 8, 7, 12, 11, 10, 3, 2, 1, 6, 5, 4});
  CHECK(read_image_header(scratch.folder() / "x.jpg").stored_height == 2);
  CHECK(scratch.decode(bmp(2, static_cast<std::uint32_t>(-2), 24, {}, rows)).image.rgb == Bytes{3, 2, 1, 6, 5, 4, 9, 8, 7, 12, 11, 10});
  for (std::size_t count = 30; count < plain.size() - 2; ++count) scratch.expect_error(first(plain, count), "truncated: the BMP");
  scratch.expect_error(bmp(0x7fffffff, 0x7fffffff, 32, {}, rows), "truncated: the BMP");
  scratch.expect_error(bmp(2, 2, 5, {}, rows), "corrupt BMP: illegal header");
  Bytes compressed = plain;
  compressed[30] = 1;
  scratch.expect_error(compressed, "unsupported BMP: compressed");
  const Bytes palette = {1, 2, 3, 0, 4, 5, 6, 0};
  CHECK(scratch.decode(bmp(3, 1, 8, palette, {1, 0, 1, 9})).image.rgb == Bytes{6, 5, 4, 3, 2, 1, 6, 5, 4});
  scratch.expect_error(bmp(3, 1, 8, palette, {1, 0, 2, 0}), "colour beyond its palette");
  CHECK(scratch.decode(bmp(3, 1, 4, palette, {0x10, 0x1f, 0, 0})).image.rgb == Bytes{6, 5, 4, 3, 2, 1, 6, 5, 4});

  // Codes of 3, then 4 bits: clear, 0, 1, 2, 3, end.
  const Bytes gif = bytes_of("GIF89a") + Bytes{2, 0, 2, 0, 0x81, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0x21, 0xfe, 1, 'c', 0,
                                               0x2c, 0, 0, 0, 0, 2, 0, 2, 0, 0, 2, 3, 0x44, 0x34, 0x05, 0, 0x3b};
  CHECK(scratch.decode(gif).image.rgb == Bytes{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  for (std::size_t count = 6; count < gif.size() - 1; ++count) {
    expect_throws<DataError>([&] { scratch.decode(first(gif, count)); }, count < 10 ? "GIF" : "truncated: the GIF");
  }
  Bytes no_picture = gif;
  no_picture[25] = 0x3b;
  scratch.expect_error(no_picture, "corrupt GIF: no picture");
}

TEST_CASE("read_image_header: behind half a megabyte of other segments", "[cpu]") {
  const Scratch scratch;
  Bytes segments;
  for (int i = 0; i < 8; ++i) segments = segments + marker(0xe2, Bytes(65'000, 7));
  const Bytes jpeg = with_markers(encode_jpeg(bars(16, 24)), segments + exif_marker(tiff(8, false)));
  const ImageHeader header = read_image_header(scratch.write(jpeg));
  CHECK(header.shown_width() == 24);
  CHECK(header.shown_height() == 16);
  expect_throws<DataError>([&] { read_image_header(scratch.write(first(jpeg, 400'000))); }, "truncated: the JPEG ends within its header");
}

}  // namespace
}  // namespace detr::data

#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace detr::data {

class ImageFile;

/// 8-bit RGB picture, row-major, (height, width, 3).
struct Image {
  std::int64_t width = 0, height = 0;
  std::vector<std::uint8_t> rgb;

  Image() = default;
  Image(std::int64_t w, std::int64_t h) : width(w), height(h), rgb(static_cast<std::size_t>(w * h * 3)) {}
  std::uint8_t* at(std::int64_t x, std::int64_t y) { return rgb.data() + (y * width + x) * 3; }
  const std::uint8_t* at(std::int64_t x, std::int64_t y) const { return rgb.data() + (y * width + x) * 3; }
};

/// Which way round a picture is read: turned as its EXIF orientation says, as stored, or (automatic) turned unless only the
/// stored size equals the size that the annotation file states.
enum class Exif { automatic, apply, ignore };

struct DecodeLimits {
  std::int64_t max_pixels = 64'000'000;
  std::int64_t max_side = 16'384;
};

struct DecodeResult {
  Image image;                       ///< as shown
  std::int64_t stored_width = 0, stored_height = 0;
  int orientation = 1;               ///< EXIF orientation of the file, 1 to 8
  bool turned = false;               ///< the orientation was applied
  std::string warning;               ///< empty, or what the decoder complained about without giving up
};

/// Decodes a JPEG or PNG (or a BMP, or the first picture of a GIF), going by content and not by name, to 8-bit RGB: grey is
/// repeated, alpha dropped, 16 bits become their high byte, palettes are looked up, CMYK and YCCK are converted as Adobe writes them.
/// The same bytes as Pillow's Image.open(file).convert("RGB"), but for 16-bit grey.
/// `json_width` and `json_height` (0: unknown) serve Exif::automatic. Never reads outside the file's bytes.
/// Throws DataError naming the file and the reason: missing, empty, a folder, not an image, truncated, corrupt, unsupported, too
/// large (known from the header, before anything is decoded).
DecodeResult decode_image(const std::filesystem::path& file, Exif exif = Exif::automatic, std::int64_t json_width = 0,
                          std::int64_t json_height = 0, const DecodeLimits& limits = {});
DecodeResult decode_image(const ImageFile& file, Exif exif = Exif::automatic, std::int64_t json_width = 0, std::int64_t json_height = 0,
                          const DecodeLimits& limits = {});

/// What a header says without decoding the pixels: size as stored and EXIF orientation.
struct ImageHeader {
  std::int64_t stored_width = 0, stored_height = 0;
  int orientation = 1;
  std::int64_t shown_width() const { return orientation >= 5 ? stored_height : stored_width; }
  std::int64_t shown_height() const { return orientation >= 5 ? stored_width : stored_height; }
};
/// Reads the start of a JPEG, or the chunk headers of a PNG (so that one cut off is found). Throws DataError as decode_image does
/// for what it sees; no size is too large for it.
ImageHeader read_image_header(const std::filesystem::path& file);
ImageHeader read_image_header(const ImageFile& file);

/// Whether Exif::automatic turns a picture with this header, given the json's size (0: unknown).
bool exif_turns(const ImageHeader& header, Exif exif, std::int64_t json_width, std::int64_t json_height);

/// Bilinear resize with the triangle filter widened when shrinking (antialiased), the arithmetic of Pillow's
/// Image.resize(..., BILINEAR) on 8-bit RGB: weights in units of 2^-22, each pass rounded to 8 bits. Horizontal pass first, as in
/// Pillow up to 12 (13 takes the cheaper pass first, which changes some values by 1). An axis that keeps its size is not touched.
/// Throws InvalidArgument if the picture or the wanted size is empty.
Image resize_bilinear(const Image& image, std::int64_t width, std::int64_t height);

/// Writes a picture by the file name's ending: .png (in any case), else JPEG at quality 90. The file appears complete or not at
/// all. Throws StorageError if it cannot be written.
void write_image(const std::filesystem::path& file, const Image& image);
/// PNG bytes of a picture. Throws InvalidArgument if it is empty or beyond 2^29 bytes.
std::vector<std::uint8_t> encode_png(const Image& image);
/// JPEG bytes of a picture, colour at half resolution; quality 1 to 100. Throws InvalidArgument if the picture is empty, has more
/// than 65500 pixels a side, or the quality is out of range.
std::vector<std::uint8_t> encode_jpeg(const Image& image, int quality = 90);

}  // namespace detr::data

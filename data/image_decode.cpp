#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "data/exif.h"
#include "data/image.h"
#include "data/image_file.h"
#include "data/jpeg.h"
#include "data/png.h"
#include "data/stb.h"
#include "runtime/error.h"

namespace detr::data {
namespace {

constexpr std::int64_t kProbeBytes = 64;
// Nearly every JPEG has its first scan within this; pictures with large profiles or previews are read again in full.
constexpr std::int64_t kJpegHeadBytes = 256 * 1024;

using Bytes = std::span<const std::uint8_t>;

enum class Format { jpeg, png, bmp, gif };

bool has_at(Bytes bytes, std::size_t offset, std::string_view text) {
  return bytes.size() >= offset + text.size() &&
         std::equal(text.begin(), text.end(), bytes.begin() + static_cast<std::ptrdiff_t>(offset),
                    [](char a, std::uint8_t b) { return static_cast<std::uint8_t>(a) == b; });
}

bool is_text(Bytes bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::uint8_t b) { return b >= 0x20 || (b >= '\t' && b <= '\r'); });
}

/// By content. `head` is the file's first kProbeBytes.
Format format_of(const std::string& path, Bytes head) {
  if (has_at(head, 0, "\xff\xd8")) return Format::jpeg;
  if (has_at(head, 0, "\x89PNG\r\n\x1a\n")) return Format::png;
  if (has_at(head, 0, "GIF87a") || has_at(head, 0, "GIF89a")) return Format::gif;
  if (has_at(head, 0, "BM") && head.size() > 14 && head[6] == 0 && head[7] == 0) return Format::bmp;

  std::string_view known;
  if (has_at(head, 0, "RIFF") && has_at(head, 8, "WEBP")) known = "WebP";
  if (has_at(head, 0, std::string_view("II*\0", 4)) || has_at(head, 0, std::string_view("MM\0*", 4))) known = "TIFF";
  if (has_at(head, 4, "ftypavif") || has_at(head, 4, "ftypavis")) known = "AVIF";
  if (has_at(head, 4, "ftyphei") || has_at(head, 4, "ftypmif1")) known = "HEIF";
  if (has_at(head, 4, "jP  ") || has_at(head, 0, "\xff\x4f\xff\x51")) known = "JPEG 2000";
  if (has_at(head, 4, "JXL ") || has_at(head, 0, "\xff\x0a")) known = "JPEG XL";
  if (has_at(head, 0, "8BPS")) known = "Photoshop";
  if (!known.empty()) throw DataError(path, ": unsupported image format ", known, "; convert it to JPEG or PNG");
  throw DataError(path, ": not an image (", is_text(head) ? "it holds text" : "unknown content", ")");
}

std::int64_t little_endian(Bytes bytes, std::size_t offset, std::size_t size) {
  std::int64_t value = 0;
  for (std::size_t i = size; i-- > 0;) value = value << 8 | (offset + i < bytes.size() ? bytes[offset + i] : 0);
  return value;
}

/// A BMP's size from its first bytes. Throws DataError where the file is too short for the rows that it announces.
ImageHeader bmp_header(const std::string& path, Bytes head, std::int64_t file_size) {
  const std::int64_t pixels_at = little_endian(head, 10, 4), info_size = little_endian(head, 14, 4);
  const bool old = info_size == 12;   // OS/2: 16-bit sizes
  const std::int64_t width = old ? little_endian(head, 18, 2) : static_cast<std::int32_t>(little_endian(head, 18, 4));
  const std::int64_t signed_height = old ? little_endian(head, 20, 2) : static_cast<std::int32_t>(little_endian(head, 22, 4));
  const std::int64_t height = signed_height < 0 ? -signed_height : signed_height;   // negative: stored from the top
  const std::int64_t bits = little_endian(head, old ? 24 : 28, 2), compression = old ? 0 : little_endian(head, 30, 4);
  const bool known_bits = bits == 1 || bits == 4 || bits == 8 || bits == 16 || bits == 24 || bits == 32;
  if (info_size < 12 || width < 1 || height < 1 || !known_bits) throw DataError(path, ": corrupt BMP: illegal header");
  // 3: uncompressed with channel masks
  if (compression != 0 && compression != 3) throw DataError(path, ": unsupported BMP: compressed; convert it to PNG");
  const std::int64_t row = (width * bits + 31) / 32 * 4, last_row = (width * bits + 7) / 8;
  const std::int64_t room = file_size - pixels_at - last_row;   // for all rows but the last
  if (room < 0 || height - 1 > room / row) throw DataError(path, ": truncated: the BMP ends before its last pixel");
  return {width, height, 1};
}

/// Throws DataError where a pixel of a BMP with at most 8 bits has no entry in the palette: stb_image would look up chance bytes.
void check_bmp_palette(const std::string& path, Bytes bytes, const ImageHeader& header) {
  const std::int64_t pixels_at = little_endian(bytes, 10, 4), info_size = little_endian(bytes, 14, 4);
  const bool old = info_size == 12;
  const std::int64_t bits = little_endian(bytes, old ? 24 : 28, 2);
  const std::int64_t colours = (pixels_at - 14 - info_size) / (old ? 3 : 4);
  if (bits > 8 || colours >= std::int64_t{1} << bits) return;
  const std::int64_t row = (header.stored_width * bits + 31) / 32 * 4, mask = (std::int64_t{1} << bits) - 1;
  for (std::int64_t y = 0; y < header.stored_height; ++y) {
    for (std::int64_t x = 0; x < header.stored_width; ++x) {
      const std::int64_t byte = bytes[static_cast<std::size_t>(pixels_at + y * row + x * bits / 8)];
      if ((byte >> (8 - bits - x * bits % 8) & mask) >= colours) throw DataError(path, ": corrupt BMP: colour beyond its palette");
    }
  }
}

/// Throws DataError unless a GIF's blocks are whole up to the end of its first picture.
void check_gif_blocks(const std::string& path, Bytes bytes) {
  const auto need = [&](std::size_t end) {
    if (end > bytes.size()) throw DataError(path, ": truncated: the GIF ends within its first picture");
  };
  const auto table_bytes = [](std::uint8_t flags) { return flags & 0x80 ? std::size_t{3} << ((flags & 7) + 1) : std::size_t{0}; };
  std::size_t at = 13;
  need(at);
  at += table_bytes(bytes[10]);
  while (true) {
    need(at + 2);
    const bool picture = bytes[at] == 0x2c;
    if (!picture && bytes[at] != 0x21) throw DataError(path, ": corrupt GIF: no picture");
    if (picture) {
      need(at + 10);
      at += 10 + table_bytes(bytes[at + 9]) + 1;   // and the code size
    } else {
      at += 2;                                     // extension and its label
    }
    for (std::size_t length = 1; length != 0; at += 1 + length) {   // sub-blocks, the last one empty
      need(at + 1);
      length = bytes[at];
    }
    if (picture) return;
  }
}

ImageHeader gif_header(const std::string& path, Bytes head) {
  const ImageHeader header{little_endian(head, 6, 2), little_endian(head, 8, 2), 1};
  if (header.stored_width == 0 || header.stored_height == 0) throw DataError(path, ": corrupt GIF: no pixels");
  return header;
}

void check_limits(const std::string& path, const ImageHeader& header, const DecodeLimits& limits) {
  const std::int64_t width = header.stored_width, height = header.stored_height;
  if (width > limits.max_side || height > limits.max_side || width * height > limits.max_pixels) {
    throw DataError(path, ": too large: ", width, " x ", height, " pixels; at most ", limits.max_side, " a side and ",
                    limits.max_pixels, " in all");
  }
}

/// Pixels as stored and what was odd about them.
struct Stored {
  ImageHeader header;
  Image image;
  std::string warning;
};

Stored decode_stored_jpeg(const ImageFile& file, const DecodeLimits& limits) {
  const std::string& path = file.name();
  const std::vector<std::uint8_t> bytes = file.read(0, file.size());
  Stored stored;
  const JpegOutcome outcome = decode_jpeg(
      bytes, [&](const ImageHeader& header) { check_limits(path, header, limits); }, stored.header, stored.image);
  if (!outcome.error.empty()) throw DataError(path, ": the JPEG cannot be decoded: ", outcome.error);
  stored.warning = outcome.warning;
  return stored;
}

Stored decode_stored_png(const ImageFile& file, const DecodeLimits& limits) {
  const std::string& path = file.name();
  const PngChunks chunks = read_png_chunks(
      file, /*want_pixels=*/true, [&](const ImageHeader& header) { check_limits(path, header, limits); });
  Stored stored{chunks.header, {}, chunks.ended ? "" : "the PNG has no end marker"};
  std::string reason;
  if (!stb_decode(chunks.pixels, stored.image, reason)) {
    throw DataError(path, chunks.ended ? ": corrupt PNG: " : ": truncated: the PNG lacks pixel data: ", reason);
  }
  return stored;
}

Stored decode_stored_other(const ImageFile& file, Format format, const DecodeLimits& limits) {
  const std::string& path = file.name();
  const std::vector<std::uint8_t> bytes = file.read(0, file.size());
  Stored stored;
  stored.header = format == Format::bmp ? bmp_header(path, bytes, static_cast<std::int64_t>(bytes.size())) : gif_header(path, bytes);
  check_limits(path, stored.header, limits);
  if (format == Format::gif) {
    check_gif_blocks(path, bytes);
  } else {
    check_bmp_palette(path, bytes, stored.header);
  }
  std::string reason;
  if (!stb_decode(bytes, stored.image, reason)) {
    throw DataError(path, ": the ", format == Format::bmp ? "BMP" : "GIF", " cannot be decoded: ", reason);
  }
  return stored;
}

}  // namespace

DecodeResult decode_image(const std::filesystem::path& path, Exif exif, std::int64_t json_width, std::int64_t json_height,
                          const DecodeLimits& limits) {
  return decode_image(ImageFile(path), exif, json_width, json_height, limits);
}

DecodeResult decode_image(const ImageFile& file, Exif exif, std::int64_t json_width, std::int64_t json_height, const DecodeLimits& limits) {
  const Format format = format_of(file.name(), file.read(0, kProbeBytes));
  Stored stored = format == Format::jpeg  ? decode_stored_jpeg(file, limits)
                  : format == Format::png ? decode_stored_png(file, limits)
                                          : decode_stored_other(file, format, limits);
  if (stored.image.width != stored.header.stored_width || stored.image.height != stored.header.stored_height) {
    throw DataError(file.name(), ": corrupt image: its pixels and its header differ in size");
  }

  DecodeResult result;
  result.stored_width = stored.header.stored_width;
  result.stored_height = stored.header.stored_height;
  result.orientation = stored.header.orientation;
  result.turned = exif_turns(stored.header, exif, json_width, json_height);
  result.warning = std::move(stored.warning);
  result.image = result.turned ? apply_orientation(std::move(stored.image), result.orientation) : std::move(stored.image);
  return result;
}

ImageHeader read_image_header(const std::filesystem::path& path) { return read_image_header(ImageFile(path)); }

ImageHeader read_image_header(const ImageFile& file) {
  const std::vector<std::uint8_t> head = file.read(0, kProbeBytes);
  switch (format_of(file.name(), head)) {
    case Format::png: return read_png_chunks(file, /*want_pixels=*/false).header;
    case Format::bmp: return bmp_header(file.name(), head, file.size());
    case Format::gif: return gif_header(file.name(), head);
    case Format::jpeg: break;
  }
  ImageHeader header;
  JpegOutcome outcome = read_jpeg_header(file.read(0, kJpegHeadBytes), header);
  if (outcome.ended_early && file.size() > kJpegHeadBytes) outcome = read_jpeg_header(file.read(0, file.size()), header);
  if (!outcome.error.empty()) throw DataError(file.name(), ": the JPEG cannot be decoded: ", outcome.error);
  return header;
}

bool exif_turns(const ImageHeader& header, Exif exif, std::int64_t json_width, std::int64_t json_height) {
  if (header.orientation == 1 || exif == Exif::ignore) return false;
  if (exif == Exif::apply || json_width <= 0 || json_height <= 0) return true;
  const bool stored_fits = json_width == header.stored_width && json_height == header.stored_height;
  const bool shown_fits = json_width == header.shown_width() && json_height == header.shown_height();
  return shown_fits || !stored_fits;
}

}  // namespace detr::data

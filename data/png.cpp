#include "data/png.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <utility>

#include "data/exif.h"
#include "runtime/error.h"

namespace detr::data {
namespace {

constexpr std::int64_t kSignatureBytes = 8, kHeaderBytes = 13, kPaletteBytes = 256 * 3, kMaxExifBytes = 1 << 20;
constexpr std::int64_t kMaxSide = 0x7fffffff;   // of the standard

/// CRC-32 of ISO 3309 by bytes, as PNG wants it; `crc` is that of what came before.
std::uint32_t crc32(std::span<const std::uint8_t> bytes, std::uint32_t crc = 0) {
  static const std::array<std::uint32_t, 256> table = [] {
    std::array<std::uint32_t, 256> values{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value & 1 ? 0xedb88320u ^ (value >> 1) : value >> 1;
      values[i] = value;
    }
    return values;
  }();
  crc = ~crc;
  for (const std::uint8_t byte : bytes) crc = table[(crc ^ byte) & 0xff] ^ (crc >> 8);
  return ~crc;
}

std::uint32_t big_endian(const std::uint8_t* p) {
  return std::uint32_t{p[0]} << 24 | std::uint32_t{p[1]} << 16 | std::uint32_t{p[2]} << 8 | p[3];
}

void append_big_endian(std::vector<std::uint8_t>& out, std::uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) out.push_back(static_cast<std::uint8_t>(value >> shift));
}

/// Appends a chunk. stb_image does not look at its checksum, so that stays zero.
void append_chunk(std::vector<std::uint8_t>& out, const std::string& type, std::span<const std::uint8_t> data) {
  append_big_endian(out, static_cast<std::uint32_t>(data.size()));
  out.insert(out.end(), type.begin(), type.end());
  out.insert(out.end(), data.begin(), data.end());
  append_big_endian(out, 0);
}

/// Depths that a colour type may have; none for a type that does not exist. Table 11.1 of the standard.
bool legal_depth(int colour, int depth) {
  const bool packed = depth == 1 || depth == 2 || depth == 4;
  switch (colour) {
    case 0: return packed || depth == 8 || depth == 16;
    case 2: case 4: case 6: return depth == 8 || depth == 16;
    case 3: return packed || depth == 8;
    default: return false;
  }
}

ImageHeader parse_header(const std::string& path, std::span<const std::uint8_t> data) {
  if (data.size() != kHeaderBytes) throw DataError(path, ": corrupt PNG: header of ", data.size(), " bytes");
  const ImageHeader header{big_endian(data.data()), big_endian(data.data() + 4), 1};
  if (header.stored_width == 0 || header.stored_height == 0 || std::max(header.stored_width, header.stored_height) > kMaxSide) {
    throw DataError(path, ": corrupt PNG: ", header.stored_width, " x ", header.stored_height, " pixels");
  }
  const int depth = data[8], colour = data[9];
  if (!legal_depth(colour, depth) || data[10] != 0 || data[11] != 0 || data[12] > 1) {
    throw DataError(path, ": corrupt PNG: unknown kind (colour type ", colour, ", ", depth, " bits, compression ", int{data[10]},
                    ", filter ", int{data[11]}, ", interlace ", int{data[12]}, ")");
  }
  return header;
}

}  // namespace

PngChunks read_png_chunks(const ImageFile& file, bool want_pixels, const std::function<void(const ImageHeader&)>& accept) {
  const std::string& path = file.name();
  PngChunks chunks;
  std::vector<std::uint8_t> header, palette, compressed;
  bool has_pixels = false;
  for (std::int64_t offset = kSignatureBytes; offset < file.size() && !chunks.ended;) {
    const std::vector<std::uint8_t> start = file.read(offset, 8);
    if (start.size() < 8) throw DataError(path, ": truncated: the PNG ends within a chunk");
    const std::int64_t length = big_endian(start.data());
    const std::string type(start.begin() + 4, start.end());
    if (header.empty() && type != "IHDR") throw DataError(path, ": corrupt PNG: does not begin with its header");
    if (offset + 12 + length > file.size()) throw DataError(path, ": truncated: the PNG ends within a chunk");

    const bool critical = (start[4] & 0x20) == 0;
    const bool wanted = type == "IHDR" || (type == "eXIf" && length <= kMaxExifBytes) || (critical && want_pixels);
    if (wanted) {
      std::vector<std::uint8_t> data = file.read(offset + 8, length + 4);
      if (static_cast<std::int64_t>(data.size()) < length + 4) throw DataError(path, ": truncated: the PNG ends within a chunk");
      const std::uint32_t stated = big_endian(data.data() + length);
      data.resize(static_cast<std::size_t>(length));
      const bool intact = crc32(data, crc32({start.data() + 4, 4})) == stated;
      if (critical && !intact) throw DataError(path, ": corrupt PNG: wrong checksum in the chunk at byte ", offset);

      if (type == "IHDR") {
        if (!header.empty()) throw DataError(path, ": corrupt PNG: two headers");
        chunks.header = parse_header(path, data);
        if (accept) accept(chunks.header);
        header = std::move(data);
      } else if (type == "eXIf") {
        const int orientation = intact ? exif_orientation(data) : 0;
        if (orientation != 0) chunks.header.orientation = orientation;
      } else if (type == "PLTE") {
        if (length == 0 || length % 3 != 0 || length > kPaletteBytes) {
          throw DataError(path, ": corrupt PNG: palette of ", length, " bytes");
        }
        palette = std::move(data);
      } else if (type == "IDAT") {
        compressed.insert(compressed.end(), data.begin(), data.end());
      } else if (type != "IEND") {
        throw DataError(path, ": unsupported PNG: unknown critical chunk");
      }
    }
    has_pixels = has_pixels || (type == "IDAT" && length > 0);
    chunks.ended = type == "IEND";
    offset += 12 + length;
  }
  if (header.empty()) throw DataError(path, ": truncated: the PNG ends before its header");
  if (!has_pixels) throw DataError(path, chunks.ended ? ": corrupt" : ": truncated", ": the PNG has no pixel data");
  if (!want_pixels) return chunks;

  if (header[9] == 3 && palette.empty()) throw DataError(path, ": corrupt PNG: no palette");
  palette.resize(kPaletteBytes);
  const std::vector<std::uint8_t> signature = file.read(0, kSignatureBytes);
  chunks.pixels.reserve(compressed.size() + 1024);
  chunks.pixels = signature;
  append_chunk(chunks.pixels, "IHDR", header);
  if (header[9] == 3) append_chunk(chunks.pixels, "PLTE", palette);
  append_chunk(chunks.pixels, "IDAT", compressed);
  append_chunk(chunks.pixels, "IEND", {});
  return chunks;
}

}  // namespace detr::data

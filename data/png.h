#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "data/image.h"
#include "data/image_file.h"

namespace detr::data {

/// What the chunks of a PNG say, checked: order, lengths, checksums, and a colour type and depth that the standard has.
struct PngChunks {
  ImageHeader header;
  std::vector<std::uint8_t> pixels;   ///< a PNG of only the chunks that decide the pixels; empty where not asked for
  bool ended = false;                 ///< an IEND was there
};

/// Walks the chunks of a file that begins with PNG's signature. With `want_pixels` false the pixel data is skipped unread.
/// `accept`, where given, is called with size and orientation 1 before any pixel data is read, and may throw.
/// `pixels` leaves out transparency, so that a decoder cannot blend it, and fills the palette up with black, so that an index
/// beyond its end is no accident. Throws DataError that names the file: corrupt, or truncated within a chunk.
/// PNG specification (ISO/IEC 15948), 5 and 11; the eXIf chunk is from its third edition, 11.3.4.5.
PngChunks read_png_chunks(const ImageFile& file, bool want_pixels, const std::function<void(const ImageHeader&)>& accept = nullptr);

}  // namespace detr::data

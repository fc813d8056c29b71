#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "data/image.h"

namespace detr::data {

/// What went wrong or was odd while a JPEG was read.
struct JpegOutcome {
  std::string error;     ///< empty, or why there is no picture
  std::string warning;   ///< empty, or the first complaint of the decoder, which went on
  bool ended_early = false;   ///< the bytes ended before the header did
};

/// Size and EXIF orientation from the start of a JPEG; the bytes may end anywhere behind the header.
JpegOutcome read_jpeg_header(std::span<const std::uint8_t> bytes, ImageHeader& header);

/// Decodes a whole JPEG as stored (no orientation applied), by libjpeg-turbo with its slow accurate inverse transform and
/// smooth upsampling, as Pillow does. Grey is repeated; CMYK and YCCK are taken to be inverted as Adobe writes them (as Pillow
/// does whether or not the marker is there) and go to RGB by r = k - (255 - c) k / 255. `accept` is called with the header
/// before anything of the picture's size is allocated and may throw.
/// A file that ends early is an error, but for a sequential one that lacks nothing except its end marker: a warning.
JpegOutcome decode_jpeg(std::span<const std::uint8_t> bytes, const std::function<void(const ImageHeader&)>& accept,
                        ImageHeader& header, Image& image);

}  // namespace detr::data

#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/image.h"

namespace detr::data {

/// Decodes the bytes of a whole PNG, BMP or GIF (first frame) to 8-bit RGB by stb_image: alpha dropped, 16 bits by their high
/// byte. False on failure, and then `reason` says why. The caller has checked sizes and that the file is complete: stb_image
/// verifies no checksum and reads zeros behind the end.
bool stb_decode(std::span<const std::uint8_t> bytes, Image& image, std::string& reason);

/// PNG bytes of a picture, by stb_image_write. Throws StorageError where memory runs out.
std::vector<std::uint8_t> stb_encode_png(const Image& image);

}  // namespace detr::data

#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/image.h"

namespace detr::test {

/// A picture by formula with smooth parts, steps and all values: channel c of pixel (x, y) is
/// (7 x x + 13 y + 3 x y + 5 (x xor y) + 91 c) mod 256.
data::Image pattern(std::int64_t width, std::int64_t height);

/// SHA-256 (FIPS 180-4) in lower-case hexadecimal.
std::string sha256(std::span<const std::uint8_t> bytes);

/// Putting image files together by hand.
namespace bytes {

using Bytes = std::vector<std::uint8_t>;
Bytes operator+(Bytes a, const Bytes& b);
Bytes bytes_of(const std::string& text);
Bytes first(const Bytes& bytes, std::size_t count);
/// Appends the low bytes of a number.
void append(Bytes& out, std::uint32_t value, int count, bool big_endian);

/// A TIFF structure whose first directory has two tags, the second one the orientation. Type 3 is SHORT, 4 LONG.
Bytes tiff(std::uint32_t orientation, bool big_endian, std::uint32_t type = 3);
/// A JPEG marker segment, and one with an EXIF block.
Bytes marker(std::uint8_t number, const Bytes& payload);
Bytes exif_marker(const Bytes& tiff_structure);
/// A JPEG with segments put behind its first two bytes.
Bytes with_markers(const Bytes& jpeg, const Bytes& segments);
/// A PNG chunk with its checksum.
Bytes png_chunk(const std::string& type, const Bytes& data);

}  // namespace bytes
}  // namespace detr::test

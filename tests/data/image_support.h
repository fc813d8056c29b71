#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "data/image.h"

namespace detr::test {

/// A picture by formula with smooth parts, steps and all values: channel c of pixel (x, y) is
/// (7 x x + 13 y + 3 x y + 5 (x xor y) + 91 c) mod 256.
data::Image pattern(std::int64_t width, std::int64_t height);

/// SHA-256 (FIPS 180-4) in lower-case hexadecimal.
std::string sha256(std::span<const std::uint8_t> bytes);

}  // namespace detr::test

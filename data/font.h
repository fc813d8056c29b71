#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace detr::data {

inline constexpr int kGlyphWidth = 5, kGlyphHeight = 12;   // pixels, without spacing
inline constexpr char32_t kReplacement = 0xfffd;           // stands for bytes that are no UTF-8

/// Rows of a character from the top, its leftmost pixel in bit 4: 3 rows for accents, 7 for a capital, 2 below the base line.
using Glyph = std::array<std::uint8_t, kGlyphHeight>;

/// The built-in font's drawing of a Latin-1 character; a hollow box for any other.
Glyph glyph_of(char32_t code);

/// The characters of a UTF-8 text, kReplacement for each broken sequence.
std::u32string decode_utf8(std::string_view text);

}  // namespace detr::data

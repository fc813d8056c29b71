#include "data/text.h"

#include <array>
#include <charconv>
#include <cstdint>
#include <string_view>

namespace detr::data {
namespace {

constexpr std::size_t kMaxPrinted = 200;

/// Length of the UTF-8 character at `at` (shortest form, no surrogate), or 0 where there is none; its code goes to `code`.
std::size_t utf8_length(std::string_view text, std::size_t at, std::uint32_t& code) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const std::uint8_t lead = byte(at);
  code = lead;
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || at + length > text.size()) return 0;
  code = static_cast<std::uint32_t>(lead & (0x7f >> length));
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(at + i) & 0x3fU);
  }
  const bool too_long = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  return too_long || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff) ? 0 : length;
}

/// Control characters of the upper half, line separators and the marks that turn the direction of a line.
bool disturbs_a_line(std::uint32_t code) {
  return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x200e || code == 0x200f ||
         (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069) || code == 0xfeff;
}

std::string hex_byte(char c) {
  constexpr std::string_view digits = "0123456789abcdef";
  const auto byte = static_cast<std::uint8_t>(c);
  return {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
}

}  // namespace

std::string printable(const std::string& text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    if (out.size() >= kMaxPrinted) return out + "...";
    std::uint32_t code = 0;
    const std::size_t length = utf8_length(text, at, code);
    if (text[at] == '\n') {
      out += "\\n";
    } else if (text[at] == '\t') {
      out += "\\t";
    } else if (text[at] == '"' || text[at] == '\\') {
      out += {'\\', text[at]};
    } else if (length == 0 || disturbs_a_line(code)) {
      for (std::size_t i = 0; i < (length == 0 ? 1 : length); ++i) out += hex_byte(text[at + i]);
    } else {
      out.append(text, at, length);
    }
    at += length == 0 ? 1 : length;
  }
  return out;
}

std::string printable(const std::filesystem::path& path) { return printable(path.string()); }

bool is_utf8(const std::string& text) {
  std::uint32_t code = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text, at, code);
    if (length == 0) return false;
    at += length;
  }
  return true;
}

std::string number_text(double value) {
  std::array<char, 64> buffer;
  if (value == 0) return "0";
  const bool whole = value >= -1e15 && value <= 1e15 && static_cast<double>(static_cast<std::int64_t>(value)) == value;
  const auto end = whole ? std::to_chars(buffer.data(), buffer.data() + buffer.size(), static_cast<std::int64_t>(value))
                         : std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return {buffer.data(), end.ptr};
}

std::string json_quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<std::uint8_t>(c) < 0x20) {
      out += "\\u00" + hex_byte(c).substr(2);
    } else {
      out += c;
    }
  }
  return out + '"';
}

}  // namespace detr::data

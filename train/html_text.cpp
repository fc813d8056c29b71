#include "train/html_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "data/text.h"

namespace detr::train {
namespace {

/// Bytes of the UTF-8 character that begins at `at`, or 0 where there is none.
std::size_t character_length(std::string_view text, std::size_t at) {
  const auto lead = static_cast<std::uint8_t>(text[at]);
  const std::size_t length = lead < 0x80 ? 1 : lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  return at + length <= text.size() && data::is_utf8(std::string(text.substr(at, length))) ? length : 0;
}

/// Control characters and the marks that turn the direction of a line: U+0000 to 1f, 7f to 9f, 61c, 200e, 200f, 2028 to 202e,
/// 2066 to 2069, feff; also what HTML does not allow, U+fffe and ffff.
bool disturbs(std::string_view character) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(character[i]); };
  if (character.size() == 1) return byte(0) < 0x20 || byte(0) == 0x7f;
  if (character.size() == 2) return (byte(0) == 0xc2 && byte(1) < 0xa0) || (byte(0) == 0xd8 && byte(1) == 0x9c);
  if (character.size() != 3) return false;
  if (byte(0) == 0xe2 && byte(1) == 0x80) return byte(2) == 0x8e || byte(2) == 0x8f || (byte(2) >= 0xa8 && byte(2) <= 0xae);
  if (byte(0) == 0xe2 && byte(1) == 0x81) return byte(2) >= 0xa6 && byte(2) <= 0xa9;
  return byte(0) == 0xef && ((byte(1) == 0xbb && byte(2) == 0xbf) || (byte(1) == 0xbf && byte(2) >= 0xbe));
}

std::string hex_text(std::string_view bytes) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    const auto byte = static_cast<std::uint8_t>(c);
    out += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
  }
  return out;
}

std::string number_text(double value, std::chars_format format, int precision) {
  std::array<char, 400> buffer;
  return {buffer.data(), std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, format, precision).ptr};
}

}  // namespace

std::string html_text(std::string_view text, std::size_t max_characters, bool keep_lines) {
  std::string out;
  std::size_t characters = 0;
  for (std::size_t at = 0; at < text.size(); ++characters) {
    if (characters == max_characters) return out + "…";
    const std::size_t length = character_length(text, at);
    const std::string_view character = text.substr(at, std::max<std::size_t>(length, 1));
    if (character == "&") out += "&amp;";
    else if (character == "<") out += "&lt;";
    else if (character == ">") out += "&gt;";
    else if (character == "\"") out += "&quot;";
    else if (character == "'") out += "&#39;";
    else if (keep_lines && (character == "\n" || character == "\t")) out += character;
    else if (length == 0 || disturbs(character)) out += hex_text(character);
    else out += character;
    at += character.size();
  }
  return out;
}

std::string fixed_text(double value, int decimals) {
  if (!std::isfinite(value)) return "–";
  const std::string text = number_text(value, std::chars_format::fixed, decimals);
  return text.find_first_not_of("-0.") == std::string::npos && text[0] == '-' ? text.substr(1) : text;   // no "-0.000"
}

std::string short_text(double value, int digits) {
  if (!std::isfinite(value)) return "–";
  if (value == 0) return "0";
  const int exponent = static_cast<int>(std::floor(std::log10(std::abs(value))));
  if (exponent < -3 || exponent > 8) return number_text(value, std::chars_format::scientific, std::max(digits - 2, 0));
  return fixed_text(value, std::max(digits - 1 - exponent, 0));
}

std::string count_text(std::int64_t value) {
  std::string text = std::to_string(value);
  for (std::size_t at = text.size(); at > (value < 0 ? 4 : 3);) text.insert(at -= 3, 1, ',');
  return text;
}

std::string base64(std::span<const std::uint8_t> bytes) {
  constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::size_t count = std::min<std::size_t>(3, bytes.size() - i);
    std::uint32_t word = 0;
    for (std::size_t k = 0; k < 3; ++k) word = word << 8 | (k < count ? bytes[i + k] : 0U);
    for (std::size_t k = 0; k < 4; ++k) out += k <= count ? digits[word >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

std::string html_table(const HtmlTable& table) {
  constexpr std::size_t kMaxCell = 160;
  const auto row = [&](const std::vector<std::string>& cells, const std::string& tag) {
    std::string out = "<tr>";
    for (std::size_t c = 0; c < cells.size(); ++c) out += "<" + tag + (c < table.text_columns ? " class=\"t\">" : ">") + html_text(cells[c], kMaxCell) + "</" + tag + ">";
    return out + "</tr>\n";
  };
  std::string out = "<div class=\"scroll\"><table>\n";
  if (!table.head.empty()) out += "<thead>" + row(table.head, "th") + "</thead>\n";
  out += "<tbody>\n";
  for (const std::vector<std::string>& cells : table.rows) out += row(cells, "td");
  return out + "</tbody></table></div>\n";
}

std::string folded_table(const std::string& caption, const std::vector<std::string>& head, std::size_t count, const std::function<std::vector<std::string>(std::size_t)>& row, std::size_t max_rows,
                         std::size_t text_columns) {
  if (count == 0) return "";
  const std::size_t shown = std::min(count, std::max<std::size_t>(max_rows, 2));
  HtmlTable table{head, {}, text_columns};
  for (std::size_t i = 0; i < shown; ++i) table.rows.push_back(row(shown == count ? i : i * (count - 1) / (shown - 1)));
  const std::string part = shown == count ? "" : " (" + count_text(static_cast<std::int64_t>(shown)) + " of " + count_text(static_cast<std::int64_t>(count)) + " rows)";
  return "<details><summary>" + html_text(caption, 200) + part + "</summary>\n" + html_table(table) + "</details>\n";
}

std::string folded_table(const HtmlTable& table, std::size_t max_rows) {
  return folded_table("Numbers", table.head, table.rows.size(), [&](std::size_t i) { return table.rows[i]; }, max_rows, table.text_columns);
}

}  // namespace detr::train

#include "runtime/text.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <numeric>

#include "runtime/error.h"

namespace detr {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

std::string nearest_word(std::string_view word, std::span<const std::string> candidates) {
  const auto closer = [&](const std::string& a, const std::string& b) { return edit_distance(word, a) < edit_distance(word, b); };
  const auto best = std::min_element(candidates.begin(), candidates.end(), closer);
  return best == candidates.end() ? std::string() : *best;
}

std::string escape_control(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '\n') out += "\\n";
    else if (c == '\t') out += "\\t";
    else if (c == '\r') out += "\\r";
    else if (u < 0x20 || u == 0x7f) {
      char buffer[8];
      std::snprintf(buffer, sizeof buffer, "\\x%02x", u);
      out += buffer;
    } else out += c;
  }
  return out;
}

std::string duration_text(double seconds) {
  const auto s = static_cast<long long>(std::max(0.0, seconds) + 0.5);
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, "%lld:%02lld:%02lld", s % 86400 / 3600, s % 3600 / 60, s % 60);
  const long long days = s / 86400;
  return days == 0 ? buffer : concat(days, days == 1 ? " day " : " days ", buffer);
}

double parse_duration(std::string_view text) {
  double total = 0;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at != end) {
    double value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    double unit = 1;
    const char* after = next;
    if (error == std::errc() && after != end) {
      switch (*after++) {
        case 's': unit = 1; break;
        case 'm': unit = 60; break;
        case 'h': unit = 3600; break;
        case 'd': unit = 86400; break;
        default: unit = 0;
      }
    }
    if (error != std::errc() || unit == 0 || value < 0) throw ConfigError("'", text, "' is no duration; write 3h50m, 90s or a number of seconds");
    total += value * unit;
    at = after;
  }
  if (total <= 0) throw ConfigError("'", text, "' is no duration; write 3h50m, 90s or a number of seconds");
  return total;
}

}  // namespace detr

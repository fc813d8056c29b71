#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace detr {

/// Levenshtein distance of two words.
std::size_t edit_distance(std::string_view a, std::string_view b);

/// The candidate with the smallest edit distance to `word` (the first of equal ones); empty if there are no candidates.
std::string nearest_word(std::string_view word, std::span<const std::string> candidates);

/// Control characters (and the escape character) written as \n, \t or \x1b, so that text from data stays on one line.
std::string escape_control(std::string_view text);

/// 93784 -> "1 day 2:03:04"; 754 -> "0:12:34".
std::string duration_text(double seconds);

/// "3h50m", "90s", "15m", "2d" or plain seconds -> seconds. Throws ConfigError.
double parse_duration(std::string_view text);

}  // namespace detr

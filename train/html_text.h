#pragma once
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace detr::train {

/// Text of any origin made fit for HTML content and quoted attributes: & < > " ' become entities; control characters (line ends
/// excepted where `keep_lines`), marks that turn the direction of a line and bytes that are not UTF-8 become \x1b and the like.
/// What is over `max_characters` is cut and ends in an ellipsis.
std::string html_text(std::string_view text, std::size_t max_characters = std::numeric_limits<std::size_t>::max(), bool keep_lines = false);

/// Numbers for readers; the same in every locale, and an en dash for what is not finite.
/// fixed_text(0.41249, 3) = "0.412"; short_text: `digits` significant ones, "0.4125", "612.4", "1.0e-4"; count_text(12345) = "12,345".
std::string fixed_text(double value, int decimals);
std::string short_text(double value, int digits = 4);
std::string count_text(std::int64_t value);

std::string base64(std::span<const std::uint8_t> bytes);

/// A table of texts, not yet escaped. The first column is set left, the others right.
struct HtmlTable {
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows;
  std::size_t text_columns = 1;   ///< how many columns are set left
};

std::string html_table(const HtmlTable& table);

/// A table under a caption to fold it out by. Of `count` rows at most `max_rows` are made and shown, evenly spread with the first and
/// the last, and the caption says so. Empty for a table without rows.
std::string folded_table(const std::string& caption, const std::vector<std::string>& head, std::size_t count, const std::function<std::vector<std::string>(std::size_t)>& row,
                         std::size_t max_rows = 200, std::size_t text_columns = 1);
std::string folded_table(const HtmlTable& table, std::size_t max_rows = 200);

}  // namespace detr::train

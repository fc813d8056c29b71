#pragma once
#include <filesystem>
#include <string>

namespace detr::data {

/// Text from a data set made fit for one line of a message: control characters, quotes, backslashes, bytes that are not
/// UTF-8 and characters that reorder a line are escaped, and what is over 200 bytes is cut and ends in "...".
std::string printable(const std::string& text);
std::string printable(const std::filesystem::path& path);

/// Whether all of the text is UTF-8.
bool is_utf8(const std::string& text);

/// A number in the shortest decimal form that reads back as the same value; "12" for 12.0. Same in every locale.
std::string number_text(double value);

/// The text as a JSON string, with its quotes.
std::string json_quoted(const std::string& text);

}  // namespace detr::data

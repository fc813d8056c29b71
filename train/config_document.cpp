#include "train/config_document.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>

#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::train {
namespace {

using schema::Json;
namespace fs = std::filesystem;

constexpr std::size_t kMaxDepth = 64;
constexpr std::size_t kMaxIncludes = 16;   // files within files
constexpr const char* kInclude = "__include__";

/// Where the parser is. A line break counts with the character after it, so that a token at the end of a line is on that line.
struct Position {
  int line = 1;
  bool after_break = false;
};

/// Hands characters to the parser, which does not say where a key stands, and keeps the line.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, Position* position) : at_(at), position_(position) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    position_->line += position_->after_break;
    position_->after_break = *at_ == '\n';
    ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator old = *this;
    ++*this;
    return old;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  Position* position_;
};

/// Builds the document from the parser's events, with the checks that nlohmann's own tree builder does not make.
class Builder : public nlohmann::json_sax<Json> {
 public:
  /// `lines`: whether the text is a file, whose lines people count.
  Builder(ConfigDocument& document, const Position& position, bool lines) : document_(document), position_(position), lines_(lines) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(value); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    if (open_.back()->contains(name)) fail(concat("the key '", escape_control(name), "' comes twice"));
    pending_ = name;
    if (lines_) document_.lines[join(paths_.back(), name)] = position_.line;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    // "[json.exception...] parse error at line 3, column 5: what" -> what
    std::string what = error.what();
    what.erase(0, what.find("] ") + 2);
    if (const auto column = what.find("column"); what.starts_with("parse error at line") && column != std::string::npos) what.erase(0, what.find(": ", column) + 2);
    fail(what);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError(document_.name, lines_ ? concat(":", position_.line) : std::string(), ": ", escape_control(what));
  }

  std::string next_path() const {
    if (open_.empty()) return {};
    return join(paths_.back(), open_.back()->is_array() ? std::to_string(open_.back()->size()) : pending_);
  }

  Json* place(Json value) {
    if (open_.empty()) return &(document_.root = std::move(value));
    if (open_.back()->is_array()) return &open_.back()->emplace_back(std::move(value));
    return &((*open_.back())[pending_] = std::move(value));
  }

  bool add(Json value) {
    place(std::move(value));
    return true;
  }

  bool open(Json container) {
    if (open_.size() == kMaxDepth) fail(concat("lists and objects are nested more than ", kMaxDepth, " deep"));
    std::string path = next_path();
    open_.push_back(place(std::move(container)));
    paths_.push_back(std::move(path));
    return true;
  }

  bool close() {
    open_.pop_back();
    paths_.pop_back();
    return true;
  }

  ConfigDocument& document_;
  const Position& position_;
  const bool lines_;
  std::vector<Json*> open_;          // containers around the next value; none of them grows while a later one is open
  std::vector<std::string> paths_;   // theirs
  std::string pending_;              // key of the next value
};

std::string read_text(const fs::path& file, const std::string& shown) {
  std::error_code error;
  if (fs::is_directory(file, error)) throw ConfigError(shown, ": is a folder, not a configuration");
  std::ifstream in(file, std::ios::binary);
  if (!in) throw ConfigError(shown, fs::exists(file, error) ? ": cannot be read" : ": there is no such configuration");
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

fs::path tree_of(const fs::path& file) {
  for (fs::path folder = file.parent_path(); folder != folder.parent_path(); folder = folder.parent_path()) {
    if (folder.filename() == "configs") return folder;
  }
  return file.parent_path();
}

bool is_within(const fs::path& file, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), file.begin(), file.end()).first == folder.end();
}

/// Reads files depth first.
class IncludeReader {
 public:
  explicit IncludeReader(const fs::path& main) : root_(tree_of(canonical(main))) {}

  void read(const fs::path& file, const std::string& from) {
    const std::string shown = file.string();
    const fs::path here = canonical(file);
    if (!is_within(here, root_)) throw ConfigError(from, ": ", shown, " lies outside the configuration tree ", root_.string());
    const std::string ending = file.extension().string();
    if (ending == ".yml" || ending == ".yaml") throw ConfigError(shown, ": this build reads JSON configurations, not YAML");
    if (!from.empty() && ending != ".json") throw ConfigError(from, ": ", shown, " does not end in .json");
    if (std::find(open_.begin(), open_.end(), here) != open_.end()) throw ConfigError(from, ": ", shown, " includes itself");
    if (open_.size() > kMaxIncludes) throw ConfigError(from, ": files are included more than ", kMaxIncludes, " deep");
    ConfigDocument document = parse_document(read_text(file, from.empty() ? shown : concat(from, ": ", shown)), shown, true);
    if (!document.root.is_object()) throw ConfigError(shown, ": must be an object { ... }");
    open_.push_back(here);
    if (document.root.contains(kInclude)) {
      const std::string place = document.place(kInclude);
      const Json names = document.root.at(kInclude);
      if (!names.is_array()) throw ConfigError(place, ": __include__ must be a list of file names");
      for (const Json& name : names) {
        if (!name.is_string()) throw ConfigError(place, ": __include__ must be a list of file names");
        read(resolve(file, name.get<std::string>()), place);
      }
      document.root.erase(kInclude);
    }
    open_.pop_back();
    documents.push_back(std::move(document));
  }

  std::vector<ConfigDocument> documents;

 private:
  static fs::path canonical(const fs::path& file) { return fs::weakly_canonical(fs::absolute(file)); }

  static fs::path resolve(const fs::path& including, std::string name) {
    const char* home = std::getenv("HOME");
    if (name.starts_with("~/") && home) name.replace(0, 1, home);
    return (including.parent_path() / name).lexically_normal();
  }

  fs::path root_;
  std::vector<fs::path> open_;
};

std::string lower(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t\r\n");
  return begin == std::string::npos ? std::string() : text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

template <class Integer>
bool read_integer(const std::string& digits, int base, Json& value) {
  Integer number{};
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number, base);
  if (error != std::errc() || end != digits.data() + digits.size()) return false;
  value = number;
  return true;
}

/// Whether the text is a number as YAML 1.2's core schema has it, and a finite one.
bool read_number(const std::string& text, Json& value) {
  static const std::regex decimal("[-+]?[0-9]+"), other_base("0(o[0-7]+|x[0-9a-fA-F]+)"), fraction("[-+]?(\\.[0-9]+|[0-9]+(\\.[0-9]*)?)([eE][-+]?[0-9]+)?");
  const std::string digits = text.starts_with('+') ? text.substr(1) : text;
  if (std::regex_match(text, other_base)) return read_integer<std::uint64_t>(text.substr(2), text[1] == 'x' ? 16 : 8, value);
  if (std::regex_match(text, decimal) && (read_integer<std::int64_t>(digits, 10, value) || read_integer<std::uint64_t>(digits, 10, value))) return true;
  if (!std::regex_match(text, fraction)) return false;
  double number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  value = number;
  return error == std::errc() && end == digits.data() + digits.size() && std::isfinite(number);
}

}  // namespace

std::string ConfigDocument::place(const std::string& path) const {
  const auto found = lines.find(path);
  return found == lines.end() ? name : concat(name, ":", found->second);
}

ConfigDocument parse_document(const std::string& text, const std::string& name, bool lines) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  ConfigDocument document;
  document.name = name;
  Position position;
  Builder builder(document, position, lines);
  const char* begin = text.data() + (text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0);
  Json::sax_parse(CountingIterator(begin, &position), CountingIterator(text.data() + text.size(), &position), &builder, nlohmann::json::input_format_t::json, true, true);
  return document;
}

std::vector<ConfigDocument> read_documents(const fs::path& file) {
  IncludeReader reader(file);
  reader.read(file, {});
  return std::move(reader.documents);
}

Json parse_value(const std::string& written, const std::string& origin) {
  const std::string text = trimmed(written);
  if (text.starts_with('[') || text.starts_with('{') || text.starts_with('"')) return parse_document(text, concat(origin, " ", text), false).root;
  if (text.size() >= 2 && text.starts_with('\'') && text.ends_with('\'')) {
    static const std::regex doubled("''");
    return std::regex_replace(text.substr(1, text.size() - 2), doubled, "'");
  }
  const std::string word = lower(text);
  if (word.empty() || word == "null" || word == "~") return nullptr;
  if (word == "true" || word == "yes" || word == "on") return true;
  if (word == "false" || word == "no" || word == "off") return false;
  Json value;
  if (read_number(text, value)) return value;
  value = text;
  try {
    static_cast<void>(value.dump());
  } catch (const Json::type_error&) {
    throw ConfigError(origin, ": the value is no UTF-8 text");
  }
  return value;
}

}  // namespace detr::train

#include "data/json_reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <limits>
#include <utility>

#include "data/text.h"
#include "runtime/error.h"

namespace detr::data {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kBufferBytes = 1 << 20;

void append_utf8(std::string& out, std::uint32_t code) {
  const auto byte = [&](std::uint32_t value) { out += static_cast<char>(value); };
  if (code < 0x80) {
    byte(code);
  } else if (code < 0x800) {
    byte(0xc0 | code >> 6);
    byte(0x80 | (code & 0x3f));
  } else if (code < 0x10000) {
    byte(0xe0 | code >> 12);
    byte(0x80 | (code >> 6 & 0x3f));
    byte(0x80 | (code & 0x3f));
  } else {
    byte(0xf0 | code >> 18);
    byte(0x80 | (code >> 12 & 0x3f));
    byte(0x80 | (code >> 6 & 0x3f));
    byte(0x80 | (code & 0x3f));
  }
}

bool is_digit(int c) { return c >= '0' && c <= '9'; }
bool is_plain(int c) { return c >= 0x20 && c != '"' && c != '\\'; }   // inside a text

/// Whether a decimal number outside a double's range is too large (else it is too small): the place of its first digit that
/// is not zero, counted from the point, and the exponent decide.
bool too_large(const std::string& token) {
  const std::size_t exponent_at = token.find_first_of("eE");
  const std::string digits = token.substr(0, exponent_at);
  std::int64_t exponent = 0;
  if (exponent_at != std::string::npos) {
    const char* begin = token.data() + exponent_at + 1;
    const bool negative = *begin == '-';
    if (*begin == '+' || *begin == '-') ++begin;
    if (std::from_chars(begin, token.data() + token.size(), exponent).ec != std::errc())
      exponent = std::numeric_limits<std::int64_t>::max() / 2;
    if (negative) exponent = -exponent;
  }
  const std::size_t first = digits.find_first_of("123456789");
  if (first == std::string::npos) return false;
  const std::size_t point = std::min(digits.find('.'), digits.size());
  return static_cast<std::int64_t>(point) - static_cast<std::int64_t>(first) + exponent > 0;
}

}  // namespace

JsonReader::JsonReader(const fs::path& file) : file_(file), in_(::open(file.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC)), buffer_(kBufferBytes) {
  const auto refuse = [&](const auto&... parts) { throw DataError(printable(file), parts...); };
  if (in_.get() < 0) {
    const int reason = errno;
    if (reason == ENOENT || reason == ENOTDIR) refuse(": no such file");
    refuse(": cannot be read: ", std::strerror(reason));
  }
  struct stat info {};   // of the open file: under its name another one may stand by now
  if (::fstat(in_.get(), &info) != 0) refuse(": cannot be read: ", std::strerror(errno));
  if (S_ISDIR(info.st_mode)) refuse(": is a folder; name the annotation file in it");
  if (!S_ISREG(info.st_mode)) refuse(": is not a regular file; copy it to one");
  if (look() < 0) throw DataError(printable(file), ": is empty; copy or write it again");
  const std::string start(buffer_.data(), std::min<std::size_t>(end_, 3));
  if (start == "\xef\xbb\xbf") at_ = 3;
  if (start.starts_with("\xff\xfe") || start.starts_with("\xfe\xff"))
    throw DataError(printable(file), ": is UTF-16 text; save it as UTF-8");
  if (look_past_space() < 0) fail("nothing but space");
}

void JsonReader::fail(const std::string& what) const {
  throw DataError(printable(file_), ": not valid JSON at line ", line_, ", column ", column_, ": ", what,
                  "; repair the file or write it again");
}

void JsonReader::refill() {
  ssize_t count = 0;
  do count = ::read(in_.get(), buffer_.data(), buffer_.size());
  while (count < 0 && errno == EINTR);
  if (count < 0) throw DataError(printable(file_), ": reading failed at line ", line_, ": ", std::strerror(errno));
  at_ = 0;
  end_ = static_cast<std::size_t>(count);
}

int JsonReader::look() {
  if (at_ == end_) {
    refill();
    if (at_ == end_) return -1;
  }
  return static_cast<unsigned char>(buffer_[at_]);
}

int JsonReader::take() {
  const int c = look();
  if (c < 0) fail("the file ends in the middle; it may be cut off");
  ++at_;
  ++column_;
  if (c == '\n') {
    ++line_;
    column_ = 1;
  }
  if (capture_) *capture_ += static_cast<char>(c);
  return c;
}

template <class Wanted>
void JsonReader::take_run(Wanted wanted, std::string* text) {
  std::size_t end = at_;
  while (end < end_ && wanted(static_cast<unsigned char>(buffer_[end]))) ++end;
  if (text) text->append(buffer_.data() + at_, end - at_);
  if (capture_) capture_->append(buffer_.data() + at_, end - at_);
  column_ += static_cast<std::int64_t>(end - at_);
  at_ = end;
}

int JsonReader::look_past_space() {
  int c = look();
  while (c == ' ' || c == '\n' || c == '\t' || c == '\r') {
    take();
    c = look();
  }
  return c;
}

JsonKind JsonReader::peek() {
  const int c = look_past_space();
  switch (c) {
    case 'n': return JsonKind::null;
    case 't':
    case 'f': return JsonKind::boolean;
    case '"': return JsonKind::string;
    case '[': return JsonKind::array;
    case '{': return JsonKind::object;
    default: break;
  }
  if (is_digit(c) || c == '-' || c == 'N' || c == 'I') return JsonKind::number;
  if (c < 0) fail("the file ends in the middle; it may be cut off");
  fail("a value is expected, found \"" + printable(std::string(1, static_cast<char>(c))) + '"');
}

void JsonReader::expect(const char* word) {
  look_past_space();
  for (const char* letter = word; *letter; ++letter) {
    if (look() != *letter) fail(concat("\"", word, "\" is expected"));
    take();
  }
}

void JsonReader::read_null() { expect("null"); }

bool JsonReader::read_boolean() {
  const bool value = look_past_space() == 't';
  expect(value ? "true" : "false");
  return value;
}

bool JsonReader::special_number() {
  std::string* const capture = std::exchange(capture_, nullptr);
  token_.clear();
  if (look() == '-') token_ += static_cast<char>(take());
  const int c = look();
  const bool special = c == 'N' || c == 'I';
  if (special) {
    if (c == 'N' && !token_.empty()) fail("NaN has no sign");
    expect(c == 'N' ? "NaN" : "Infinity");
    token_ += static_cast<char>(c);
  }
  capture_ = capture;
  if (capture_) *capture_ += special ? std::string("null") : token_;
  return special;
}

void JsonReader::number_token() {
  const auto digits = [&] {
    if (!is_digit(look())) fail("a digit is expected");
    while (is_digit(look())) take_run(is_digit, &token_);
  };
  const std::size_t start = token_.size();
  digits();
  if (token_[start] == '0' && token_.size() > start + 1) fail("a number starts with 0");
  if (look() == '.') {
    token_ += static_cast<char>(take());
    digits();
  }
  if (look() == 'e' || look() == 'E') {
    token_ += static_cast<char>(take());
    if (look() == '+' || look() == '-') token_ += static_cast<char>(take());
    digits();
  }
}

JsonNumber JsonReader::read_number() {
  look_past_space();
  JsonNumber number;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (special_number()) {
    number.value = token_ == "N" ? std::numeric_limits<double>::quiet_NaN() : token_ == "I" ? kInfinity : -kInfinity;
    return number;
  }
  number_token();
  const char* const begin = token_.data();
  const char* const end = begin + token_.size();
  if (std::from_chars(begin, end, number.value).ec == std::errc::result_out_of_range) {
    number.value = too_large(token_) ? kInfinity : 0;
    if (token_.front() == '-') number.value = -number.value;
  }
  number.whole = token_.find_first_of(".eE") == std::string::npos;
  number.fits = number.whole && std::from_chars(begin, end, number.integer).ec == std::errc();
  return number;
}

std::uint32_t JsonReader::hex4() {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i) {
    const int c = take();
    const int digit = is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (digit < 0) fail("\\u needs four hexadecimal digits");
    value = value << 4 | static_cast<std::uint32_t>(digit);
  }
  return value;
}

void JsonReader::escape(std::string* text) {
  const int c = take();
  constexpr const char* names = "\"\\/bfnrt";
  constexpr const char* values = "\"\\/\b\f\n\r\t";
  if (c != 'u') {
    const char* const found = std::strchr(names, c);
    if (!found || c == 0) fail("an escape that JSON does not know");
    if (text) *text += values[found - names];
    return;
  }
  std::uint32_t code = hex4();
  if (code >= 0xd800 && code <= 0xdfff) {   // one half of a pair that stands for a character over U+FFFF
    if (code >= 0xdc00) fail("half of a surrogate pair");
    if (take() != '\\' || take() != 'u') fail("half of a surrogate pair");
    const std::uint32_t low = hex4();
    if (low < 0xdc00 || low > 0xdfff) fail("half of a surrogate pair");
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  }
  if (text) append_utf8(*text, code);
}

void JsonReader::string_token(std::string* text) {
  expect("\"");
  while (true) {
    take_run(is_plain, text);
    const int c = take();
    if (c == '"') return;
    if (c == '\\') {
      escape(text);
    } else if (c < 0x20) {
      fail("a control character in a text");
    } else if (text) {
      *text += static_cast<char>(c);
    }
  }
}

std::string JsonReader::read_string() {
  std::string text;
  string_token(&text);
  if (!is_utf8(text)) fail("bytes that are not UTF-8");
  return text;
}

void JsonReader::enter(char opening) {
  const char word[] = {opening, 0};
  expect(word);
  if (open_.size() == kMaxDepth) fail(concat("nested more than ", kMaxDepth, " deep"));
  open_.push_back(opening == '[' ? ']' : '}');
  first_ = true;
}

bool JsonReader::advance(char closing) {
  const int c = look_past_space();
  if (c == closing) {
    take();
    open_.pop_back();
    first_ = false;
    return false;
  }
  if (!first_) {
    if (c >= 0 && c != ',') fail(concat("\",\" or \"", closing, "\" is expected"));
    take();
    if (look_past_space() == closing) fail(concat("a comma before \"", closing, '"'));
  }
  first_ = false;
  return true;
}

void JsonReader::begin_array() { enter('['); }
void JsonReader::begin_object() { enter('{'); }
bool JsonReader::next_element() { return advance(']'); }

bool JsonReader::next_key(std::string& key) {
  if (!advance('}')) return false;
  if (look() != '"') look() < 0 ? fail("the file ends in the middle; it may be cut off") : fail("a key in quotes is expected");
  key.clear();
  string_token(&key);
  expect(":");
  return true;
}

void JsonReader::skip(std::string* text) {
  look_past_space();
  capture_ = text;
  const std::size_t depth = open_.size();
  std::string key;
  do {
    switch (peek()) {
      case JsonKind::null: read_null(); break;
      case JsonKind::boolean: read_boolean(); break;
      case JsonKind::number:
        if (!special_number()) number_token();
        break;
      case JsonKind::string: string_token(nullptr); break;
      case JsonKind::array: begin_array(); break;
      case JsonKind::object: begin_object(); break;
    }
    while (open_.size() > depth && !(open_.back() == ']' ? next_element() : next_key(key))) {
    }
  } while (open_.size() > depth);
  capture_ = nullptr;
}

void JsonReader::finish() {
  if (look_past_space() >= 0) fail("text after the end of the value");
}

}  // namespace detr::data

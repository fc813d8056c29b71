#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/files.h"

namespace detr::data {

enum class JsonKind { null, boolean, number, string, array, object };

/// A number as the file has it. Whole numbers are exact over all 64 bits; anything with a point or an exponent is not whole.
struct JsonNumber {
  bool whole = false;          ///< digits alone
  bool fits = false;           ///< whole, and `integer` holds it
  std::int64_t integer = 0;
  double value = 0;            ///< infinite where it overflows a double; NaN for NaN
};

/// Reads a JSON file value by value, in constant memory and without recursion. Annotation files of real tools hold NaN,
/// Infinity (as Python writes them) and 1e400 inside otherwise good files, so these are numbers here and the caller judges
/// them; a parser that gives the whole file up for one of them could not name the record. All else is RFC 8259: UTF-8, with
/// or without byte order mark, no comments, no trailing commas, nesting up to `kMaxDepth`.
///
/// Every function throws DataError with file, line and column where the text is not what was asked for.
class JsonReader {
 public:
  static constexpr std::size_t kMaxDepth = 256;

  /// Throws DataError where the file is missing, a folder, not readable or empty.
  explicit JsonReader(const std::filesystem::path& file);

  /// Kind of the value that comes next, which stays unread.
  JsonKind peek();
  void read_null();
  bool read_boolean();
  JsonNumber read_number();
  /// The text of a string, escapes resolved.
  std::string read_string();

  /// `begin_array` (or `begin_object`) enters; then `next_element` (or `next_key`) says whether another value comes, which the
  /// caller must read or skip before it asks again; false leaves the container.
  void begin_array();
  bool next_element();
  void begin_object();
  bool next_key(std::string& key);

  /// Reads past a value of any kind. Its text is appended to `text` where that is given, with null for NaN and Infinity.
  void skip(std::string* text = nullptr);
  /// Throws unless only space is left.
  void finish();

  [[noreturn]] void fail(const std::string& what) const;

 private:
  int look();               ///< next byte, or -1 at the end
  int take();
  /// Takes the bytes of the buffer up to the first that is not wanted (which must not be a line break), into `text` too.
  template <class Wanted>
  void take_run(Wanted wanted, std::string* text);
  void refill();
  int look_past_space();
  void expect(const char* word);
  void enter(char opening);
  bool advance(char closing);
  void number_token();
  bool special_number();    ///< NaN, Infinity or -Infinity, into token_
  void string_token(std::string* text);
  std::uint32_t hex4();
  void escape(std::string* text);

  std::filesystem::path file_;
  FileHandle in_;
  std::vector<char> buffer_;
  std::size_t at_ = 0, end_ = 0;
  std::int64_t line_ = 1, column_ = 1;
  std::string token_;
  std::string* capture_ = nullptr;
  std::vector<char> open_;      ///< closing brackets that are still to come
  bool first_ = true;           ///< the container on top has given nothing yet
};

}  // namespace detr::data

#include "data/json_reader.h"

#include <sys/stat.h>

#include <cmath>
#include <limits>

#include "data/text.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::data;
using namespace detr::test;

namespace {

/// A reader on a file with that text.
struct Source {
  TempDir folder;
  JsonReader open(const std::string& text) {
    write_text(folder / "t.json", text);
    return JsonReader(folder / "t.json");
  }
  void refused(const std::string& text, const std::string& message) {
    expect_throws<DataError>([&] {
      JsonReader reader = open(text);
      reader.skip();
      reader.finish();
    }, message);
  }
};

}  // namespace

TEST_CASE("json reader: numbers keep all 64 bits, and what no integer holds is told apart", "[cpu]") {
  Source source;
  JsonReader reader = source.open(
      "[9007199254740993, -9223372036854775808, 9223372036854775808, 2.0, -0.25e1, 1e400, -1e400, 1e-400, "
      "NaN, Infinity, -Infinity]");
  std::vector<JsonNumber> numbers;
  reader.begin_array();
  while (reader.next_element()) numbers.push_back(reader.read_number());
  reader.finish();
  REQUIRE(numbers.size() == 11);
  CHECK(numbers[0].integer == 9007199254740993);
  CHECK(numbers[1].integer == std::numeric_limits<std::int64_t>::min());
  CHECK((numbers[2].whole && !numbers[2].fits));
  CHECK((!numbers[3].whole && numbers[3].value == 2));
  CHECK(numbers[4].value == -2.5);
  CHECK(numbers[5].value == std::numeric_limits<double>::infinity());
  CHECK(numbers[6].value == -std::numeric_limits<double>::infinity());
  CHECK(numbers[7].value == 0);
  CHECK(std::isnan(numbers[8].value));
  CHECK(numbers[9].value == std::numeric_limits<double>::infinity());
  CHECK(numbers[10].value == -std::numeric_limits<double>::infinity());
}

TEST_CASE("json reader: texts, escapes and keys", "[cpu]") {
  Source source;
  JsonReader reader = source.open(R"( {"a\"b": "\u00ef\ud83d\ude00\n\/", "c": [true, null, {}], "d": "ï"} )");
  std::string key;
  reader.begin_object();
  REQUIRE(reader.next_key(key));
  CHECK(key == "a\"b");
  CHECK(reader.read_string() == "\xc3\xaf\xf0\x9f\x98\x80\n/");
  REQUIRE(reader.next_key(key));
  reader.begin_array();
  REQUIRE(reader.next_element());
  CHECK(reader.read_boolean());
  REQUIRE(reader.next_element());
  CHECK(reader.peek() == JsonKind::null);
  reader.read_null();
  REQUIRE(reader.next_element());
  reader.skip();
  CHECK(!reader.next_element());
  REQUIRE(reader.next_key(key));
  CHECK(reader.read_string() == "\xc3\xaf");
  CHECK(!reader.next_key(key));
  reader.finish();
}

TEST_CASE("json reader: skipped text can be kept", "[cpu]") {
  Source source;
  JsonReader reader = source.open(R"([{"a": [1, -2.5, NaN, -Infinity], "b\u0041": "x"}, 7])");
  std::string text;
  reader.begin_array();
  REQUIRE(reader.next_element());
  reader.skip(&text);
  CHECK(text == R"({"a": [1, -2.5, null, null], "b\u0041": "x"})");
  REQUIRE(reader.next_element());
  CHECK(reader.read_number().integer == 7);
}

TEST_CASE("json reader: what is not JSON is refused with its place", "[cpu]") {
  Source source;
  source.refused("[1,\n 2,]", "line 2, column 4: a comma before \"]\"");
  source.refused("{\"a\": 1,}", "a comma before");
  source.refused("[1 2]", "\",\" or \"]\" is expected");
  source.refused("{\"a\" 1}", "\":\" is expected");
  source.refused("{a: 1}", "a key in quotes is expected");
  source.refused("[1", "cut off");
  source.refused("{\"a\"", "\":\" is expected");
  source.refused("[\"abc", "cut off");
  source.refused("[01]", "starts with 0");
  source.refused("[1.]", "a digit is expected");
  source.refused("[-]", "a digit is expected");
  source.refused("[+1]", "a value is expected");
  source.refused("[tru]", "\"true\" is expected");
  source.refused("[nan]", "\"null\" is expected");
  source.refused("[] []", "after the end");
  source.refused("[\"\\q\"]", "an escape");
  source.refused("[\"\\ud800\"]", "surrogate");
  source.refused("[\"a\nb\"]", "a control character");
  source.refused("[// note\n1]", "a value is expected");
  source.refused(" \n ", "nothing but space");
  source.refused("", "is empty");
  source.refused(std::string("\xff\xfe[\0]\0", 6), "UTF-16");
  source.refused(std::string(300, '['), "nested more than 256 deep");
  source.refused(std::string("\0\x01\x02", 3), "a value is expected");
  expect_throws<DataError>([&] { source.open("[\"\xe9\"]").skip(), JsonReader(source.folder / "absent.json"); }, "no such file");
  expect_throws<DataError>([&] { JsonReader(source.folder.path()); }, "is a folder");
  REQUIRE(::mkfifo((source.folder / "pipe.json").c_str(), 0600) == 0);   // and nobody waits for a writer
  expect_throws<DataError>([&] { JsonReader(source.folder / "pipe.json"); }, "is not a regular file");
  expect_throws<DataError>([&] {
    JsonReader reader = source.open("\"\xe9\"");
    reader.read_string();
  }, "not UTF-8");
}

TEST_CASE("text: names from data are made fit for one line", "[cpu]") {
  CHECK(printable(std::string("a\nb\t\"\\\x01\x7f")) == "a\\nb\\t\\\"\\\\\\x01\\x7f");
  CHECK(printable(std::string("n\xc3\xaf\xf0\x9f\x98\x80")) == "n\xc3\xaf\xf0\x9f\x98\x80");
  CHECK(printable(std::string("\xe9\xc0\xaf")) == "\\xe9\\xc0\\xaf");
  CHECK(printable(std::string("\xe2\x80\xae")) == "\\xe2\\x80\\xae");   // turns the line around
  CHECK(printable(std::string(1000, 'x')).size() == 203);
  CHECK(number_text(12) == "12");
  CHECK(number_text(-0.1) == "-0.1");
  CHECK(number_text(1e300) == "1e+300");
  CHECK(json_quoted("a\"\n") == "\"a\\\"\\u000a\"");
}

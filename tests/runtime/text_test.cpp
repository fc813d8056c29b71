#include "runtime/text.h"

#include "tests/support.h"

using namespace detr;
using namespace detr::test;

TEST_CASE("text: edit distance and nearest word", "[cpu]") {
  CHECK(edit_distance("", "") == 0);
  CHECK(edit_distance("", "abc") == 3);
  CHECK(edit_distance("kitten", "sitting") == 3);
  CHECK(edit_distance("lr", "lr") == 0);
  CHECK(edit_distance("ab", "ba") == 2);   // a swap is two changes
  const std::vector<std::string> words = {"epochs", "epoch", "seed"};
  CHECK(nearest_word("epoc", words) == "epoch");
  CHECK(nearest_word("sed", words) == "seed");
  CHECK(nearest_word("epoch", words) == "epoch");
  CHECK(nearest_word("zz", std::vector<std::string>{"aa", "bb"}) == "aa");   // the first of equal ones
  CHECK(nearest_word("x", {}).empty());
}

TEST_CASE("text: control characters", "[cpu]") {
  CHECK(escape_control("plain \xc3\xa9 text") == "plain \xc3\xa9 text");
  CHECK(escape_control("a\nb\tc\rd") == "a\\nb\\tc\\rd");
  CHECK(escape_control("\x1b[31m\x7f") == "\\x1b[31m\\x7f");
  CHECK(escape_control(std::string_view("\0", 1)) == "\\x00");
  CHECK(escape_control("").empty());
}

TEST_CASE("text: durations", "[cpu]") {
  CHECK(duration_text(0) == "0:00:00");
  CHECK(duration_text(754) == "0:12:34");
  CHECK(duration_text(754.5) == "0:12:35");
  CHECK(duration_text(-3) == "0:00:00");
  CHECK(duration_text(93784) == "1 day 2:03:04");
  CHECK(duration_text(2 * 86400) == "2 days 0:00:00");

  CHECK(parse_duration("3h50m") == 13800);
  CHECK(parse_duration("90s") == 90);
  CHECK(parse_duration("15m") == 900);
  CHECK(parse_duration("2d") == 172800);
  CHECK(parse_duration("1.5h") == 5400);
  CHECK(parse_duration("30") == 30);
  for (const char* bad : {"", "h", "3x", "-5", "3h-5m", "0", "0s", "3 h", "soon"}) {
    CAPTURE(bad);
    expect_throws<ConfigError>([&] { parse_duration(bad); }, concat("'", bad, "' is no duration; write 3h50m, 90s or a number of seconds"));
  }
}

// The record of a rank's last collectives, and where two records part.
#include "dist/flight_record.h"

#include "tests/support.h"

namespace detr::dist {
namespace {

/// `count` collectives of bucket 0, 1, 2, 0, ... of step 0, 1, ...; all but the last are done.
void fill(FlightRecord& record, int count) {
  for (int i = 0; i < count; ++i) {
    const std::uint64_t number = record.issue(static_cast<std::uint64_t>(100 + i), "bucket " + std::to_string(i % 3) + " of step " + std::to_string(i / 3), 4 * i);
    if (i + 1 < count) record.end(number);
  }
}

std::vector<Flight> flights(int count, const std::function<void(FlightRecord&)>& more = [](FlightRecord&) {}) {
  FlightRecord record;
  fill(record, count);
  more(record);
  return record.flights();
}

TEST_CASE("flight record: the last 256, in order, with what has ended", "[cpu]") {
  for (const int count : {0, 1, 255, 256, 257, 1000}) {
    const std::vector<Flight> got = flights(count);
    const int kept = std::min(count, 256);
    REQUIRE(got.size() == static_cast<std::size_t>(kept));
    int wrong = 0;
    for (int i = 0; i < kept; ++i) {
      const int number = count - kept + i;
      const Flight& flight = got[static_cast<std::size_t>(i)];
      wrong += flight.number != static_cast<std::uint64_t>(number) || flight.tag != static_cast<std::uint64_t>(100 + number) || flight.bytes != 4 * number ? 1 : 0;
      wrong += (flight.ended_s >= flight.issued_s) != (number + 1 < count) ? 1 : 0;
      wrong += i > 0 && flight.issued_s < got[static_cast<std::size_t>(i - 1)].issued_s ? 1 : 0;
    }
    INFO("count " << count);
    CHECK(wrong == 0);
  }
}

TEST_CASE("flight record: an end that comes late, or of nothing, does no harm", "[cpu]") {
  FlightRecord record;
  record.end(0);
  fill(record, 300);
  record.end(0);       // has left
  record.end(1000);    // has not come
  CHECK(record.flights().back().ended_s < 0);
  record.end(299);
  CHECK(record.flights().back().ended_s >= 0);
  CHECK(record.flights().front().number == 44);
}

TEST_CASE("flight record: as JSON", "[cpu]") {
  FlightRecord record;
  record.end(record.issue(~std::uint64_t{0}, "a \"quoted\\\n\x01 phase", 12));
  record.issue(7, "open", 0);
  const std::string text = record.json(3);
  const auto has = [&](const std::string& part) { return text.find(part) != std::string::npos; };
  CHECK(text.rfind("{\"rank\": 3, \"started_unix_s\": ", 0) == 0);
  CHECK(has("{\"number\": 0, \"tag\": \"18446744073709551615\", \"phase\": \"a \\\"quoted\\\\\\u000a\\u0001 phase\", \"bytes\": 12, \"issued_s\": 0.0"));
  CHECK(has("{\"number\": 1, \"tag\": \"7\", \"phase\": \"open\", \"bytes\": 0, \"issued_s\": 0.0"));
  CHECK(text.find("\"ended_s\": null}") > text.find("\"number\": 1"));
  CHECK(text.find("\"ended_s\": 0.0") < text.find("\"number\": 1"));
  CHECK(text.substr(text.size() - 5) == "}\n]}\n");
  CHECK(FlightRecord().json(0).find("\"collectives\": [\n]}\n") != std::string::npos);
}

TEST_CASE("flight record: where two ranks part", "[cpu]") {
  CHECK_FALSE(first_difference({}, {}));
  CHECK_FALSE(first_difference(flights(400), flights(400)));
  const auto issue = [](std::uint64_t tag, const char* phase, std::int64_t bytes) {
    return [=](FlightRecord& record) {
      record.issue(tag, phase, bytes);
      record.issue(1, "behind", 1);
    };
  };
  const auto base = flights(300, issue(9, "x", 8));
  for (const auto& other : {issue(8, "x", 8), issue(9, "y", 8), issue(9, "x", 4)}) {
    const auto difference = first_difference(base, flights(300, other));
    REQUIRE(difference);
    CHECK(difference->a->number == 300);
    CHECK(difference->b->number == 300);
    CHECK(difference->a->phase == "x");
  }
  // One has gone on: the first that the other has not issued, though more has left its record.
  const auto ahead = first_difference(flights(500), flights(400));
  REQUIRE(ahead);
  CHECK(ahead->a->number == 400);
  CHECK_FALSE(ahead->b);
  const auto behind = first_difference(flights(2), flights(5));
  REQUIRE(behind);
  CHECK_FALSE(behind->a);
  CHECK(behind->b->number == 2);
  CHECK(first_difference({}, flights(1))->b->number == 0);
}

}  // namespace
}  // namespace detr::dist

// What travels between a control and its hub, whole, cut short and wrong.
#include "dist/messages.h"

#include <random>

#include "dist/exchanges.h"
#include "tests/support.h"

namespace detr::dist {
namespace {

/// Every shorter form and one with a byte too many is no message.
template <class Parse>
void expect_exact(const std::string& bytes, const Parse& parse) {
  CHECK(parse(bytes).has_value());
  CHECK_FALSE(parse(bytes + '\0').has_value());
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    INFO("cut to " << length << " of " << bytes.size());
    CHECK_FALSE(parse(bytes.substr(0, length)).has_value());
  }
}

TEST_CASE("messages: bytes and back", "[cpu]") {
  const std::string greeting = bytes_of(Greeting{2, 4, 4711, "token", "host"});
  expect_exact(greeting, parse_greeting);
  CHECK(parse_greeting(greeting)->rank == 2);
  CHECK(parse_greeting(greeting)->size == 4);
  CHECK(parse_greeting(greeting)->pid == 4711);
  CHECK(parse_greeting(greeting)->token == "token");
  CHECK(parse_greeting(greeting)->host == "host");

  CHECK(parse_greeting(greeting)->launched == 0);
  CHECK(parse_greeting(bytes_of(Greeting{2, 4, 4711, "token", "host", 2}))->launched == 2);

  const std::string ended = bytes_of(Ended{3, 4711, 139, true});
  expect_exact(ended, parse_ended);
  CHECK(parse_ended(ended)->rank == 3);
  CHECK(parse_ended(ended)->pid == 4711);
  CHECK(parse_ended(ended)->status == 139);
  CHECK(parse_ended(ended)->out_of_memory);

  const std::string request = bytes_of(Request{Line::loader, true, 7, 500, "step 3", "the part"});
  expect_exact(request, parse_request);
  CHECK(parse_request(request)->line == Line::loader);
  CHECK(parse_request(request)->to_root);
  CHECK(parse_request(request)->number == 7);
  CHECK(parse_request(request)->time_left == 500);
  CHECK(parse_request(request)->phase == "step 3");
  CHECK(parse_request(request)->part == "the part");
  CHECK_FALSE(parse_request(bytes_of(Request{Line::main, false, 1, 1, std::string(kMaxPhase + 1, 'x'), ""})).has_value());
  std::string third = request;
  third[0] = 2;   // there are two lines
  CHECK_FALSE(parse_request(third).has_value());

  const std::string beat = bytes_of(Beat{9, 417, 20, true, false, 6, "backward"});
  expect_exact(beat, parse_beat);
  CHECK(parse_beat(beat)->progress == 9);
  CHECK(parse_beat(beat)->step == 417);
  CHECK(parse_beat(beat)->age == 20);
  CHECK(parse_beat(beat)->waiting);
  CHECK_FALSE(parse_beat(beat)->launching);
  CHECK(parse_beat(beat)->position == 6);
  CHECK(parse_beat(beat)->phase == "backward");

  const std::string failure = bytes_of(Failure{2, 3, "why"});
  expect_exact(failure, parse_failure);
  CHECK(parse_failure(failure)->rank == 2);
  CHECK(parse_failure(failure)->code == 3);
  CHECK(parse_failure(failure)->text == "why");
  CHECK(parse_failure(bytes_of(Failure{0, 1, std::string(100000, 'x')}))->text.size() == kMaxText);

  expect_exact(bytes_of(Cancel{Line::loader, 4}), parse_cancel);

  const std::string head = reply_head({Line::main, 5});
  const auto of_two = [](const std::string& bytes) { return parse_reply(bytes, 2); };
  CHECK(of_two(head)->parts.empty());
  const std::string reply = head + reply_body({"a", ""});
  CHECK(of_two(reply)->parts == std::vector<std::string>{"a", ""});
  CHECK(of_two(reply)->request.number == 5);
  CHECK_FALSE(parse_reply(reply, 1).has_value());
  CHECK_FALSE(parse_reply(reply, 3).has_value());
}

TEST_CASE("messages: random bytes and flipped bits are read or refused, and nothing else", "[cpu]") {
  std::mt19937_64 random(7);
  const std::vector<std::string> seeds = {bytes_of(Greeting{2, 4, 4711, "token", "host"}), bytes_of(Request{Line::main, false, 7, 500, "step 3", "part"}),
                                          bytes_of(Beat{9, 417, 20, true, false, 6, "backward"}), bytes_of(Failure{2, 3, "why"}), bytes_of(Ended{3, 4711, 9, false}),
                                          reply_head({Line::main, 5}) + reply_body({"a", "b"})};
  int read = 0, refused = 0;
  const auto count = [&](bool good) { ++(good ? read : refused); };
  for (int trial = 0; trial < 20000; ++trial) {
    std::string bytes = seeds[random() % seeds.size()];
    for (std::uint64_t flips = random() % 4; flips > 0; --flips) bytes[random() % bytes.size()] = static_cast<char>(random());
    if (trial % 5 == 0) bytes.resize(random() % 64, static_cast<char>(random()));
    count(parse_greeting(bytes).has_value());
    count(parse_request(bytes).has_value());
    count(parse_beat(bytes).has_value());
    count(parse_failure(bytes).has_value());
    count(parse_cancel(bytes).has_value());
    count(parse_ended(bytes).has_value());
    count(parse_reply(bytes, 2).has_value());
  }
  CHECK(read > 5000);
  CHECK(refused > 5000);
}

TEST_CASE("exchanges: complete, superseded, cancelled, late", "[cpu]") {
  const auto at = [](int ms) { return Exchanges::Time(Milliseconds(1000000 + ms)); };
  Exchanges exchanges(2);
  const auto put = [&](int rank, const std::string& phase, std::uint32_t number, Line line = Line::main, int left = 100) {
    return exchanges.put(rank, {line, false, number, left, phase, concat("part of ", rank)}, at(0));
  };
  CHECK(put(0, "a", 1).empty());
  CHECK(put(1, "a", 1, Line::loader).empty());   // another line
  CHECK_FALSE(exchanges.crossed());
  CHECK(put(1, "b", 1).empty());                 // another exchange
  REQUIRE(exchanges.crossed());
  CHECK(exchanges.crossed()->first.ranks == std::vector<int>{0});
  CHECK(exchanges.crossed()->first.phase == "a");
  CHECK(exchanges.crossed()->second.ranks == std::vector<int>{1});
  exchanges.cancel(1, {Line::main, 1});
  CHECK_FALSE(exchanges.crossed());              // rank 1 may go on
  CHECK(put(1, "b", 1).empty());
  CHECK(exchanges.waits_for(1)->ranks == std::vector<int>{0});
  CHECK(exchanges.waits_for(1)->phase == "a");
  const auto answers = put(0, "b", 2);           // rank 0 takes its part of a back
  REQUIRE(answers.size() == 2);
  CHECK_FALSE(exchanges.crossed());
  CHECK(answers[0].request.number == 2);
  CHECK(answers[1].request.number == 1);
  CHECK(parse_reply(reply_head(answers[0].request) + *answers[0].body, 2)->parts == std::vector<std::string>{"part of 0", "part of 1"});
  CHECK(put(1, "a", 2).empty());
  CHECK_FALSE(exchanges.late(at(99)));
  CHECK(exchanges.late(at(100))->ranks == std::vector<int>{0});
  exchanges.cancel(1, {Line::main, 1});          // an older number
  CHECK(exchanges.late(at(100))->phase == "a");
  exchanges.cancel(1, {Line::main, 2});
  CHECK_FALSE(exchanges.waits_for(0));
  CHECK(exchanges.late(at(100))->ranks == std::vector<int>{0});   // of the other line
  exchanges.cancel(1, {Line::loader, 1});
  CHECK_FALSE(exchanges.late(at(1000000)));
  CHECK(put(0, "a", 3).size() == 2);             // the part that is no longer waited for still counts
}

}  // namespace
}  // namespace detr::dist

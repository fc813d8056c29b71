// The meeting of the ranks: who comes, who does not, and strangers.
#include "dist/control.h"

#include <thread>

#include "tests/dist/ranks.h"
#include "tests/support.h"

namespace detr::dist {
namespace {

using test::meet;
using test::run_ranks;

Clock::time_point after(int milliseconds) { return Clock::now() + Milliseconds(milliseconds); }

TEST_CASE("control: every rank gets every rank's bytes", "[cpu]") {
  for (int size = 1; size <= 4; ++size) {
    std::vector<std::vector<std::string>> got(static_cast<std::size_t>(size));
    const auto part = [](int rank, int round) { return std::string(static_cast<std::size_t>(rank * 100000 * round), static_cast<char>('a' + rank)); };
    const auto thrown = run_ranks(size, [&](const Meeting& meeting, const Listener& listener) {
      const auto control = meet(meeting, listener);
      for (int round = 0; round < 20; ++round) got[static_cast<std::size_t>(meeting.rank)] = control->all_gather(part(meeting.rank, round), "round", after(10000));
    });
    for (int rank = 0; rank < size; ++rank) {
      CHECK(thrown[static_cast<std::size_t>(rank)].empty());
      REQUIRE(got[static_cast<std::size_t>(rank)].size() == static_cast<std::size_t>(size));
      for (int other = 0; other < size; ++other) CHECK(got[static_cast<std::size_t>(rank)][static_cast<std::size_t>(other)] == part(other, 19));
    }
  }
}

TEST_CASE("control: those that do not come are named, and all give up", "[cpu]") {
  const Clock::time_point start = Clock::now();
  const auto thrown = run_ranks(4, [&](const Meeting& meeting, const Listener& listener) {
    if (meeting.rank != 1 && meeting.rank != 3) static_cast<void>(meet(meeting, listener));
  }, Milliseconds(500));
  CHECK(thrown[0] == "rank 0: control: ranks 1, 3 did not come within 500 ms");
  const bool own_deadline = thrown[2] == "rank 2: control: no reply of rank 0 in time";   // it may be the first of the two
  CHECK((own_deadline || thrown[2] == thrown[0]));
  CHECK(Clock::now() - start < Milliseconds(2500));
}

TEST_CASE("control: nobody listens", "[cpu]") {
  int port = 0;
  { port = Listener().port(); }
  detr::test::expect_throws<CommError>([&] { Control::join({1, 2, "127.0.0.1", port, "t", Milliseconds(200)}); }, "rank 1: control: cannot connect to 127.0.0.1");
}

TEST_CASE("control: strangers and other jobs are turned away, the job goes on", "[cpu]") {
  std::vector<std::string> got;
  std::string foreign;
  const auto thrown = run_ranks(3, [&](const Meeting& meeting, const Listener& listener) {
    if (meeting.rank == 1) {   // before it comes itself: silence, rubbish, a huge length, another token
      const Socket silent = connect_to("127.0.0.1", meeting.port, after(2000));
      const Socket rubbish = connect_to("127.0.0.1", meeting.port, after(2000));
      static_cast<void>(rubbish.write("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", after(2000)));
      std::string huge = encode({Frame::Kind::hello, std::string(16, 'x')});
      huge[12] = 1;   // 4 GiB
      const Socket large = connect_to("127.0.0.1", meeting.port, after(2000));
      static_cast<void>(large.write(huge, after(2000)));
      Meeting other = meeting;
      other.token = "another job";
      other.timeout = Milliseconds(2000);
      try {
        static_cast<void>(Control::join(other));
      } catch (const CommError& error) {
        foreign = error.what();
      }
      meet(meeting, listener)->all_gather("one", "parts", after(10000));
    } else {
      const auto parts = meet(meeting, listener)->all_gather(meeting.rank == 0 ? "zero" : "two", "parts", after(10000));
      if (meeting.rank == 0) got = parts;
    }
  });
  for (const std::string& text : thrown) CHECK(text.empty());
  CHECK(got == std::vector<std::string>{"zero", "one", "two"});
  CHECK(foreign == "rank 1: control: rank 0 closed its connection");
}

TEST_CASE("control: the second of two with one rank is refused, the job goes on", "[cpu]") {
  std::string refused;
  const auto thrown = run_ranks(3, [&](const Meeting& meeting, const Listener& listener) {
    if (meeting.rank == 2) {   // greets as rank 1 until the real one must have come, then as itself
      std::this_thread::sleep_for(Milliseconds(300));
      Meeting same = meeting;
      same.rank = 1;
      try {
        static_cast<void>(Control::join(same));
      } catch (const CommError& error) {
        refused = error.what();
      }
    }
    static_cast<void>(meet(meeting, listener));
  });
  for (const std::string& text : thrown) CHECK(text.empty());
  CHECK(refused.find("there is a rank 1 already") != std::string::npos);
}

TEST_CASE("control: a rank that fails, leaves or is late is named everywhere", "[cpu]") {
  const auto run = [](const std::function<void(Control&)>& rank2) {
    return run_ranks(4, [&](const Meeting& meeting, const Listener& listener) {
      const auto control = meet(meeting, listener);
      if (meeting.rank == 2) return rank2(*control);
      control->all_gather("", "manifest", after(meeting.rank == 0 ? 500 : 5000));
    });
  };
  const auto expect = [](const std::vector<std::string>& thrown, const std::string& text) {
    for (const int rank : {0, 1, 3}) {
      INFO("rank " << rank << ": " << thrown[static_cast<std::size_t>(rank)]);
      CHECK(thrown[static_cast<std::size_t>(rank)].find(text) != std::string::npos);
    }
  };
  expect(run([](Control& r) { r.fail("rank 2: load: no such file"); }), "rank 2: load: no such file");
  expect(run([](Control&) {}), "rank 0: manifest: rank 2 closed its connection");
  expect(run([](Control&) { std::this_thread::sleep_for(Milliseconds(1500)); }), "rank 0: manifest: rank 2 did not come in time");
}

}  // namespace
}  // namespace detr::dist

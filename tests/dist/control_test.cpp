// The ranks' side of the control connections: exchanges on two lines, waits that end, stop wishes, and who is let in.
#include "dist/control.h"

#include <poll.h>

#include <atomic>
#include <thread>

#include "tests/dist/job.h"
#include "tests/dist/ranks.h"
#include "tests/support.h"

namespace detr::dist {
namespace {

using detr::test::expect_throws;
using test::after;
using test::Job;
using test::meet;
using test::run_ranks;
using test::text_of;

TEST_CASE("control: every rank gets every rank's bytes", "[cpu]") {
  for (int size = 1; size <= 4; ++size) {
    std::vector<std::vector<std::string>> got(static_cast<std::size_t>(size));
    const auto part = [](int rank, int round) { return std::string(static_cast<std::size_t>(rank * 100000 * round), static_cast<char>('a' + rank)); };
    const auto thrown = run_ranks(size, [&](const Meeting& meeting) {
      const auto control = meet(meeting);
      for (int round = 0; round < 20; ++round) got[static_cast<std::size_t>(meeting.rank)] = control->all_gather(part(meeting.rank, round), "round", after(10000));
    });
    for (int rank = 0; rank < size; ++rank) {
      CHECK(thrown[static_cast<std::size_t>(rank)].empty());
      REQUIRE(got[static_cast<std::size_t>(rank)].size() == static_cast<std::size_t>(size));
      for (int other = 0; other < size; ++other) CHECK(got[static_cast<std::size_t>(rank)][static_cast<std::size_t>(other)] == part(other, 19));
    }
  }
}

TEST_CASE("control: where a rank is can be read without a lock", "[cpu]") {
  Job job(1);
  Control& control = job.rank(0);
  const auto place = [&] {
    std::array<char, 64> phase{};
    const std::int64_t step = control.place(phase);
    return concat(step, " ", phase.data());
  };
  CHECK(place() == "-1 start");
  control.enter("a long phase", 12);
  CHECK(place() == "12 a long phase");
  control.enter("load", 13);
  CHECK(place() == "13 load");
  control.enter(std::string(100, 'x'), 14);
  CHECK(place() == "14 " + std::string(63, 'x'));
}

TEST_CASE("control: only rank 0 gets what is gathered to the root", "[cpu]") {
  Job job(3);
  std::vector<std::vector<std::string>> got(3);
  CHECK(job.run([&](int rank, Control& control) { got[static_cast<std::size_t>(rank)] = control.gather_to_root(concat("of ", rank), "results", after(10000)); }).empty());
  CHECK(got[0] == std::vector<std::string>{"of 0", "of 1", "of 2"});
  CHECK(got[1].empty());
  CHECK(got[2].empty());
}

TEST_CASE("control: a part has a largest size, and two lines wait at once", "[cpu]") {
  Job job(2);
  std::atomic<int> right{0};
  const auto texts = job.run([&](int rank, Control& control) {
    std::thread loader([&] {
      for (int step = 0; step < 200; ++step) {
        const auto all = control.all_gather(concat(rank, " at ", step), concat("step ", step), after(20000), Line::loader);
        if (all[1] == concat("1 at ", step)) ++right;
      }
    });
    for (int round = 0; round < 20; ++round) {
      const std::string large(std::size_t{1} << 20U, static_cast<char>('a' + rank));
      const auto all = control.all_gather(large, concat("round ", round), after(20000));
      if (all[0].front() == 'a' && all[1].size() == large.size()) ++right;
    }
    loader.join();
  });
  expect_throws<InvalidArgument>([&] { job.rank(0).all_gather(std::string((std::size_t{64} << 20U) + 1, 'x'), "large", after(1000)); }, "at most 67108864");
  expect_throws<InvalidArgument>([&] { job.rank(0).all_gather("", std::string(257, 'x'), after(1000)); }, "at most 256");
  expect_throws<InvalidArgument>([&] { job.rank(0).all_gather("", "more", after(1000)); }, "this rank has left");
  CHECK(texts.empty());
  CHECK(right == 2 * 220);
}

TEST_CASE("control: a cancelled wait throws, and the line can be used again", "[cpu]") {
  Job job(2);
  std::vector<std::string> got;
  std::string waiting, later;
  const auto texts = job.run([&](int rank, Control& control) {
    if (rank == 0) {
      std::thread canceller([&] {
        std::this_thread::sleep_for(Milliseconds(200));
        control.cancel(Line::loader);
      });
      waiting = text_of<CommError>([&] { control.all_gather("old", "step 5", after(300), Line::loader); });
      canceller.join();
      later = text_of<CommError>([&] { control.all_gather("", "step 6", after(20000), Line::loader); });
      std::this_thread::sleep_for(Milliseconds(500));   // past the deadline of the wait that was cancelled
      control.reopen(Line::loader);
      got = control.all_gather("new", "step 9", after(20000), Line::loader);
    } else {
      std::this_thread::sleep_for(Milliseconds(900));
      control.all_gather("other", "step 9", after(20000), Line::loader);
    }
    control.all_gather("", "end", after(20000));   // the other line was not touched
  });
  CHECK(texts.empty());
  CHECK(waiting == "rank 0: step 5: cancelled");
  CHECK(later == "rank 0: step 6: cancelled");
  CHECK(got == std::vector<std::string>{"new", "other"});
  CHECK_FALSE(job.hub().failure());
}

TEST_CASE("control: a stop wish of one rank, or of the hub, reaches all", "[cpu]") {
  for (const bool by_rank : {true, false}) {
    Job job(3);
    std::atomic<int> before{0};
    const auto texts = job.run([&](int rank, Control& control) {
      before += control.stop_wished() ? 1 : 0;
      control.all_gather("", "start", after(10000));
      if (by_rank && rank == 2) control.wish_stop();
      if (!by_rank && rank == 2) job.hub().stop();
      for (int i = 0; i < 2000 && !control.stop_wished(); ++i) std::this_thread::sleep_for(Milliseconds(5));
      if (!control.stop_wished()) throw CommError("no wish came");
    });
    CHECK(texts.empty());
    CHECK(before == 0);
  }
}

TEST_CASE("control: those that do not come are named, and all give up", "[cpu]") {
  const Clock::time_point start = Clock::now();
  const auto thrown = run_ranks(4, [&](const Meeting& meeting) {
    if (meeting.rank != 1 && meeting.rank != 3) meet(meeting)->all_gather("", "manifest", after(20000));
  }, Milliseconds(500));
  for (const std::size_t rank : {0U, 2U}) CHECK(thrown[rank] == "ranks 1, 3: did not come within the start timeout");
  CHECK(Clock::now() - start < Milliseconds(5000));
}

TEST_CASE("control: nobody listens, and a hub that is silent", "[cpu]") {
  int port = 0;
  { port = Listener().port(); }
  ControlOptions options{1, 2, "t", Milliseconds(200), Milliseconds(1000), {}};
  expect_throws<CommError>([&] { Control::connect("127.0.0.1", port, options); }, "rank 1: control: cannot connect to 127.0.0.1");
  const Listener silent;
  expect_throws<CommError>([&] { Control::connect("127.0.0.1", silent.port(), options); }, "rank 1: control: no welcome of the hub in time");
  auto pair = socket_pair();
  { const Socket closed = std::move(pair.second); }
  expect_throws<CommError>([&] { Control::over(std::move(pair.first), options); }, "rank 1: control: the hub closed the connection");
  expect_throws<InvalidArgument>([&] { Control::over(Socket(), {2, 2, "t", Milliseconds(1), Milliseconds(1), {}}); }, "rank 2 of 2");
}

TEST_CASE("control: another job's rank, another size and a second of one rank are refused, the job goes on", "[cpu]") {
  std::vector<std::string> got;
  std::string foreign, second, size;
  const auto thrown = run_ranks(3, [&](const Meeting& meeting) {
    const auto control = meet(meeting);
    control->all_gather("", "here", after(20000));
    if (meeting.rank == 1) {
      Meeting other = meeting;
      other.token = "another job";
      foreign = text_of<CommError>([&] { meet(other); });
      second = text_of<ConfigError>([&] { meet(meeting); });
      other = meeting;
      other.size = 4;
      size = text_of<ConfigError>([&] { meet(other); });
    }
    const auto parts = control->all_gather(concat(meeting.rank), "parts", after(20000));
    if (meeting.rank == 0) got = parts;
  });
  for (const std::string& text : thrown) CHECK(text.empty());
  CHECK(got == std::vector<std::string>{"0", "1", "2"});
  CHECK(foreign == "rank 1: control: the hub closed the connection");
  CHECK(second == "rank 1: refused: there is a rank 1 already");
  CHECK(size == "rank 1: refused: this job has 3 ranks; here comes rank 1 of 4");
}

TEST_CASE("control: a rank that fails, goes, leaves or is late is named everywhere", "[cpu]") {
  const auto run = [](const std::function<void(Control&)>& rank2, const std::string& text, int code) {
    Job job(4);
    const auto texts = job.run([&](int rank, Control& control) {
      if (rank != 2) control.all_gather("", "manifest", after(rank == 0 ? 3000 : 20000));
      if (rank == 2) rank2(control);
    });
    for (const int rank : {0, 1, 3}) {
      INFO("rank " << rank);
      REQUIRE(texts.contains(rank));
      CHECK(texts.at(rank) == text);
    }
    REQUIRE(job.hub().failure());
    CHECK(job.hub().failure()->text == text);
    CHECK(job.hub().failure()->rank == 2);
    CHECK(job.hub().failure()->code == code);
  };
  run([](Control& r) { r.fail(3, "rank 2: load: no such file"); }, "rank 2: load: no such file", 3);
  run([](Control&) { throw CommError("goes without a word"); }, "rank 2: lost: its connection closed; start", 6);
  run([](Control& r) {
    r.enter("update", 417);   // the hub hears of it with the next beat, a second later
    static_cast<void>(r.verdict(after(20000)));
  }, "rank 2: has not come to manifest by its deadline; step 417, update", 6);
}

TEST_CASE("control: after fail() calls throw, a second one does not count, and the verdict comes", "[cpu]") {
  Job job(2);
  std::optional<Failure> verdict, early;
  std::string lost, more, before;
  const auto texts = job.run([&](int rank, Control& control) {
    if (rank == 1) {
      control.fail(kPeerCode, "rank 1: lost a peer");
      control.fail(3, "rank 1: a consequence");
      lost = control.lost_peer();
      more = text_of<CommError>([&] { control.all_gather("", "more", after(5000)); });
      verdict = control.verdict(after(20000));
    } else {
      std::this_thread::sleep_for(Milliseconds(300));
      before = control.lost_peer();
      early = control.verdict(after(0));
      control.fail(5, "rank 0: diverged");
    }
  });
  CHECK(texts.empty());
  CHECK(lost == "rank 1: lost a peer");
  CHECK(more == "rank 1: lost a peer");
  CHECK(before.empty());
  CHECK_FALSE(early);
  REQUIRE(verdict);
  CHECK(verdict->rank == 0);
  CHECK(verdict->code == 5);
  CHECK(verdict->text == "rank 0: diverged");
}

TEST_CASE("control: a silent hub ends a wait all the same", "[cpu]") {
  auto [own, other] = socket_pair();
  std::thread hub([&other = other] {   // welcomes, and never answers
    Outbox out;
    out.push(encode({Frame::Kind::welcome, {}}));
    static_cast<void>(out.flush(other));
  });
  const auto control = Control::over(std::move(own), {0, 2, "t", Milliseconds(20000), Milliseconds(1000), {}});
  hub.join();
  expect_throws<CommError>([&] { control->all_gather("", "manifest", after(100)); }, "rank 0: manifest: no word of the hub in time");
  expect_throws<CommError>([&] { control->all_gather("", "more", after(100)); }, "rank 0: manifest: no word of the hub in time");
}

TEST_CASE("control: one that has left ends when the hub has read its goodbye, or soon where it does not", "[cpu]") {
  for (const bool reads : {true, false}) {
    auto [own, other] = socket_pair();
    Outbox out;
    out.push(encode({Frame::Kind::welcome, {}}));
    REQUIRE(out.flush(other));
    auto control = Control::over(std::move(own), {0, 2, "t", Milliseconds(20000), Milliseconds(20000), {}});
    control->leave();
    std::atomic<bool> said_goodbye{false};
    std::thread hub([&, &other = other] {
      if (!reads) return;
      std::this_thread::sleep_for(Milliseconds(50));
      FrameReader reader(1 << 20);
      Frame last;
      pollfd wanted{other.descriptor(), POLLIN, 0};
      for (FrameReader::State state = reader.pump(other); state != FrameReader::State::closed && ::poll(&wanted, 1, 20000) == 1; state = reader.pump(other)) {
        if (state == FrameReader::State::whole) last = reader.take();
      }
      said_goodbye = last.kind == Frame::Kind::bye;
      const Socket closed = std::move(other);
    });
    const Clock::time_point start = Clock::now();
    control.reset();
    CHECK(said_goodbye == reads);
    CHECK(Clock::now() - start < Milliseconds(5000));
    hub.join();
  }
}

}  // namespace
}  // namespace detr::dist

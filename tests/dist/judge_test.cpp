// Who failed first: the rules of the hub, on a clock of our own.
#include "dist/judge.h"

#include <csignal>

#include "tests/support.h"

namespace detr::dist {
namespace {

/// The status of waitpid(2) for an exit code, and for a signal.
int exited(int code) { return code << 8; }
int killed(int signal) { return signal; }

/// A job with T = 3 s and R = 5 s, all of whose ranks have greeted at 0 ms.
struct Case {
  explicit Case(int size, bool greet = true) : judge(size, Milliseconds(5000), Milliseconds(3000), at(0)) {
    for (int r = 0; greet && r < size; ++r) judge.greeted(r, 100 + r, "host", at(0));
  }
  static Judge::Time at(int ms) { return Judge::Time(Milliseconds(1000000 + ms)); }
  /// A beat of a rank that moved `age` ms ago.
  void beat(int rank, int ms, std::uint64_t progress, bool waiting, int age = 0, const char* phase = "backward") { judge.beat(rank, {progress, 417, age, waiting, false, 0, phase}, at(ms)); }
  /// The same of a rank that gives work to a GPU, has moved last at `moved`, and is at a place of its step.
  void launch(int rank, int ms, int moved, std::uint64_t position = 0) {
    judge.beat(rank, {static_cast<std::uint64_t>(moved), 417, ms - std::min(ms, moved), false, true, position, "forward"}, at(ms));
  }
  /// The failure after looking at the clock every 50 ms in [from, to], or "".
  std::string text(int from, int to) {
    for (int ms = from; ms <= to && !judge.failure(); ms += 50) {
      judge.decide(at(ms), warnings);
      decided = ms;
    }
    return judge.failure() ? judge.failure()->text : "";
  }
  int code() const { return judge.failure() ? judge.failure()->code : 0; }
  Judge judge;
  std::vector<std::string> warnings;
  int decided = -1;   // when the clock was last looked at
};

TEST_CASE("judge: how a process ended gives the code and the words", "[cpu]") {
  const auto run = [](int status, bool out_of_memory = false) {
    Case c(3);
    c.judge.expect_end(2);
    c.beat(2, 100, 5, false);
    c.judge.closed(2, "lost: its connection closed", c.at(200));
    CHECK(c.text(200, 250).empty());
    c.judge.ended(2, status, out_of_memory, c.at(300));
    const std::string text = c.text(300, 2000);
    CHECK(c.judge.failure()->rank == 2);
    CHECK(c.decided <= 350);
    return std::pair(c.code(), text);
  };
  CHECK(run(killed(SIGKILL)) == std::pair(6, std::string("rank 2: killed by signal 9 (SIGKILL); step 417, backward")));
  CHECK(run(killed(SIGKILL), true) == std::pair(4, std::string("rank 2: killed by signal 9 (SIGKILL), out of memory; step 417, backward")));
  CHECK(run(killed(SIGTERM)).first == 6);
  for (const int crash : {SIGSEGV, SIGABRT, SIGFPE, SIGBUS, SIGILL}) CHECK(run(killed(crash)).first == 1);
  CHECK(run(exited(0)) == std::pair(1, std::string("rank 2: ended with exit code 0 and no word; step 417, backward")));
  CHECK(run(exited(3)).first == 1);
}

TEST_CASE("judge: a closed connection alone is a loss, at once or when nobody reaps", "[cpu]") {
  for (const bool expected : {false, true}) {
    Case c(3);
    if (expected) c.judge.expect_end(1);
    c.judge.closed(1, "lost: its connection closed", c.at(200));
    CHECK(c.text(200, 3000) == "rank 1: lost: its connection closed; start");
    CHECK(c.code() == 6);
    CHECK(c.decided == (expected ? 1200 : 300));
  }
}

TEST_CASE("judge: the first of two losses is named, and the second is listed", "[cpu]") {
  Case c(4);
  for (const int r : {3, 1}) c.judge.expect_end(r);
  c.judge.closed(3, "lost: its connection closed", c.at(200));
  c.judge.closed(1, "lost: its connection closed", c.at(210));
  c.judge.ended(1, killed(SIGSEGV), false, c.at(220));
  c.judge.ended(3, killed(SIGKILL), false, c.at(230));
  CHECK(c.text(250, 3000) == "rank 3: killed by signal 9 (SIGKILL); start; also lost: rank 1");
  CHECK(c.code() == 6);
}

TEST_CASE("judge: a rank's own failure goes before those that peers have", "[cpu]") {
  Case c(4);
  c.judge.failed(0, {0, 6, "rank 0: bucket 2 of step 417: lost a peer"}, c.at(200));
  CHECK(c.text(200, 900).empty());
  c.judge.failed(2, {-1, 3, "rank 2: load: no such file\n"}, c.at(900));
  CHECK(c.text(900, 950).empty());
  CHECK(c.text(1000, 1000) == "rank 2: load: no such file\\n");
  CHECK(c.code() == 3);
  CHECK(c.judge.failure()->rank == 2);

  Case bare(2);   // a text that names no rank gets one
  bare.beat(1, 100, 5, false);
  bare.judge.failed(1, {1, 5, "diverged"}, bare.at(200));
  CHECK(bare.text(300, 300) == "rank 1: diverged; step 417, backward");
}

TEST_CASE("judge: what all ranks fail of is nobody's, and the first of different failures counts", "[cpu]") {
  Case c(3);
  for (const int r : {2, 0, 1}) c.judge.failed(r, {r, 5, "step 3 is not finite"}, c.at(200 + r));
  CHECK(c.text(210, 210) == "step 3 is not finite");
  CHECK(c.code() == 5);
  CHECK(c.judge.failure()->rank == -1);

  Case named(2);   // a text that all have may still say whose it is
  for (const int r : {1, 0}) named.judge.failed(r, {r, 7, "rank 0: last.safetensors: no space"}, named.at(200));
  CHECK(named.text(210, 210) == "rank 0: last.safetensors: no space");

  Case mixed(3);
  mixed.judge.failed(1, {1, 3, "no such file"}, mixed.at(200));
  mixed.judge.failed(0, {0, 5, "no such file"}, mixed.at(210));
  mixed.judge.failed(2, {2, 3, "no such file"}, mixed.at(220));
  CHECK(mixed.text(250, 350) == "rank 1: no such file; start");
  CHECK(mixed.code() == 3);

  Case late(3);   // one that comes much later
  for (const int r : {0, 1}) late.judge.failed(r, {r, 5, "diverged"}, late.at(200));
  CHECK(late.text(200, 350) == "rank 0: diverged; start");

  Case alone(1);
  alone.judge.failed(0, {0, 5, "diverged"}, alone.at(200));
  CHECK(alone.text(200, 350) == "rank 0: diverged; start");
}

TEST_CASE("judge: a rank's own failure goes before a loss at the same time", "[cpu]") {
  Case c(3);
  c.judge.closed(1, "lost: its connection closed", c.at(200));
  c.judge.failed(2, {2, 3, "no such file"}, c.at(250));
  CHECK(c.text(250, 400) == "rank 2: no such file; start");
}

TEST_CASE("judge: a loss goes before the failures that peers had because of it", "[cpu]") {
  Case c(4);
  c.judge.failed(0, {0, 6, "rank 0: lost a peer"}, c.at(200));
  c.judge.failed(3, {3, 6, "rank 3: lost a peer"}, c.at(210));
  c.judge.closed(1, "lost: its connection closed", c.at(700));
  c.judge.failed(1, {1, 1, "rank 1: too late"}, c.at(710));
  CHECK(c.text(700, 3000) == "rank 1: lost: its connection closed; start");
  // One that has failed is not lost when it goes.
  Case other(3);
  other.judge.failed(0, {0, 6, "rank 0: lost a peer"}, other.at(200));
  other.judge.closed(0, "lost: its connection closed", other.at(250));
  other.judge.ended(0, exited(6), false, other.at(250));
  CHECK(other.text(250, 1150).empty());
  CHECK(other.text(1150, 1250) == "rank 0: lost a peer");
}

TEST_CASE("judge: failures of peers alone: the first, after a grace, or when all have one", "[cpu]") {
  Case c(3);
  c.judge.failed(2, {2, 6, "rank 2: late"}, c.at(200));
  c.judge.failed(1, {1, 6, "rank 1: late"}, c.at(300));
  c.beat(0, 600, 7, true);
  c.beat(0, 1150, 8, true);
  CHECK(c.text(300, 1150).empty());
  CHECK(c.text(1200, 1200) == "rank 2: late");
  Case all(2);
  all.judge.failed(1, {1, 6, "ranks disagree"}, all.at(200));
  all.judge.failed(0, {0, 6, "ranks disagree"}, all.at(210));
  CHECK(all.text(250, 250) == "rank 1: ranks disagree; start");
}

TEST_CASE("judge: a rank that does not move while another waits is stalled after T, with a warning before", "[cpu]") {
  Case c(3);
  for (int ms = 0; ms <= 10000 && !c.judge.failure(); ms += 50) {
    if (ms % 500 == 0) {
      c.beat(0, ms, static_cast<std::uint64_t>(std::min(ms, 2000)), ms >= 2000, std::max(0, ms - 2000));   // waits from 2000 on
      c.beat(1, ms, static_cast<std::uint64_t>(ms), false);                                                 // slow, but it moves
      c.beat(2, ms, 1, false, ms, "load");                                                                  // stands still from the start
    }
    c.judge.decide(c.at(ms), c.warnings);
    c.decided = ms;
  }
  CHECK(c.decided == 5000);   // 3 s after the wait has begun
  REQUIRE(c.judge.failure());
  CHECK(c.judge.failure()->rank == 2);
  CHECK(c.code() == 6);
  CHECK(c.judge.failure()->text == "rank 2: has not moved for 3.0 s while others wait; step 417, load");
  CHECK(c.warnings == std::vector<std::string>{"rank 2: has not moved for 1.0 s while others wait; step 417, load"});
}

TEST_CASE("judge: no stall while nobody waits, nor among those that all wait", "[cpu]") {
  for (const bool waiting : {false, true}) {
    Case c(3);
    for (int ms = 0; ms < 60000; ms += 500) {
      for (int r = 0; r < 3; ++r) c.beat(r, ms, 1, waiting, ms);
      c.judge.decide(c.at(ms), c.warnings);
    }
    CHECK_FALSE(c.judge.failure());
    CHECK(c.warnings.empty());
  }
}

TEST_CASE("judge: all ranks stand still and none waits: ended after four times T, and not within a minute", "[cpu]") {
  Case c(3);
  for (int ms = 0; ms <= 70000 && !c.judge.failure(); ms += 500) {
    for (int r = 0; r < 3; ++r) c.beat(r, ms, 1, false, ms);
    c.judge.decide(c.at(ms), c.warnings);
    c.decided = ms;
  }
  REQUIRE(c.judge.failure());
  CHECK(c.judge.failure()->text == "rank 0: has not moved for 60 s, nor has any other rank; step 417, backward");
  CHECK(c.decided == 60000);
}

TEST_CASE("judge: one that falls silent is stalled whether anybody waits for it or not", "[cpu]") {
  for (const bool others_wait : {false, true}) {
    Case c(3);
    for (int ms = 0; ms <= 10000 && !c.judge.failure(); ms += 50) {
      for (int r = 0; r < 3 && ms % 500 == 0; ++r) {
        if (r != 1 || ms <= 1000) c.beat(r, ms, static_cast<std::uint64_t>(others_wait ? 1 : ms), others_wait, others_wait ? ms : 0, "save");   // else rank 0 saves for long
      }
      if (ms == 2000) c.judge.goes_on(1, c.at(ms));   // the others have come to where it waited: no sign of its own
      c.judge.decide(c.at(ms), c.warnings);
      c.decided = ms;
    }
    REQUIRE(c.judge.failure());
    CHECK(c.judge.failure()->text == "rank 1: no sign of life for 3.0 s; step 417, save");
    CHECK(c.code() == 6);
    CHECK(c.decided == 4250);   // T and a beat of 250 ms after its last one
    CHECK(c.warnings == std::vector<std::string>{"rank 1: no sign of life for 1.0 s; step 417, save"});
  }
}

TEST_CASE("judge: where GPU queues are full behind a rank that does not come, that one is named", "[cpu]") {
  enum class How { stopped, hangs_launching, hangs_elsewhere };
  for (const int size : {2, 3, 4}) {
    for (int culprit = 0; culprit < size; ++culprit) {
      for (const How how : {How::stopped, How::hangs_launching, How::hangs_elsewhere}) {
        for (const int others_stop : {1500, 2050}) {   // who is ahead stands still before or after the one it waits for does, at 2000
          CAPTURE(size, culprit, static_cast<int>(how), others_stop);
          Case c(size);
          for (int ms = 0; ms <= 20000 && !c.judge.failure(); ms += 50) {
            for (int r = 0; r < size; ++r) {
              if ((ms + 100 * r) % 500 != 0) continue;   // each beats at times of its own
              if (r != culprit) c.launch(r, ms, std::min(ms, others_stop + 30 * r), 900 - static_cast<std::uint64_t>(r));
              else if (how == How::hangs_elsewhere) c.beat(r, ms, static_cast<std::uint64_t>(std::min(ms, 2000)), false, std::max(0, ms - 2000), "save");
              else if (how == How::hangs_launching || ms <= 2000) c.launch(r, ms, std::min(ms, 2000), 300);
            }
            c.judge.decide(c.at(ms), c.warnings);
            c.decided = ms;
          }
          REQUIRE(c.judge.failure());
          CHECK(c.judge.failure()->rank == culprit);
          CHECK(c.code() == 6);
          CHECK(c.decided >= 4500);
          CHECK(c.decided <= 6500);
        }
      }
    }
  }
}

TEST_CASE("judge: ranks whose GPU work moves, and one that stands still alone, are no stall", "[cpu]") {
  Case c(3);
  for (int ms = 0; ms <= 60000; ms += 500) {
    c.launch(0, ms, ms);
    c.launch(1, ms, ms - ms % 2500);   // slow
    c.launch(2, ms, 0);                // reads a file for long; nobody waits for it yet
    c.judge.decide(c.at(ms), c.warnings);
  }
  CHECK_FALSE(c.judge.failure());
}

TEST_CASE("judge: peers that gave up wait for the stall that they gave up on", "[cpu]") {
  Case c(3);
  for (int ms = 0; ms <= 10000 && !c.judge.failure(); ms += 50) {
    if (ms % 500 == 0 && ms <= 2000) c.beat(2, ms, 1, true, ms);
    if (ms % 500 == 0) c.beat(0, ms, 1, true, ms);
    if (ms % 500 == 0) c.beat(1, ms, 1, true, ms);
    if (ms == 3000) c.judge.failed(0, {0, 6, "rank 0: not done by its deadline"}, c.at(ms));
    c.judge.decide(c.at(ms), c.warnings);
    c.decided = ms;
  }
  CHECK(c.judge.failure()->rank == 2);
  CHECK(c.decided == 5250);
}

TEST_CASE("judge: those that never come are all named, at R", "[cpu]") {
  Case c(4, false);
  c.judge.greeted(0, 1, "host", c.at(10));
  c.judge.greeted(2, 1, "host", c.at(10));
  for (int ms = 50; ms < 20000 && !c.judge.failure(); ms += 50) {
    for (const int r : {0, 2}) c.beat(r, ms, 1, true, ms);
    static_cast<void>(c.text(ms, ms));
  }
  REQUIRE(c.judge.failure());
  CHECK(c.judge.failure()->text == "ranks 1, 3: did not come within the start timeout");
  CHECK(c.decided == 5000);
  CHECK(c.judge.failure()->rank == 1);
  CHECK(c.code() == 6);
  Case one(2, false);
  one.judge.greeted(0, 1, "host", one.at(10));
  one.judge.ended(1, killed(SIGKILL), false, one.at(40));   // in its start-up
  CHECK(one.text(50, 20000) == "rank 1: killed by signal 9 (SIGKILL); start");
  CHECK(one.decided <= 150);
}

TEST_CASE("judge: a goodbye is a clean end, but for a signal", "[cpu]") {
  Case c(2);
  c.judge.left(0, c.at(100));
  CHECK_FALSE(c.judge.all_left());
  c.judge.closed(0, "lost: its connection closed", c.at(110));
  c.judge.ended(0, exited(75), false, c.at(110));
  c.beat(1, 200, 1, true);
  CHECK(c.text(200, 2000).empty());
  c.judge.left(1, c.at(2000));
  CHECK(c.judge.all_left());
  c.judge.ended(1, killed(SIGSEGV), false, c.at(2100));
  CHECK(c.text(2100, 2500) == "rank 1: killed by signal 11 (SIGSEGV), after its end; step 417, backward");
  CHECK(c.code() == 1);
}

}  // namespace
}  // namespace detr::dist

// The hub against its ranks: losses, stalls, endings, a hub that goes, and connections that send rubbish.
#include "dist/hub.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <new>
#include <random>
#include <thread>

#include "dist/messages.h"
#include "tests/dist/job.h"
#include "tests/dist/ranks.h"
#include "tests/support.h"

namespace detr::dist {
namespace {

using test::after;
using test::Job;
using test::text_of;

std::chrono::milliseconds since(Clock::time_point start) { return std::chrono::duration_cast<Milliseconds>(Clock::now() - start); }

TEST_CASE("hub: all leave, and it is done", "[cpu]") {
  Job job(3);
  CHECK_FALSE(job.hub().done());
  CHECK(job.run([](int, Control& control) { control.all_gather("", "end", after(10000)); }).empty());
  REQUIRE(job.wait());
  for (int i = 0; i < 1000 && !job.hub().done(); ++i) std::this_thread::sleep_for(Milliseconds(5));
  CHECK(job.hub().done());
  for (int r = 0; r < 3; ++r) {
    job.drop(r);
    job.hub().child_ended(r, 75 << 8);
  }
  std::this_thread::sleep_for(Milliseconds(300));
  CHECK_FALSE(job.hub().failure());
  for (int r = 0; r < 3; ++r) CHECK(job.aborts(r).empty());
}

TEST_CASE("hub: a goodbye counts, also where the hub has something to tell before it has read it", "[cpu]") {
  for (const bool tcp : {false, true}) {
    INFO("over TCP: " << tcp);
    std::atomic<bool> held{false}, go_on{false};
    Listener listener;
    const int port = listener.port();
    Hub hub({2, "token", Milliseconds(20000), Milliseconds(20000), [&](const std::string&) {   // keeps the hub's thread
      held = true;
      for (int i = 0; i < 20000 && !go_on; ++i) std::this_thread::sleep_for(Milliseconds(1));
    }});
    hub.listen(std::move(listener));
    const auto send = [](const Socket& socket, const std::string& bytes) {
      REQUIRE(::send(socket.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    };
    std::vector<Socket> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      if (tcp) {
        ranks.push_back(connect_to("127.0.0.1", port, after(5000)));
      } else {
        auto [theirs, ours] = socket_pair();
        hub.attach(rank, std::move(ours));
        ranks.push_back(std::move(theirs));
      }
      send(ranks.back(), encode({Frame::Kind::hello, bytes_of(Greeting{rank, 2, 1, "token", "host"})}));
    }
    const auto here = [&] { return hub.ranks()[0].here && hub.ranks()[1].here; };
    for (int i = 0; i < 1000 && !here(); ++i) std::this_thread::sleep_for(Milliseconds(5));
    REQUIRE(here());
    const Socket stranger = connect_to("127.0.0.1", port, after(5000));
    send(stranger, encode({Frame::Kind::hello, "worth a warning"}));
    for (int i = 0; i < 5000 && !held; ++i) std::this_thread::sleep_for(Milliseconds(1));
    REQUIRE(held);
    for (const Socket& rank : ranks) {
      for (int i = 0; i < 100; ++i) send(rank, encode({Frame::Kind::beat, bytes_of(Beat{})}));   // more than the hub reads before the others have their turn
      send(rank, encode({Frame::Kind::bye, {}}));
      rank.finish(Milliseconds(50));
    }
    ranks.clear();
    hub.stop();   // to be told to ranks that are gone
    go_on = true;
    for (int i = 0; i < 1000 && !hub.done() && !hub.failure(); ++i) std::this_thread::sleep_for(Milliseconds(5));
    for (int rank = 0; rank < 2; ++rank) hub.child_ended(rank, 75 << 8);
    std::this_thread::sleep_for(Milliseconds(300));
    CHECK(hub.done());
    CHECK((hub.failure() ? hub.failure()->text : "") == "");
  }
}

TEST_CASE("hub: it knows who is where", "[cpu]") {
  Job job(2, Milliseconds(400));   // a beat each 100 ms
  job.rank(1).enter("a phase with a name that is longer than the sixty-three bytes that count", 417);
  std::vector<RankState> ranks;
  for (int i = 0; i < 1000 && (ranks.empty() || ranks[1].step != 417); ++i) {
    std::this_thread::sleep_for(Milliseconds(5));
    ranks = job.hub().ranks();
  }
  CHECK(ranks[1].step == 417);
  CHECK(ranks[1].phase == "a phase with a name that is longer than the sixty-three bytes t");
  CHECK(ranks[1].pid == ::getpid());
  CHECK(ranks[1].here);
  CHECK_FALSE(ranks[1].waiting);
  CHECK(ranks[0].phase == "start");
}

TEST_CASE("hub: every rank that is left is told of a loss, once, and soon", "[cpu]") {
  Job job(4);
  job.rank(2).enter("backward", 417);
  const Clock::time_point start = Clock::now();
  job.drop(2);
  job.hub().child_ended(2, SIGKILL);
  REQUIRE(job.wait());
  CHECK(since(start) < Milliseconds(1500));
  for (int i = 0; i < 1000 && (job.aborts(0).empty() || job.aborts(1).empty() || job.aborts(3).empty()); ++i) std::this_thread::sleep_for(Milliseconds(5));
  for (const int r : {0, 1, 3}) {
    REQUIRE(job.aborts(r).size() == 1);
    CHECK(job.aborts(r)[0].rank == 2);
    CHECK(job.aborts(r)[0].code == 6);
    CHECK(job.aborts(r)[0].text.starts_with("rank 2: killed by signal 9 (SIGKILL); "));
    for (int i = 0; i < 1000 && job.rank(r).lost_peer().empty(); ++i) std::this_thread::sleep_for(Milliseconds(5));
    CHECK(job.rank(r).lost_peer() == job.aborts(r)[0].text);
  }
  job.drop(0);   // a consequence
  std::this_thread::sleep_for(Milliseconds(200));
  CHECK(job.hub().failure()->rank == 2);
}

TEST_CASE("hub: a failure that was sent just before the process ended counts", "[cpu]") {
  for (int trial = 0; trial < 20; ++trial) {
    Job job(2);
    job.rank(1).fail(3, "rank 1: load: no such file");
    job.drop(1);
    job.hub().child_ended(1, 3 << 8);
    REQUIRE(job.wait());
    CHECK(job.hub().failure()->text == "rank 1: load: no such file");
    CHECK(job.hub().failure()->code == 3);
  }
}

TEST_CASE("hub: the launcher's own reason, and a rank that never starts", "[cpu]") {
  Job job(2);
  job.hub().fail({1, 8, "rank 1: could not be started"});
  REQUIRE(job.wait());
  CHECK(job.hub().failure()->code == 8);
  CHECK(text_of<CommError>([&] { job.rank(0).all_gather("", "manifest", after(10000)); }) == "rank 1: could not be started");
  Hub hub({3, "token", Milliseconds(20000), Milliseconds(20000), {}});
  auto [theirs, ours] = socket_pair();
  hub.attach(1, std::move(ours));
  const Clock::time_point start = Clock::now();
  { const Socket closed = std::move(theirs); }
  hub.child_ended(1, 2 << 8);
  pollfd wanted{hub.descriptor(), POLLIN, 0};
  REQUIRE(::poll(&wanted, 1, 20000) == 1);
  CHECK(since(start) < Milliseconds(2000));
  CHECK(hub.failure()->text == "rank 1: ended with exit code 2 and no word; start");
  CHECK(hub.failure()->code == 2);
}

TEST_CASE("hub: one that has left while another waits for it is named; a clean end is none", "[cpu]") {
  for (const bool before : {true, false}) {
    Job job(3);
    const auto texts = job.run([&](int rank, Control& control) {
      if (rank == 1) {
        std::this_thread::sleep_for(Milliseconds(before ? 0 : 300));
        return;
      }
      std::this_thread::sleep_for(Milliseconds(before ? 300 : 0));
      control.all_gather("", "manifest", after(20000));
    });
    REQUIRE(texts.size() == 2);
    CHECK(texts.at(0).starts_with("rank 1: has left without coming to manifest, awaited by rank"));
    CHECK(job.hub().failure()->code == 6);
    CHECK(job.hub().failure()->rank == 1);
  }
}

TEST_CASE("hub: a rank that stands still while others wait; one that moves; one that nobody waits for", "[cpu]") {
  const Milliseconds timeout(1200);
  Job job(3, timeout);
  std::atomic<bool> over{false};
  const Clock::time_point start = Clock::now();
  Clock::time_point waited;
  const auto texts = job.run([&](int rank, Control& control) {
    if (rank == 1) {   // slow, but alive: for more than T, others waiting
      for (int i = 0; i < 30; ++i) {
        std::this_thread::sleep_for(Milliseconds(80));
        control.tick();
      }
    } else if (rank == 2) {
      control.all_gather("", "first", after(20000));
      control.enter("load", 7);
      while (!over) std::this_thread::sleep_for(Milliseconds(5));   // nobody waits for 2.5 s, then one does
      return;
    }
    if (rank < 2) control.all_gather("", "first", after(20000));
    if (rank == 1) {
      control.enter("backward", 7);
      std::this_thread::sleep_for(Milliseconds(2500));
      if (!control.lost_peer().empty()) throw CommError("too soon");
      waited = Clock::now();
      control.all_gather("", "second", after(20000));
    }
    if (rank == 0) {
      for (int i = 0; i < 4000 && control.lost_peer().empty(); ++i) {
        control.tick();
        std::this_thread::sleep_for(Milliseconds(5));
      }
      over = true;
    }
  });
  CHECK(since(start) > Milliseconds(2400 + 2500 + 1200));
  REQUIRE(job.hub().failure());
  CHECK(job.hub().failure()->rank == 2);
  CHECK(job.hub().failure()->text.starts_with("rank 2: has not moved for 1."));
  CHECK(job.hub().failure()->text.ends_with(" s while others wait; step 7, load"));
  CHECK(texts.at(1) == job.hub().failure()->text);
  CHECK(std::ranges::count_if(job.warnings(), [](const std::string& line) { return line.starts_with("rank 2: has not moved for 0."); }) == 1);
}

TEST_CASE("hub: at a deadline the rank that works is named before those that wait elsewhere", "[cpu]") {
  Job job(4);
  std::atomic<bool> over{false};
  const auto texts = job.run([&](int rank, Control& control) {
    if (rank == 0) {
      std::this_thread::sleep_for(Milliseconds(200));
      over = text_of<CommError>([&] { control.all_gather("", "manifest", after(300)); }) != "nothing was thrown";
    }
    if (rank == 1 || rank == 3) control.all_gather("", "addresses", after(20000));
    while (rank == 2 && !over) std::this_thread::sleep_for(Milliseconds(5));
  });
  CHECK(texts.at(1) == "rank 2: has not come to manifest by its deadline; start; also ranks 1, 3");
  CHECK(job.hub().failure()->rank == 2);
}

TEST_CASE("hub: ranks that all wait, but not for the same, are told at once", "[cpu]") {
  Job job(3);
  const Clock::time_point start = Clock::now();
  const auto texts = job.run([&](int rank, Control& control) { control.all_gather("", rank == 1 ? "AP 6" : "output folder", after(60000)); });
  CHECK(since(start) < Milliseconds(5000));
  REQUIRE(texts.size() == 3);
  for (const auto& [rank, text] : texts) CHECK(text.starts_with("rank 1: waits in AP 6, ranks 0, 2 in output folder; "));
}

TEST_CASE("hub: without it every rank ends within a second", "[cpu]") {
  Job job(3);
  job.rank(1).leave();
  std::this_thread::sleep_for(Milliseconds(100));
  const Clock::time_point start = Clock::now();
  job.stop_hub();
  for (int i = 0; i < 1000 && (job.aborts(0).empty() || job.aborts(2).empty()); ++i) std::this_thread::sleep_for(Milliseconds(1));
  CHECK(since(start) < Milliseconds(1000));
  REQUIRE(job.aborts(0).size() == 1);
  CHECK(job.aborts(0)[0].rank == -1);
  CHECK(job.aborts(0)[0].code == 6);
  CHECK(job.aborts(0)[0].text == "rank 0: the hub of the job is gone; start");
  CHECK(job.aborts(1).empty());   // it had left
}

TEST_CASE("hub: strangers and rubbish do no harm", "[cpu]") {
  std::mt19937_64 random(11);
  const auto thrown = test::run_ranks(2, [&](const Meeting& meeting) {
    const auto control = test::meet(meeting);
    control->all_gather("", "here", after(20000));
    if (meeting.rank == 1) {
      std::vector<Socket> silent;
      for (int trial = 0; trial < 300; ++trial) {
        Socket socket = connect_to("127.0.0.1", meeting.port, after(5000));
        std::string bytes(random() % 600, '\0');
        for (char& byte : bytes) byte = static_cast<char>(random());
        if (trial % 4 == 1) bytes = encode_head(static_cast<Frame::Kind>(1 + random() % 11), random() % 100) + bytes;   // any kind before the greeting
        if (trial % 4 == 2) bytes = encode({Frame::Kind::hello, bytes.substr(0, 500)});
        if (trial % 4 == 3) bytes = encode_head(Frame::Kind::hello, random());
        static_cast<void>(::send(socket.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
        if (trial % 3 == 0) silent.push_back(std::move(socket));   // stays open
      }
    }
    control->all_gather("", "still here", after(20000));
  });
  CHECK(thrown[0].empty());
  CHECK(thrown[1].empty());
}

TEST_CASE("hub: what it cannot do itself is the job's failure, and nobody waits for it", "[cpu]") {
  Listener listener;
  const int port = listener.port();
  Hub hub({2, "token", Milliseconds(20000), Milliseconds(20000), [](const std::string&) { throw std::bad_alloc(); }});
  hub.listen(std::move(listener));
  const auto control = test::meet({0, 2, "127.0.0.1", port, "token"});
  Socket stranger = connect_to("127.0.0.1", port, after(5000));
  const std::string bytes = encode({Frame::Kind::hello, bytes_of(Greeting{1, 2, 1, "another token", "host"})});   // worth a warning
  REQUIRE(::send(stranger.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
  detr::test::expect_throws<CommError>([&] { control->all_gather("", "here", after(20000)); }, "the hub of the job has failed: ");
  REQUIRE(hub.failure());
  CHECK(hub.failure()->code == 4);
}

TEST_CASE("hub: a rank that sends rubbish after its greeting is lost, whatever it is", "[cpu]") {
  std::mt19937_64 random(13);
  for (int trial = 0; trial < 60; ++trial) {
    Hub hub({2, "token", Milliseconds(20000), Milliseconds(20000), {}});
    Listener listener;
    const Socket theirs = connect_to("127.0.0.1", listener.port(), after(5000));
    hub.listen(std::move(listener));
    std::string bytes = encode({Frame::Kind::hello, bytes_of(Greeting{1, 2, 1, "token", "host"})});
    std::string rubbish(16 + random() % 200, '\0');
    for (char& byte : rubbish) byte = static_cast<char>(random());
    const auto kind = static_cast<Frame::Kind>(4 + random() % 8);
    const bool empty_kind = kind == Frame::Kind::stop || kind == Frame::Kind::bye;   // their bytes are not looked at
    if (trial % 2 == 0 && !empty_kind) rubbish = encode({kind, rubbish});
    if (trial % 10 == 1) rubbish = encode_head(Frame::Kind::exchange, std::size_t{80} << 20U);   // over the cap
    bytes += rubbish;
    REQUIRE(::send(theirs.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    pollfd wanted{hub.descriptor(), POLLIN, 0};
    REQUIRE(::poll(&wanted, 1, 20000) == 1);
    REQUIRE(hub.failure());
    CHECK(hub.failure()->text == "rank 1: sent what is no message; start");
  }
}

/// Exchanges for ever, with `fault` before the fifth one on a rank; exit code 10 after a CommError.
int exchange(const Meeting& meeting, int failing, const std::function<void()>& fault) {
  const auto control = test::meet(meeting);
  try {
    for (int step = 0;; ++step) {
      control->enter("forward", step);
      if (meeting.rank == failing && step == 5) fault();
      control->all_gather(std::string(100000, 'x'), concat("step ", step), after(60000));
      if (step > 5) std::this_thread::sleep_for(Milliseconds(2));
    }
  } catch (const CommError&) {
    return 10;
  }
}

TEST_CASE("hub: a process that is killed, or crashes, is named with its signal", "[cpu]") {
  for (const int signal : {SIGKILL, SIGSEGV}) {
    for (const int failing : {0, 2}) {
      std::optional<Failure> failure;
      const auto endings = test::run_processes(3, [&](const Meeting& meeting) { return exchange(meeting, failing, [&] {
        static_cast<void>(::signal(signal, SIG_DFL));
        static_cast<void>(::raise(signal));
      }); }, Milliseconds(30000), {}, Milliseconds(20000), [&](Hub& hub, const auto&) { failure = hub.failure(); });
      for (int r = 0; r < 3; ++r) CHECK((r == failing ? endings[static_cast<std::size_t>(r)].signal == signal : endings[static_cast<std::size_t>(r)].code == 10));
      REQUIRE(failure);
      CHECK(failure->rank == failing);
      CHECK(failure->code == (signal == SIGKILL ? 6 : 1));
      CHECK(failure->text.starts_with(concat("rank ", failing, ": killed by signal ", signal)));
    }
  }
}

TEST_CASE("hub: a stopped process is named after T; one that is stopped for less goes on", "[cpu]") {
  const Milliseconds timeout(2000);
  std::optional<Failure> failure;
  Clock::time_point start, named;
  const auto stop = [] { static_cast<void>(::raise(SIGSTOP)); };
  const auto endings = test::run_processes(3, [&](const Meeting& meeting) { return exchange(meeting, 1, stop); }, Milliseconds(60000), {1}, timeout, [&](Hub& hub, const auto&) {
    if (start == Clock::time_point{} && hub.ranks()[0].phase == "step 5") start = Clock::now();
    if (!failure) named = Clock::now();
    failure = hub.failure();
  });
  CHECK(endings[0].code == 10);
  CHECK(endings[2].code == 10);
  CHECK(endings[1].signal == SIGKILL);
  REQUIRE(failure);
  CHECK(failure->rank == 1);
  CHECK(failure->code == 6);
  CHECK(named - start > Milliseconds(1400));
  CHECK(named - start < Milliseconds(6000));

  bool resumed = false;
  std::atomic<int> steps{0};
  start = {};
  const auto others = test::run_processes(2, [&](const Meeting& meeting) {
    const auto control = test::meet(meeting);
    for (int step = 0; step < 20; ++step) {
      control->enter("forward", step);
      if (meeting.rank == 1 && step == 5) static_cast<void>(::raise(SIGSTOP));
      control->all_gather("", concat("step ", step), after(60000));
    }
    return 10;
  }, Milliseconds(60000), {}, timeout, [&](Hub& hub, const std::vector<pid_t>& processes) {
    if (start == Clock::time_point{} && hub.ranks()[0].phase == "step 5") start = Clock::now();
    if (start == Clock::time_point{} || resumed || since(start) < Milliseconds(800)) return;
    resumed = true;
    static_cast<void>(::kill(processes[1], SIGCONT));
  });
  CHECK(resumed);
  CHECK(others[0].code == 10);
  CHECK(others[1].code == 10);
}

TEST_CASE("hub: large replies to a stopped process do not hold up the others", "[cpu]") {
  void* const page = ::mmap(nullptr, sizeof(std::atomic<bool>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(page != MAP_FAILED);
  auto* const stopped = new (page) std::atomic<bool>(false);
  const auto endings = test::run_processes(3, [&](const Meeting& meeting) {
    const auto control = test::meet(meeting);
    const std::string large(std::size_t{8} << 20U, static_cast<char>('a' + meeting.rank));
    while (meeting.rank < 2 && !*stopped) std::this_thread::sleep_for(Milliseconds(5));
    const auto all = control->all_gather(large, "large", after(60000));   // a reply of 24 MiB, which no socket holds
    if (all.size() != 3 || all[2] != std::string(large.size(), 'c')) return 11;
    control->leave();
    return 10;
  }, Milliseconds(60000), {2}, Milliseconds(20000), [&](Hub& hub, const std::vector<pid_t>& processes) {
    if (*stopped || !hub.ranks()[2].waiting) return;   // once its part is there
    static_cast<void>(::kill(processes[2], SIGSTOP));
    *stopped = true;
  });
  CHECK(*stopped);
  static_cast<void>(::munmap(page, sizeof(std::atomic<bool>)));
  CHECK(endings[0].code == 10);
  CHECK(endings[1].code == 10);
  CHECK(endings[2].signal == SIGKILL);
}

}  // namespace
}  // namespace detr::dist

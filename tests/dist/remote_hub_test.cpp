// The hub as a launcher on another host sees it: ends of processes go there, the end of the job comes back.
#include "dist/remote_hub.h"

#include <poll.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "tests/dist/job.h"
#include "tests/support.h"

namespace detr::dist {
namespace {

using test::after;

constexpr Milliseconds kLong{20000};

/// A job of three ranks on two "hosts": rank 0 beside the hub, 1 and 2 with a launcher of their own.
class TwoHosts {
 public:
  explicit TwoHosts(std::vector<long> pids = {::getpid(), ::getpid()}, int size = 3) {
    Listener listener;
    port_ = listener.port();
    hub_ = std::make_unique<Hub>(HubOptions{3, "token", kLong, kLong, {}});
    hub_->listen(std::move(listener));
    for (int rank = 0; rank < 3; ++rank) controls_.push_back(Control::connect("127.0.0.1", port_, {rank, 3, "token", kLong, kLong, {}}));
    remote_ = std::make_unique<RemoteHub>(RemoteHubOptions{"127.0.0.1", port_, "token", 1, size, std::move(pids), kLong, kLong});
  }
  Hub& hub() { return *hub_; }
  RemoteHub& remote() { return *remote_; }
  std::shared_ptr<Control>& rank(int rank) { return controls_[static_cast<std::size_t>(rank)]; }
  void stop_hub() { hub_.reset(); }
  void stop_remote() { remote_.reset(); }
  /// The failure as both say it.
  Failure failure() {
    for (const int descriptor : {hub_->descriptor(), remote_->descriptor()}) {
      pollfd wanted{descriptor, POLLIN, 0};
      REQUIRE(::poll(&wanted, 1, 20000) == 1);
    }
    REQUIRE(hub_->failure());
    REQUIRE(remote_->failure());
    CHECK(remote_->failure()->rank == hub_->failure()->rank);
    CHECK(remote_->failure()->code == hub_->failure()->code);
    CHECK(remote_->failure()->text == hub_->failure()->text);
    return *hub_->failure();
  }

 private:
  int port_ = 0;
  std::unique_ptr<Hub> hub_;
  std::vector<std::shared_ptr<Control>> controls_;
  std::unique_ptr<RemoteHub> remote_;
};

TEST_CASE("remote hub: how a process on another host ended gives the job's code", "[cpu]") {
  struct Case {
    int status;
    bool out_of_memory;
    int code;
    const char* text;
  };
  for (const Case& one : {Case{SIGSEGV, false, 1, "rank 2: killed by signal 11 (SIGSEGV)"}, Case{SIGKILL, false, 6, "rank 2: killed by signal 9 (SIGKILL)"},
                          Case{SIGKILL, true, 4, "rank 2: killed by signal 9 (SIGKILL), out of memory"}, Case{0, false, 1, "rank 2: ended with exit code 0 and no word"}}) {
    for (const bool told_first : {false, true}) {   // the launcher's word and the rank's connection come in any order
      TwoHosts job;
      if (told_first) job.remote().child_ended(2, one.status, one.out_of_memory);
      std::this_thread::sleep_for(Milliseconds(50));
      job.rank(2).reset();
      if (!told_first) job.remote().child_ended(2, one.status, one.out_of_memory);
      const Failure failure = job.failure();
      CHECK(failure.rank == 2);
      CHECK(failure.code == one.code);
      CHECK(failure.text.starts_with(one.text));
    }
  }
}

TEST_CASE("remote hub: a failure of the rank's own is not lost to its end", "[cpu]") {
  TwoHosts job;
  job.remote().child_ended(1, 3 << 8, false);
  std::this_thread::sleep_for(Milliseconds(200));   // the rank's own word comes later, from its own connection
  job.rank(1)->fail(3, "rank 1: load: no such file");
  const Failure failure = job.failure();
  CHECK(failure.code == 3);
  CHECK(failure.text == "rank 1: load: no such file");
}

TEST_CASE("remote hub: the end of a process that is none of the job's is nothing to it", "[cpu]") {
  TwoHosts job({::getpid(), 1});   // a second launcher of the same ranks, by mistake: the hub has refused its process
  job.remote().child_ended(2, SIGKILL, false);
  std::this_thread::sleep_for(Milliseconds(1500));
  CHECK_FALSE(job.hub().failure());
}

TEST_CASE("remote hub: the end of the job", "[cpu]") {
  TwoHosts job;
  for (int rank = 0; rank < 3; ++rank) job.rank(rank)->leave();
  for (const int rank : {1, 2}) job.remote().child_ended(rank, 0, false);
  for (int i = 0; i < 2000 && !(job.hub().done() && job.hub().ranks()[2].status); ++i) std::this_thread::sleep_for(Milliseconds(5));
  CHECK(job.hub().done());
  CHECK_FALSE(job.remote().done());   // other hosts may still have something to tell
  for (int rank = 0; rank < 3; ++rank) job.rank(rank).reset();
  for (int i = 0; i < 2000 && !job.hub().ranks()[2].status; ++i) std::this_thread::sleep_for(Milliseconds(5));
  CHECK(job.hub().ranks()[2].status == 0);
  job.stop_hub();
  pollfd wanted{job.remote().descriptor(), POLLIN, 0};
  REQUIRE(::poll(&wanted, 1, 20000) == 1);
  CHECK(job.remote().done());
  CHECK_FALSE(job.remote().failure());
}

TEST_CASE("remote hub: a stop and a failure of the launcher's own reach the job", "[cpu]") {
  TwoHosts job;
  job.remote().stop();
  for (int i = 0; i < 2000 && !job.rank(0)->stop_wished(); ++i) std::this_thread::sleep_for(Milliseconds(5));
  for (int rank = 0; rank < 3; ++rank) {
    for (int i = 0; i < 2000 && !job.rank(rank)->stop_wished(); ++i) std::this_thread::sleep_for(Milliseconds(5));
    CHECK(job.rank(rank)->stop_wished());
  }
  job.remote().fail({1, 130, "ended at once by a second signal (SIGINT)"});
  job.stop_remote();   // sends it
  pollfd wanted{job.hub().descriptor(), POLLIN, 0};
  REQUIRE(::poll(&wanted, 1, 20000) == 1);
  CHECK(job.hub().failure()->code == 130);
}

TEST_CASE("remote hub: a failure that the hub is told in its last moment", "[cpu]") {
  TwoHosts job;
  std::this_thread::sleep_for(Milliseconds(100));   // the launcher has greeted
  job.hub().fail({0, 9, "the ranks ended with different exit codes"});
  job.stop_hub();
  pollfd wanted{job.remote().descriptor(), POLLIN, 0};
  REQUIRE(::poll(&wanted, 1, 20000) == 1);
  CHECK(job.remote().failure()->code == 9);
}

TEST_CASE("remote hub: none, one that goes, and one of another job", "[cpu]") {
  const auto failure_of = [](RemoteHub& remote) {
    pollfd wanted{remote.descriptor(), POLLIN, 0};
    REQUIRE(::poll(&wanted, 1, 20000) == 1);
    return remote.failure().value();
  };
  {
    const int port = Listener().port();
    RemoteHub remote({"127.0.0.1", port, "token", 1, 3, {1, 2}, Milliseconds(200), kLong});
    CHECK(failure_of(remote).code == 6);
    CHECK(remote.failure()->text.find(concat("cannot connect to 127.0.0.1:", port)) != std::string::npos);
  }
  {
    TwoHosts job;
    std::this_thread::sleep_for(Milliseconds(100));
    job.stop_hub();   // its launcher has been killed
    CHECK(failure_of(job.remote()).rank == -1);
    CHECK(job.remote().failure()->code == 6);
    CHECK(job.remote().failure()->text.find("is gone") != std::string::npos);
  }
  {
    TwoHosts job({1, 2}, 4);
    CHECK(failure_of(job.remote()).code == 2);
    CHECK(job.remote().failure()->text == "refused: this job has 3 ranks; here come ranks from 1 on of 4");
    CHECK_FALSE(job.hub().failure());
  }
  const Clock::time_point begin = Clock::now();
  { RemoteHub remote({"127.0.0.1", Listener().port(), "token", 1, 3, {1, 2}, kLong, kLong}); }   // still connecting
  CHECK(Clock::now() - begin < Milliseconds(5000));
}

}  // namespace
}  // namespace detr::dist

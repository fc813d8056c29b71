#include "runtime/thread_pool.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>

#include "tests/support.h"

using namespace detr;
using namespace detr::test;

TEST_CASE("thread pool: every index once", "[cpu]") {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == threads);
    for (const std::int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
      pool.parallel_for(count, [&](std::int64_t i) { ++seen[static_cast<std::size_t>(i)]; });
      std::int64_t once = 0;
      for (const auto& n : seen) once += n == 1;
      CHECK(once == count);
    }
    pool.parallel_for(-1, [](std::int64_t) { FAIL_CHECK("nothing to do"); });
  }
}

TEST_CASE("thread pool: one thread runs in the caller, in order", "[cpu]") {
  ThreadPool pool(1);
  const auto caller = std::this_thread::get_id();
  std::vector<std::int64_t> order;
  pool.parallel_for(4, [&](std::int64_t i) {
    CHECK(std::this_thread::get_id() == caller);
    order.push_back(i);
  });
  CHECK(order == std::vector<std::int64_t>{0, 1, 2, 3});
}

TEST_CASE("thread pool: a loop within a task runs in that task", "[cpu]") {
  ThreadPool pool(3);
  std::atomic<int> total{0}, elsewhere{0};
  pool.parallel_for(10, [&](std::int64_t) {
    const auto outer = std::this_thread::get_id();
    pool.parallel_for(20, [&](std::int64_t) {
      ++total;
      elsewhere += std::this_thread::get_id() != outer;
    });
  });
  CHECK(total == 200);
  CHECK(elsewhere == 0);
}

TEST_CASE("thread pool: an exception reaches the caller", "[cpu]") {
  for (const int threads : {1, 4}) {
    ThreadPool pool(threads);
    expect_throws<DataError>([&] { pool.parallel_for(100, [](std::int64_t i) { if (i == 13) throw DataError("item ", i); }); }, "item 13");
    expect_throws<DataError>([&] { pool.parallel_for(100, [](std::int64_t) { throw DataError("all"); }); }, "all");
    // The pool is as good as new.
    std::atomic<int> total{0};
    pool.parallel_for(50, [&](std::int64_t) { ++total; });
    CHECK(total == 50);
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)   // they need the address space themselves
TEST_CASE("thread pool: a thread that does not start ends those before it", "[cpu]") {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::alarm(60);
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t room = rlim_t{256} << 20;   // for some stacks, not for all
    const rlim_t limit = pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) + room;
    const rlimit space{limit, limit};
    if (::setrlimit(RLIMIT_AS, &space) != 0) ::_exit(2);
    try {
      const ThreadPool pool(10000);
    } catch (const std::system_error&) {
      ::_exit(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}) == 1 ? 0 : 3);
    }
    ::_exit(4);   // all started
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
#endif

TEST_CASE("thread pool: sizes", "[cpu]") {
  CHECK(default_threads() >= 1);
  expect_throws<InvalidArgument>([] { ThreadPool pool(0); }, "thread pool: threads must be >= 1, got 0");
}

#include "runtime/thread_pool.h"

#include <atomic>
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

TEST_CASE("thread pool: sizes", "[cpu]") {
  CHECK(default_threads() >= 1);
  expect_throws<InvalidArgument>([] { ThreadPool pool(0); }, "thread pool: threads must be >= 1, got 0");
}

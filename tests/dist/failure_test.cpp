// A rank that dies, stops or leaves in the middle of a step: every other process ends with a CommError, soon, and none is left.
#include <csignal>
#include <cstdio>
#include <thread>

#include "runtime/error.h"
#include "tests/dist/ranks.h"
#include "tests/dist/steps.h"
#include "tests/support.h"

namespace detr::dist {
namespace {

/// Steps for ever, with `fault` before the given gradient of step 5 on the rank that fails. Returns 10 after a CommError that names this rank and a
/// step, within `limit` of step 5; 11 if it came late; 12 if its text is wrong.
int train(const Meeting& meeting, int failing, std::size_t at, Milliseconds timeout, Milliseconds limit, const std::function<void()>& fault) {
  const auto communicator = test::communicator_of(test::meet(meeting), timeout);
  const Stream stream = Stream::cpu(1);
  const Layout layout = test::Steps::layout();
  const Tensor grads = host_zeros({layout.total}, DType::f32);
  Bucketer bucketer(*communicator, layout, grads, stream, {.extras = 1, .timeout = timeout});
  Clock::time_point start = Clock::now();
  try {
    for (std::int64_t step = 0;; ++step) {
      if (step <= 5) start = Clock::now();
      test::Steps().run(bucketer, grads, step, meeting.rank, [&](std::size_t n) {
        if (meeting.rank == failing && step == 5 && n == at) fault();
      });
    }
  } catch (const CommError& error) {
    const std::string text = error.what();
    const auto took = std::chrono::duration_cast<Milliseconds>(Clock::now() - start);
    if (took > limit) {
      std::fprintf(stderr, "after %lld ms: %s\n", static_cast<long long>(took.count()), error.what());
      return 11;
    }
    return text.find(concat("rank ", meeting.rank, ": ")) != std::string::npos && text.find(" of step ") != std::string::npos ? 10 : 12;
  }
}

void expect_all_end(int size, int failing, std::size_t at, Milliseconds timeout, Milliseconds limit, const std::function<void()>& fault, bool doomed) {
  const auto endings = test::run_processes(size, [&](const Meeting& meeting) { return train(meeting, failing, at, timeout, limit, fault); },
                                           Milliseconds(30000), doomed ? std::vector<int>{failing} : std::vector<int>{});
  for (int rank = 0; rank < size; ++rank) {
    const test::Ending& ending = endings[static_cast<std::size_t>(rank)];
    INFO("rank " << rank << " of " << size << ", failing " << failing << " at gradient " << at << ": exit " << ending.code << ", signal " << ending.signal);
    if (rank != failing) CHECK(ending.code == 10);
    if (rank == failing) CHECK(ending.signal == SIGKILL);
  }
}

TEST_CASE("failure: a rank is killed in the middle of a step", "[cpu]") {
  for (int size = 2; size <= 4; ++size) {
    for (const std::size_t at : {std::size_t{0}, std::size_t{7}, std::size_t{14}}) {
      for (const int failing : {0, size - 1}) {
        expect_all_end(size, failing, at, Milliseconds(20000), Milliseconds(3000), [] { static_cast<void>(std::raise(SIGKILL)); }, false);
      }
    }
  }
}

TEST_CASE("failure: a rank stops or hangs in the middle of a step", "[cpu]") {
  for (int size = 2; size <= 4; ++size) {
    const Milliseconds timeout(1500), limit(3500);
    expect_all_end(size, 0, 7, timeout, limit, [] { static_cast<void>(std::raise(SIGSTOP)); }, true);
    expect_all_end(size, size - 1, 3, timeout, limit, [] { std::this_thread::sleep_for(std::chrono::hours(1)); }, true);
  }
}

}  // namespace
}  // namespace detr::dist

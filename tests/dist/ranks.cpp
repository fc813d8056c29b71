#include "tests/dist/ranks.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <thread>

#include "dist/build.h"
#include "dist/gloo/communicator.h"
#include "runtime/error.h"

namespace detr::dist::test {

std::vector<std::string> run_ranks(int size, const std::function<void(const Meeting&, const Listener&)>& body, Milliseconds timeout) {
  const Listener listener;
  std::vector<std::string> thrown(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body({rank, size, "127.0.0.1", listener.port(), "a token of this test", timeout}, listener);
      } catch (const std::exception& error) {
        thrown[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

std::shared_ptr<Control> meet(const Meeting& meeting, const Listener& listener) {
  return meeting.rank == 0 ? Control::host(meeting, listener) : Control::join(meeting);
}

std::unique_ptr<Communicator> communicator_of(const std::shared_ptr<Control>& control, Milliseconds timeout) {
  if (control->size() == 1) return single_communicator();
  if constexpr (kHasGloo) {
    return gloo_communicator(control, Milliseconds(20000), {"127.0.0.1", timeout});
  } else {
    throw DeviceError("this build has no Gloo");
  }
}

std::vector<Ending> run_processes(int size, const std::function<int(const Meeting&, const Listener&)>& body, Milliseconds limit, const std::vector<int>& doomed) {
  const Listener listener;
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t process = ::fork();
    if (process == 0) {
      static_cast<void>(::prctl(PR_SET_PDEATHSIG, SIGKILL));
      int code = 99;
      try {
        code = body({rank, size, "127.0.0.1", listener.port(), "a token of this test", Milliseconds(20000)}, listener);
      } catch (const std::exception& error) {
        const std::string line = concat("rank ", rank, " threw: ", error.what(), "\n");
        static_cast<void>(!::write(2, line.data(), line.size()));
      }
      ::_exit(code);
    }
    processes.push_back(process);
  }
  std::vector<Ending> endings(processes.size());
  std::vector<bool> ended(processes.size(), false);
  const Clock::time_point deadline = Clock::now() + limit;
  const auto is_doomed = [&](std::size_t r) { return std::ranges::find(doomed, static_cast<int>(r)) != doomed.end(); };
  for (bool killed = false; std::ranges::find(ended, false) != ended.end();) {
    bool wanted_left = false;
    for (std::size_t r = 0; r < processes.size(); ++r) {
      int status = 0;
      if (!ended[r] && ::waitpid(processes[r], &status, WNOHANG) == processes[r]) {
        ended[r] = true;
        endings[r] = {WIFEXITED(status) ? WEXITSTATUS(status) : -1, WIFSIGNALED(status) ? WTERMSIG(status) : 0};
      }
      wanted_left |= !ended[r] && !is_doomed(r);
    }
    if (!killed && (!wanted_left || Clock::now() > deadline)) {
      killed = true;
      for (std::size_t r = 0; r < processes.size(); ++r) {
        if (!ended[r]) static_cast<void>(::kill(processes[r], SIGKILL));
      }
    }
    std::this_thread::sleep_for(Milliseconds(5));
  }
  return endings;
}

}  // namespace detr::dist::test

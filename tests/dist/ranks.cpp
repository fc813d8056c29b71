#include "tests/dist/ranks.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <thread>

#include "dist/build.h"
#include "dist/gloo/communicator.h"
#include "runtime/error.h"

namespace detr::dist::test {

namespace {

const char* const kToken = "a token of this test";

HubOptions hub_options(int size, Milliseconds timeout) { return {size, kToken, timeout, timeout, {}}; }

}  // namespace

ControlOptions options_of(const Meeting& meeting) { return {meeting.rank, meeting.size, meeting.token, meeting.timeout, meeting.timeout, {}}; }

std::vector<std::string> run_ranks(int size, const std::function<void(const Meeting&)>& body, Milliseconds timeout) {
  Listener listener;
  const int port = listener.port();
  Hub hub(hub_options(size, timeout));
  hub.listen(std::move(listener));
  std::vector<std::string> thrown(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body({rank, size, "127.0.0.1", port, kToken, timeout});
      } catch (const std::exception& error) {
        thrown[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

std::shared_ptr<Control> meet(const Meeting& meeting) {
  const std::shared_ptr<Control> control = Control::connect(meeting.host, meeting.port, options_of(meeting));
  return {control.get(), [control](Control* c) {
            if (std::uncaught_exceptions() == 0) c->leave();
          }};
}

std::unique_ptr<Communicator> communicator_of(const std::shared_ptr<Control>& control, Milliseconds timeout) {
  if (control->size() == 1) return single_communicator();
  if constexpr (kHasGloo) {
    return gloo_communicator(control, Milliseconds(20000), {"127.0.0.1", timeout});
  } else {
    throw DeviceError("this build has no Gloo");
  }
}

std::vector<Ending> run_processes(int size, const std::function<int(const Meeting&)>& body, Milliseconds limit, const std::vector<int>& doomed, Milliseconds timeout,
                                  const std::function<void(Hub&, const std::vector<pid_t>&)>& watch) {
  Listener listener;
  const int port = listener.port();
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t process = ::fork();
    if (process == 0) {
      static_cast<void>(::prctl(PR_SET_PDEATHSIG, SIGKILL));
      int code = 99;
      try {
        code = body({rank, size, "127.0.0.1", port, kToken, timeout});
      } catch (const std::exception& error) {
        const std::string line = concat("rank ", rank, " threw: ", error.what(), "\n");
        static_cast<void>(!::write(2, line.data(), line.size()));
      }
      ::_exit(code);
    }
    processes.push_back(process);
  }
  Hub hub(hub_options(size, timeout));
  hub.listen(std::move(listener));
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
        hub.child_ended(static_cast<int>(r), status);
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
    if (watch) watch(hub, processes);
    std::this_thread::sleep_for(Milliseconds(5));
  }
  return endings;
}

}  // namespace detr::dist::test

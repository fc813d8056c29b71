#pragma once
#include <functional>
#include <string>
#include <vector>

#include "dist/communicator.h"
#include "dist/hub.h"

namespace detr::dist {

/// A place in a job of a test: where its hub listens, and who comes.
struct Meeting {
  int rank = 0, size = 1;
  std::string host = "127.0.0.1";
  int port = 0;
  std::string token;
  Milliseconds timeout{20000};   ///< T, and for the start
};

namespace test {

/// Options for the control of a place.
ControlOptions options_of(const Meeting& meeting);
/// Runs a hub and calls body(meeting) for each rank in a thread of its own, which meets the others on a free port of the loopback. Returns the text of
/// what each rank threw, or nothing. Bodies leave their results where the caller looks: a check belongs to the main thread. `timeout`: T and R.
std::vector<std::string> run_ranks(int size, const std::function<void(const Meeting&)>& body, Milliseconds timeout = Milliseconds(20000));

/// The control of a rank. It says goodbye when its last owner goes, unless an exception is under way: then the rank is lost.
std::shared_ptr<Control> meet(const Meeting& meeting);
/// The engine for CPU tensors: Gloo, or single for a group of one.
std::unique_ptr<Communicator> communicator_of(const std::shared_ptr<Control>& control, Milliseconds timeout = Milliseconds(20000));

/// How a process of a job ended.
struct Ending {
  int code = -1;     ///< exit code, or -1
  int signal = 0;    ///< the signal that ended it, or 0
};
/// The same in forked processes, whose hub is here: body returns the exit code. A process that has not ended after `limit` is killed (signal SIGKILL);
/// those of `doomed` are killed once all others have ended. `watch`, if given, is called every few milliseconds with the hub and the processes.
std::vector<Ending> run_processes(int size, const std::function<int(const Meeting&)>& body, Milliseconds limit, const std::vector<int>& doomed = {},
                                  Milliseconds timeout = Milliseconds(20000), const std::function<void(Hub&, const std::vector<pid_t>&)>& watch = {});

}  // namespace test
}  // namespace detr::dist

#pragma once
#include <functional>
#include <string>
#include <vector>

#include "dist/communicator.h"
#include "dist/control.h"

namespace detr::dist::test {

/// Calls body(meeting, listener) for each rank in a thread of its own, on a free port of the loopback; the listener is rank 0's. Returns the text of
/// what each rank threw, or nothing. Bodies leave their results where the caller looks: a check belongs to the main thread.
std::vector<std::string> run_ranks(int size, const std::function<void(const Meeting&, const Listener&)>& body, Milliseconds timeout = Milliseconds(20000));

/// Joins or hosts.
std::shared_ptr<Control> meet(const Meeting& meeting, const Listener& listener);
/// The engine for CPU tensors: Gloo, or single for a group of one.
std::unique_ptr<Communicator> communicator_of(const std::shared_ptr<Control>& control, Milliseconds timeout = Milliseconds(20000));

/// How a process of a job ended.
struct Ending {
  int code = -1;     ///< exit code, or -1
  int signal = 0;    ///< the signal that ended it, or 0
};
/// The same in forked processes: body returns the exit code. A process that has not ended after `limit` is killed (signal SIGKILL); those of
/// `doomed` are killed once all others have ended.
std::vector<Ending> run_processes(int size, const std::function<int(const Meeting&, const Listener&)>& body, Milliseconds limit, const std::vector<int>& doomed = {});

}  // namespace detr::dist::test

#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dist/hub.h"

namespace detr::dist {

struct RemoteHubOptions {
  std::string host;
  int port = 0;
  std::string token;
  int first = 0, size = 1;                ///< the launcher's first rank, and all ranks of the job
  std::vector<long> pids;                 ///< of its ranks' processes
  Milliseconds start_timeout{60000};      ///< for the hub to be there
  Milliseconds timeout{120000};           ///< a host or network that is gone without a word is noticed after so long
};

/// The hub of a job for the launcher of ranks on another host: tells it how their processes end, and learns how the job ends, so that every
/// launcher gives the same reason and exit code. The job fails here as well when the hub cannot be reached, refuses the launcher or is gone: failure()
/// has rank -1 then.
class RemoteHub final : public Watcher {
 public:
  /// Connects on a thread of its own. Throws CommError if the system has no thread or descriptor left.
  explicit RemoteHub(RemoteHubOptions options);
  /// Sends what is left to send, for at most 200 ms (a second where it still connects), and closes.
  ~RemoteHub() override;

  void stop() noexcept override;
  void child_ended(int rank, int wait_status, bool out_of_memory) override;
  void fail(const Failure& failure) override;
  std::optional<Failure> failure() const override;
  /// The hub has said that the job is done.
  bool done() const override;
  int descriptor() const override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace detr::dist

#pragma once
#include <sys/types.h>

#include <csignal>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/cli.h"
#include "apps/relay.h"
#include "apps/world.h"
#include "dist/hub.h"

namespace detr::apps {

/// The ranks of this host, as child processes, and the hub of the job, or, where rank 0 is on another host, a connection to it. See launch().
class Supervisor {
 public:
  /// Nothing is started yet.
  Supervisor(const World& world, const train::CommConfig& comm, bool quiet);
  /// No child is left.
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  Outcome run();

 private:
  struct Child {
    pid_t pid = -1;
    int rank = 0;
    bool running = false;
    int status = 0;             // of waitpid(2), once it has ended
    dist::Socket hub_end;       // until the hub has it
    /// Ended by a signal.
    bool killed() const;
    int code() const;
  };
  using Time = dist::Clock::time_point;

  void catch_signals();
  void start();
  void start_child(int local_rank);
  void start_hub(std::optional<dist::Listener> listener);
  void find_hub();
  void read_signals();
  void say_warnings();
  void stop(int signal);
  std::string second_signal_text() const;
  void reap();
  void note_failure(const Child& child, bool out_of_memory);
  void look(Time now);
  bool over();
  bool all_ends_known() const;
  void kill_all();
  std::vector<std::string> environment_of(int local_rank, bool has_socket) const;
  std::vector<std::pair<int, int>> codes() const;
  Outcome outcome();

  const World world_;
  const train::CommConfig comm_;
  const bool quiet_;
  sigset_t caught_{}, stops_{}, before_{};
  FileHandle signals_;
  std::string token_;
  std::vector<std::string> arguments_;
  std::vector<Child> children_;
  Relay relay_;
  dist::Wake warned_;
  std::mutex warnings_mutex_;
  std::vector<std::string> warnings_;   // of the hub's thread
  std::unique_ptr<dist::Watcher> watcher_;   // after what its thread uses
  dist::Hub* hub_ = nullptr;            // the watcher, where it is the hub itself
  std::optional<dist::Failure> failure_, own_failure_;   // the latter counts where the hub of another host does not answer
  std::optional<Time> own_counts_at_, kill_at_, give_up_at_, ends_at_;
  int stop_signal_ = 0;
  bool stopped_twice_ = false;
  std::int64_t oom_before_ = 0;
};

/// Processes that the kernel has killed for want of memory in the control group of this process, or where that is not known on this machine.
std::int64_t oom_kills();

}  // namespace detr::apps

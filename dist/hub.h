#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dist/control.h"

namespace detr::dist {

struct HubOptions {
  int size = 1;                                     ///< ranks of the job
  std::string token;                                ///< what the ranks greet with
  Milliseconds start_timeout{60000};                ///< R, from the construction on: for all ranks to greet
  Milliseconds timeout{120000};                     ///< T: the stall rule
  std::function<void(const std::string&)> warn;     ///< one line, on the hub's thread: a rank that may stall, a connection that was refused
};

/// What the hub knows of a rank.
struct RankState {
  bool here = false;        ///< has greeted
  bool left = false;        ///< has said goodbye
  bool lost = false;        ///< its connection closed, or its process ended, without a goodbye
  bool failed = false;      ///< has sent its failure
  long pid = 0;
  std::string host;
  std::int64_t step = -1;   ///< of its last beat
  std::string phase;        ///< of its last beat; "start" before the first one
  bool waiting = false;     ///< for other ranks
  std::optional<int> status;   ///< of waitpid(2), once the end of its process has been told
};

/// The hub of a job as a launcher sees it: the Hub itself, or a RemoteHub on another host. All calls are for any thread.
class Watcher {
 public:
  Watcher() = default;
  virtual ~Watcher() = default;
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  /// The job shall stop: tells all ranks.
  virtual void stop() noexcept = 0;
  /// The process of a rank that this launcher has started has ended, with the status of waitpid(2).
  virtual void child_ended(int rank, int wait_status, bool out_of_memory) = 0;
  /// The job fails for a reason that the launcher knows, such as a rank that could not be started.
  virtual void fail(const Failure& failure) = 0;
  virtual std::optional<Failure> failure() const = 0;
  /// Nothing can fail any more.
  virtual bool done() const = 0;
  /// For poll(2): becomes readable when failure() or done() holds, and stays so. Nothing is to be read from it.
  virtual int descriptor() const = 0;
};

/// The meeting point of a job: a server thread that answers the exchanges of the ranks' controls, watches their beats and decides who failed first.
/// In the launcher (made after it has forked: the constructor starts a thread), or in the process of rank 0. All calls are for any thread.
///
/// A job fails when (the first of these is its failure)
///   a rank sends a failure whose code is not kPeerCode, or a rank is lost: its connection closes, or its process ends, without a goodbye;
///   a rank has not greeted within R;
///   a rank stalls: it has given no sign of life for T and a beat, or has not moved for T while another rank waits that long; a line warns at T / 3;
///   an exchange is not complete by its deadline, or waits on Line::main for a rank that has left;
///   a rank sends a failure with kPeerCode and, for 1 s and as long as a rank is suspected of a stall, none of the above has shown up.
/// Then every rank that is still there is told, and failure() has the answer.
class Hub final : public Watcher {
 public:
  /// Throws CommError if the system has no thread or descriptor left.
  explicit Hub(HubOptions options);
  /// Sends what is left to send, for at most 200 ms, and closes. Launchers of other hosts learn whether the job is done.
  ~Hub() override;

  /// The hub's end of the socket pair of a rank of this host, which greets on it. The rank's process is a child whose end child_ended() tells:
  /// when the connection closes first, the hub waits up to 1 s for that, to name signal and code.
  void attach(int rank, Socket socket);
  /// Ranks may come by TCP as well, and the launchers of those of other hosts (RemoteHub), who tell how their processes end. Connections that do not
  /// greet with the token are closed and do no harm.
  void listen(Listener listener);

  void stop() noexcept override;
  /// After its goodbye only a signal is a failure (the exit code is the launcher's to judge); without one the rank is lost: exit code 1 for a crash
  /// or a code of 0, kPeerCode for a signal from outside such as SIGKILL (4 where `out_of_memory` says that the kernel killed it for that),
  /// else its own exit code.
  void child_ended(int rank, int wait_status, bool out_of_memory = false) override;
  void fail(const Failure& failure) override;

  std::optional<Failure> failure() const override;
  /// All ranks have left.
  bool done() const override;
  int descriptor() const override;
  std::vector<RankState> ranks() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// 128 random bits in hexadecimal digits, from the kernel. Throws CommError if that fails.
std::string random_token();

}  // namespace detr::dist

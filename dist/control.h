#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dist/socket.h"

namespace detr::dist {

/// Why a job ends: who failed first, and the exit code of the job.
struct Failure {
  int rank = -1;      ///< -1: no rank, such as a hub that is gone
  int code = 1;       ///< exit code; 6 is that of the communication
  std::string text;   ///< one line, "rank 2: killed by signal 9 (SIGKILL); step 417, backward"
};

/// The exit code of a failure that is, or may be, the consequence of another rank's: a peer lost, late or in disagreement.
constexpr int kPeerCode = 6;

/// Two threads of a rank can wait for the other ranks at once, each on its own line.
enum class Line : std::uint8_t { main = 0, loader = 1 };

/// Whom the training thread waits for.
enum class Waits : std::uint8_t {
  nobody = 0,   ///< it works; one that does not move for the timeout while another rank waits is stalled
  peers = 1,    ///< other ranks, in a collective or an exchange: never stalled by itself
  loader = 2,   ///< its own loader, which in turn may wait for other ranks: counts as `peers` while a call waits on Line::loader
  device = 3,   ///< it gives work to a GPU, whose full queue may keep it until other ranks come: see Note [Who stands still]
};

struct ControlOptions {
  int rank = 0, size = 1;
  std::string token;                                  ///< the job's own: a stranger, or a rank of another job, is turned away
  Milliseconds start_timeout{60000};                  ///< for the connection to the hub and its welcome
  Milliseconds timeout{120000};                       ///< T: beats go out each min(1 s, T / 4); a TCP connection without a sign for T is lost
  /// Called once, on a thread of the control, when the hub ends the job or is lost, also where this rank has failed itself; not after leave().
  /// Waiting calls wake after it has returned. It must not destroy the control.
  std::function<void(const Failure&)> on_abort;
};

/// A rank's connection to the hub of the job (dist/hub.h), for all that is agreed but is no tensor, and for failures. For any thread.
/// Once the job has failed every call that can throw throws CommError with the text of the failure.
class Control {
 public:
  /// Over one end of a socket pair, whose other end the hub has attached.
  static std::shared_ptr<Control> over(Socket socket, ControlOptions options);
  /// By TCP; tried until the start timeout, since the hub may start later.
  /// Both throw CommError where there is no hub or it closes (another token), and ConfigError where it refuses this rank and says why
  /// (there is such a rank already; another number of ranks). They return when the hub has taken this rank, not when all have come.
  static std::shared_ptr<Control> connect(const std::string& host, int port, ControlOptions options);
  /// Closes. Without leave() or fail() before, the hub takes this rank for lost.
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  int rank() const;
  int size() const;
  Milliseconds timeout() const;
  /// The ends of the connection, here and at the hub, as Socket::own_address() has them; empty where it is a socket pair.
  std::string own_address() const;
  std::string hub_address() const;

  /// Every rank's bytes (at most 64 MiB), by rank, on every rank. `phase` (at most 256 bytes) says which exchange this is: the same text on
  /// all ranks, and another one for each exchange of its line if waits may be cancelled. A call with another phase takes back what this rank gave
  /// to an earlier one that is not complete. At the deadline the hub ends the job and names the ranks that did not come.
  /// Throws CommError: the job has failed, or the line is cancelled. On Line::main this rank counts as waiting meanwhile.
  std::vector<std::string> all_gather(std::string_view bytes, const std::string& phase, Clock::time_point deadline, Line line = Line::main);
  /// The same, but rank 0 alone gets the parts; the others get an empty vector once all have come.
  std::vector<std::string> gather_to_root(std::string_view bytes, const std::string& phase, Clock::time_point deadline, Line line = Line::main);
  /// Wakes the call that waits on the line with CommError, and makes later ones throw, until reopen().
  void cancel(Line line) noexcept;
  void reopen(Line line) noexcept;

  /// What the training thread does from here on, for messages and for the stall rule; counts as progress. Cheap: seldom a system call, no allocation.
  /// step: -1 outside of steps. phase: the first 63 bytes count.
  void enter(std::string_view phase, std::int64_t step, Waits waits = Waits::nobody) noexcept;
  /// The step that enter() was told last, and its phase, which ends with a zero. Takes no lock: for a handler of signals, on any thread.
  std::int64_t place(std::array<char, 64>& phase) const noexcept;
  /// Progress inside a phase: a counter. Not to be called by a thread that only waits.
  void tick() noexcept;

  /// The job has been asked to stop: by the hub, or by wish_stop() here.
  bool stop_wished() const noexcept;
  /// This rank has been asked to stop: tells the hub, which tells all ranks. May be called in a signal handler.
  void wish_stop() noexcept;

  /// Tells the hub that this rank fails, with the exit code and one line that names the rank ("rank 2: load: ..."); the hub ends the job. A code
  /// of kPeerCode is taken for the consequence of another failure as long as one may show up. The first call counts; calls here
  /// throw from then on. Returns when the message has gone out, at most 200 ms later.
  void fail(int code, const std::string& text) noexcept;
  /// A clean end of this rank. Returns when the message has gone out, at most 200 ms later; the destructor then waits as long for the hub to read it.
  void leave() noexcept;

  /// Empty, or why the job ends: the hub's word, a lost hub, or what fail() was told. Does not wait.
  std::string lost_peer() const;
  /// The hub's word on why the job ends, waited for until the deadline; nothing if there is none. A rank that has failed with kPeerCode learns here
  /// what the cause was.
  std::optional<Failure> verdict(Clock::time_point deadline) const;

 private:
  struct State;
  explicit Control(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace detr::dist

#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "dist/socket.h"

namespace detr::dist {

/// Where the ranks of a job meet. The token is the job's own, so that a stranger, or a rank of another job, is turned away.
struct Meeting {
  int rank = 0, size = 1;
  std::string host = "127.0.0.1";   ///< where rank 0 listens
  int port = 0;
  std::string token;
  Milliseconds timeout{60000};      ///< for all to come
};

/// The control connections of a job: every rank to a small hub at rank 0. For set-up and for what is rare; one thread calls it.
class Control {
 public:
  /// Rank 0, with the socket that the others were told of. Returns when all have come; throws CommError naming those that have not.
  /// Connections without the right greeting are closed and count for nothing; a rank that is there already is refused.
  static std::shared_ptr<Control> host(const Meeting& meeting, const Listener& listener);
  /// Any other rank. Throws CommError if there is no hub, it refuses this rank, or not all come in time.
  static std::shared_ptr<Control> join(const Meeting& meeting);

  int rank() const { return meeting_.rank; }
  int size() const { return meeting_.size; }

  /// Every rank's bytes (at most 64 MiB), by rank, on every rank. Throws CommError, on each rank that is still there, when one is gone or late
  /// or has failed, and naming it; after that the control is closed.
  std::vector<std::string> all_gather(std::string_view bytes, const std::string& phase, Clock::time_point deadline);
  /// "rank 2 closed its control connection", or nothing: at rank 0 about any rank, elsewhere about rank 0. Does not wait.
  std::string lost_peer() const;
  /// Tells the other ranks why this one goes, closes, and wakes a call that waits here. For any thread.
  void fail(const std::string& reason) noexcept;

 private:
  explicit Control(Meeting meeting) : meeting_(std::move(meeting)), peers_(static_cast<std::size_t>(meeting_.size)) {}
  void welcome(const Listener& listener);
  bool admit(Socket& socket, const std::string& greeting);
  std::vector<std::string> gather(std::string_view bytes, const std::string& phase, Clock::time_point deadline);
  std::string reply_of_hub(std::string_view bytes, const std::string& phase, Clock::time_point deadline);
  [[noreturn]] void give_up(const std::string& phase, const std::string& why);

  Meeting meeting_;
  std::vector<Socket> peers_;   // at rank 0 one a rank, elsewhere the first is the hub's; set before the object is handed out
  std::mutex mutex_;
  std::string failed_;          // the first reason
};

}  // namespace detr::dist

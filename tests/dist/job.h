#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dist/hub.h"
#include "runtime/error.h"

namespace detr::dist::test {

inline Clock::time_point after(int milliseconds) { return Clock::now() + Milliseconds(milliseconds); }

/// The text of the E that `call` throws; of another type, or of nothing, that. For threads, where no check may be made.
template <class E>
std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    return concat("of another type: ", error.what());
  }
  return "nothing was thrown";
}

/// A hub and its ranks in this process, over socket pairs. The hub expects no process to be reaped unless child_ended() is called.
class Job {
 public:
  /// timeout: T. All ranks have come when it returns.
  explicit Job(int size, Milliseconds timeout = Milliseconds(20000));

  Hub& hub() { return *hub_; }
  Control& rank(int rank) { return *controls_[static_cast<std::size_t>(rank)]; }
  /// Calls body(rank, control) in a thread for each rank, and then leaves, or after an exception drops the control. Returns what was thrown, by rank.
  std::map<int, std::string> run(const std::function<void(int, Control&)>& body);
  /// Drops the control of a rank without a word.
  void drop(int rank) { controls_[static_cast<std::size_t>(rank)].reset(); }
  void stop_hub() { hub_.reset(); }
  /// Waits for the hub to have a failure or to be done; false after 20 s.
  bool wait() const;
  /// What on_abort was called with on a rank.
  std::vector<Failure> aborts(int rank) const;
  std::vector<std::string> warnings() const;

 private:
  struct Seen {
    std::mutex mutex;
    std::vector<std::vector<Failure>> aborts;
    std::vector<std::string> warnings;
  };
  std::shared_ptr<Seen> seen_ = std::make_shared<Seen>();
  std::unique_ptr<Hub> hub_;
  std::vector<std::shared_ptr<Control>> controls_;
};

}  // namespace detr::dist::test

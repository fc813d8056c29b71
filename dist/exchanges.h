#pragma once
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dist/messages.h"

namespace detr::dist {

/// The exchanges of a job that are under way, on both lines: who has given what, and who is missing. The hub's, without its sockets.
class Exchanges {
 public:
  using Time = Clock::time_point;
  explicit Exchanges(int size) : size_(static_cast<std::size_t>(size)) {}

  /// What a rank is sent when an exchange is complete.
  struct Answer {
    int rank = 0;
    Cancel request;
    std::shared_ptr<const std::string> body;   ///< of the reply
  };
  /// Takes a rank's part. What it gave before on the line is taken back: it cannot wait for two at once. The answers if this was the last part.
  std::vector<Answer> put(int rank, Request request, Time now);
  /// The rank no longer waits. Its part stays until it gives another one.
  void cancel(int rank, const Cancel& cancel);

  struct Late {
    std::vector<int> ranks;   ///< that have not come
    std::string phase;
  };
  /// An exchange whose deadline has passed.
  std::optional<Late> late(Time now) const;
  /// An exchange on Line::main that waits for the rank. Its `ranks` are those that wait.
  std::optional<Late> waits_for(int rank) const;
  /// Where all ranks wait on Line::main, but not in the same exchange, so that none can go on: the exchange that fewest are in, and one of the others.
  std::optional<std::pair<Late, Late>> crossed() const;   // here `ranks` are those that wait

 private:
  struct Part {
    std::uint32_t number = 0;
    Time deadline;
    std::string bytes;
  };
  struct Exchange {
    std::string phase;
    bool to_root = false;
    std::vector<std::optional<Part>> parts;
    std::vector<int> ranks(bool here) const;
  };
  std::size_t size_;
  std::array<std::vector<Exchange>, 2> lines_;
};

}  // namespace detr::dist

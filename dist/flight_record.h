#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace detr::dist {

/// A collective as one rank has seen it. Times in seconds since the record was made.
struct Flight {
  std::uint64_t number = 0;   ///< 0 for the first of the run; the same collective has the same number on all ranks
  std::uint64_t tag = 0;
  std::string phase;          ///< such as "bucket 2 of step 417"
  std::int64_t bytes = 0;     ///< of this rank's tensor
  double issued_s = 0;
  double ended_s = -1;        ///< when the host knew that it was done; negative: not yet
};

/// The last collectives of a rank, for the search of what went wrong between ranks. For any thread.
class FlightRecord {
 public:
  static constexpr std::size_t kLength = 256;

  /// A collective is issued; returns its number.
  std::uint64_t issue(std::uint64_t tag, std::string phase, std::int64_t bytes);
  /// It is done. Nothing happens if it has left the record.
  void end(std::uint64_t number) noexcept;
  /// The oldest first.
  std::vector<Flight> flights() const;

  /// One JSON object: {"rank", "started_unix_s" (when the record was made), "collectives": [{"number", "tag", "phase", "bytes", "issued_s", "ended_s"
  /// (null: not yet)}, ...]}. The tag is text, since it has 64 bits.
  std::string json(int rank) const;

 private:
  using Clock = std::chrono::steady_clock;
  double now() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  const Clock::time_point start_ = Clock::now();
  const double started_unix_s_ = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  mutable std::mutex mutex_;
  std::deque<Flight> flights_;
  std::uint64_t next_ = 0;
};

/// Where two ranks part: the first number at which tag, phase or bytes differ, or that only one of them has issued (the other is absent then).
/// What has left one of the records is not compared.
struct FlightDifference {
  std::optional<Flight> a, b;
};
std::optional<FlightDifference> first_difference(std::span<const Flight> a, std::span<const Flight> b);

}  // namespace detr::dist

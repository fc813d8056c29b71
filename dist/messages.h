#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dist/control.h"

namespace detr::dist {

/// The contents of the frames between a control and its hub. Numbers are sent as they lie in memory: the hosts of a job are of one kind, and the
/// greeting says so. A parse_ function returns nothing for bytes that are no such message.

constexpr std::size_t kMaxPart = std::size_t{64} << 20U;      ///< bytes of a rank in an exchange
constexpr std::size_t kMaxPhase = 256, kMaxText = 4096;       ///< of a name of an exchange; of a failure's text
constexpr std::size_t kMaxGreeting = 512;
constexpr std::size_t kMaxRequest = kMaxPart + kMaxPhase + 64;   ///< the longest frame of a rank

/// The name of this host, as greetings have it.
std::string own_host();
/// Milliseconds between two beats: a stall is seen up to one later than T, and T + 2 s has to hold the end of the processes as well.
Milliseconds beat_interval(Milliseconds timeout);

/// The first message of a rank, or of the launcher of ranks on another host than the hub's.
struct Greeting {
  int rank = 0, size = 0;   ///< rank: of a launcher the first of its own
  long pid = 0;
  std::string token, host;
  int launched = 0;         ///< by a launcher: so many ranks
};
std::string bytes_of(const Greeting& greeting);
std::optional<Greeting> parse_greeting(const std::string& bytes);

/// A rank's part of an exchange.
struct Request {
  Line line = Line::main;
  bool to_root = false;
  std::uint32_t number = 0;       ///< of this rank and line: the reply carries it
  std::int64_t time_left = 0;     ///< milliseconds
  std::string phase, part;
};
std::string bytes_of(const Request& request);
std::optional<Request> parse_request(const std::string& bytes);

/// The end of a wait: the request that is taken back no longer has a deadline.
struct Cancel {
  Line line = Line::main;
  std::uint32_t number = 0;
};
std::string bytes_of(const Cancel& cancel);
std::optional<Cancel> parse_cancel(const std::string& bytes);

/// A reply is a head of its own for each rank and a body for all: none where the parts go to rank 0 alone.
std::string reply_head(const Cancel& request);
std::string reply_body(const std::vector<std::string>& parts);
struct Reply {
  Cancel request;
  std::vector<std::string> parts;
};
std::optional<Reply> parse_reply(const std::string& bytes, int size);

/// What a rank is doing.
struct Beat {
  std::uint64_t progress = 0;
  std::int64_t step = -1;
  std::int64_t age = 0;        ///< milliseconds since it last moved
  bool waiting = false;        ///< for other ranks
  bool launching = false;      ///< Waits::device
  std::uint64_t position = 0;  ///< moves since the step began: the same of all ranks at the same place of a step
  std::string phase;
};
std::string bytes_of(const Beat& beat);
std::optional<Beat> parse_beat(const std::string& bytes);

std::string bytes_of(const Failure& failure);
std::optional<Failure> parse_failure(const std::string& bytes);

/// The process of a rank has ended: a launcher's message.
struct Ended {
  int rank = 0;
  long pid = 0;
  int status = 0;   ///< of waitpid(2)
  bool out_of_memory = false;
};
std::string bytes_of(const Ended& ended);
std::optional<Ended> parse_ended(const std::string& bytes);

/// "rank 2", "ranks 2, 5".
std::string ranks_text(const std::vector<int>& ranks);
/// "; step 417, backward", or without a step "; start".
std::string place_text(std::int64_t step, const std::string& phase);

}  // namespace detr::dist

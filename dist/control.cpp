#include "dist/control.h"

#include <poll.h>

#include <cstring>
#include <optional>

#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::dist {
namespace {

constexpr std::size_t kMaxGreeting = 512, kMaxPart = std::size_t{64} << 20U, kMaxStrangers = 64;

std::string greeting_of(const Meeting& meeting) { return concat("detrtrain 1\n", meeting.size, "\n", meeting.token, "\n", meeting.rank); }

/// "rank 2", "ranks 2, 5"; of all for which `missing` holds.
template <class Missing>
std::string ranks_text(int size, const Missing& missing) {
  std::string list;
  int count = 0;
  for (int r = 0; r < size; ++r) {
    if (!missing(r)) continue;
    list += concat(count++ == 0 ? "" : ", ", r);
  }
  return concat(count == 1 ? "rank " : "ranks ", list);
}

std::string join_parts(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) {
    const std::uint64_t length = part.size();
    all.append(reinterpret_cast<const char*>(&length), sizeof length);
    all += part;
  }
  return all;
}

/// The inverse, for `count` parts; nothing if the bytes do not hold them exactly.
std::optional<std::vector<std::string>> split_parts(std::string_view all, int count) {
  std::vector<std::string> parts;
  for (int i = 0; i < count; ++i) {
    std::uint64_t length = 0;
    if (all.size() < sizeof length) return std::nullopt;
    std::memcpy(&length, all.data(), sizeof length);
    all.remove_prefix(sizeof length);
    if (all.size() < length) return std::nullopt;
    parts.emplace_back(all.substr(0, length));
    all.remove_prefix(length);
  }
  return all.empty() ? std::make_optional(std::move(parts)) : std::nullopt;
}

}  // namespace

std::shared_ptr<Control> Control::host(const Meeting& meeting, const Listener& listener) {
  DETR_CHECK(meeting.size >= 1 && meeting.rank == 0, "control: rank 0 is the hub, got rank ", meeting.rank, " of ", meeting.size);
  std::shared_ptr<Control> made(new Control(meeting));
  made->welcome(listener);
  return made;
}

std::shared_ptr<Control> Control::join(const Meeting& meeting) {
  DETR_CHECK(meeting.rank >= 1 && meeting.rank < meeting.size, "control: rank ", meeting.rank, " of ", meeting.size, " cannot join");
  const Clock::time_point deadline = Clock::now() + meeting.timeout;
  std::shared_ptr<Control> made(new Control(meeting));
  try {
    made->peers_[0] = connect_to(meeting.host, meeting.port, deadline);
  } catch (const CommError& error) {
    made->give_up("control", error.what());
  }
  if (!made->peers_[0].write(encode({Frame::Kind::hello, greeting_of(meeting)}), deadline)) made->give_up("control", "the hub at rank 0 closed the connection");
  made->all_gather("", "control", deadline);
  return made;
}

bool Control::admit(Socket& socket, const std::string& greeting) {
  for (int r = 1; r < meeting_.size; ++r) {
    Meeting wanted = meeting_;
    wanted.rank = r;
    if (greeting != greeting_of(wanted)) continue;
    Socket& place = peers_[static_cast<std::size_t>(r)];
    if (!place.open()) {
      place = std::move(socket);
      return true;
    }
    static_cast<void>(socket.write(encode({Frame::Kind::fail, concat("there is a rank ", r, " already")}), Clock::now() + Milliseconds(100)));
  }
  return false;
}

void Control::welcome(const Listener& listener) {
  struct Stranger {
    Socket socket;
    FrameReader reader{kMaxGreeting};
  };
  const Clock::time_point deadline = Clock::now() + meeting_.timeout;
  std::vector<Stranger> strangers;
  for (int come = 1; come < meeting_.size;) {
    std::vector<pollfd> wanted{{listener.socket().descriptor(), POLLIN, 0}};
    for (const Stranger& s : strangers) wanted.push_back({s.socket.descriptor(), POLLIN, 0});
    static_cast<void>(::poll(wanted.data(), wanted.size(), poll_time(deadline)));
    if (Clock::now() >= deadline) {
      const std::string late = ranks_text(meeting_.size, [&](int r) { return r > 0 && !peers_[static_cast<std::size_t>(r)].open(); });
      give_up("control", concat(late, " did not come within ", meeting_.timeout.count(), " ms"));
    }
    std::erase_if(strangers, [&](Stranger& s) {
      const FrameReader::State state = s.reader.pump(s.socket);
      if (state == FrameReader::State::more) return false;
      if (state == FrameReader::State::whole && s.reader.frame().kind == Frame::Kind::hello && admit(s.socket, s.reader.frame().bytes)) ++come;
      return true;
    });
    for (Socket next = listener.accept(); next.open(); next = listener.accept()) {
      if (strangers.size() >= kMaxStrangers) strangers.erase(strangers.begin());   // the one that has been silent for longest
      strangers.push_back({std::move(next)});
    }
  }
  all_gather("", "control", deadline);
}

std::vector<std::string> Control::all_gather(std::string_view bytes, const std::string& phase, Clock::time_point deadline) {
  DETR_CHECK(bytes.size() <= kMaxPart, "control, ", phase, ": ", bytes.size(), " bytes, at most ", kMaxPart);
  {
    const std::lock_guard lock(mutex_);
    if (!failed_.empty()) throw CommError(failed_);
  }
  if (rank() == 0) return gather(bytes, phase, deadline);
  std::optional<std::vector<std::string>> parts = split_parts(reply_of_hub(bytes, phase, deadline), size());
  if (!parts) give_up(phase, "the hub's reply is no list of parts");
  return *std::move(parts);
}

std::vector<std::string> Control::gather(std::string_view bytes, const std::string& phase, Clock::time_point deadline) {
  std::vector<FrameReader> readers(peers_.size(), FrameReader(kMaxPart));
  std::vector<bool> here(peers_.size(), false);
  here[0] = true;
  for (int left = size() - 1; left > 0;) {
    std::vector<pollfd> wanted;
    for (std::size_t r = 1; r < peers_.size(); ++r) {
      if (!here[r]) wanted.push_back({peers_[r].descriptor(), POLLIN, 0});
    }
    if (::poll(wanted.data(), wanted.size(), poll_time(deadline)) == 0) {
      give_up(phase, concat(ranks_text(size(), [&](int r) { return !here[static_cast<std::size_t>(r)]; }), " did not come in time"));
    }
    for (std::size_t r = 1; r < peers_.size(); ++r) {
      if (here[r]) continue;
      const FrameReader::State state = readers[r].pump(peers_[r]);
      if (state == FrameReader::State::more) continue;
      if (state != FrameReader::State::whole) give_up(phase, concat("rank ", r, state == FrameReader::State::closed ? " closed its connection" : " sent what is no message"));
      if (readers[r].frame().kind == Frame::Kind::fail) give_up(phase, readers[r].frame().bytes);
      here[r] = true;
      --left;
    }
  }
  std::vector<std::string> parts{std::string(bytes)};
  for (std::size_t r = 1; r < peers_.size(); ++r) parts.push_back(readers[r].frame().bytes);
  const std::string reply = encode({Frame::Kind::data, join_parts(parts)});
  for (std::size_t r = 1; r < peers_.size(); ++r) {
    if (!peers_[r].write(reply, deadline)) give_up(phase, concat("rank ", r, " closed its connection or does not read"));
  }
  return parts;
}

std::string Control::reply_of_hub(std::string_view bytes, const std::string& phase, Clock::time_point deadline) {
  // A hub that has gone may have said why: what it sent is read even where writing fails.
  const bool sent = peers_[0].write(encode({Frame::Kind::data, std::string(bytes)}), deadline);
  FrameReader reader((kMaxPart + sizeof(std::uint64_t)) * peers_.size());
  while (true) {
    const FrameReader::State state = reader.pump(peers_[0]);
    if (state == FrameReader::State::whole) break;
    if (state == FrameReader::State::bad) give_up(phase, "rank 0 sent what is no message");
    if (state == FrameReader::State::closed || !sent) give_up(phase, "rank 0 closed its connection");
    pollfd wanted{peers_[0].descriptor(), POLLIN, 0};
    if (::poll(&wanted, 1, poll_time(deadline)) == 0) give_up(phase, "no reply of rank 0 in time");
  }
  if (reader.frame().kind == Frame::Kind::fail) give_up(phase, reader.frame().bytes);
  return reader.frame().bytes;
}

std::string Control::lost_peer() const {
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    if (!peers_[r].open()) continue;
    pollfd state{peers_[r].descriptor(), POLLRDHUP, 0};
    if (::poll(&state, 1, 0) > 0) return concat("rank ", r, " closed its control connection");
  }
  return {};
}

void Control::give_up(const std::string& phase, const std::string& why) {
  // A reason that came from another rank names that rank and its phase already.
  fail(why.starts_with("rank ") && why.find(": ") != std::string::npos ? why : concat("rank ", rank(), ": ", phase, ": ", why));
  const std::lock_guard lock(mutex_);
  throw CommError(escape_control(failed_));
}

void Control::fail(const std::string& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (!failed_.empty()) return;
  failed_ = reason.empty() ? "closed" : reason;
  const std::string frame = encode({Frame::Kind::fail, failed_.substr(0, kMaxGreeting)});
  for (const Socket& peer : peers_) {
    if (peer.open()) static_cast<void>(peer.write(frame, Clock::now() + Milliseconds(50)));
    peer.shut();
  }
}

}  // namespace detr::dist

#include "dist/messages.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "runtime/error.h"

namespace detr::dist {
namespace {

constexpr std::string_view kHello = "detrtrain 3";
constexpr std::uint32_t kByteOrder = 0x01020304;   // reads otherwise on a host of another kind

class Writer {
 public:
  template <class T>
  Writer& number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& text(std::string_view text) {
    number<std::uint64_t>(text.size());
    bytes_ += text;
    return *this;
  }
  std::string done() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Once something is missing or too long, everything reads as zero and good() is false.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <class T>
  T number() {
    T value{};
    const std::string_view taken = take(sizeof value);
    if (good_) std::memcpy(&value, taken.data(), sizeof value);
    return value;
  }
  std::string text(std::size_t cap) {
    const auto length = number<std::uint64_t>();
    if (length > cap) good_ = false;
    return std::string(take(length));
  }
  Line line() {
    const auto value = number<std::uint8_t>();
    if (value > 1) good_ = false;
    return value == 0 ? Line::main : Line::loader;
  }
  bool flag() {
    const auto value = number<std::uint8_t>();
    if (value > 1) good_ = false;
    return value == 1;
  }
  bool good() const { return good_; }
  /// Nothing is wrong and nothing is left.
  bool done() const { return good_ && bytes_.empty(); }

 private:
  std::string_view take(std::uint64_t count) {
    if (!good_ || count > bytes_.size()) {
      good_ = false;
      return {};
    }
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }
  std::string_view bytes_;
  bool good_ = true;
};

template <class T>
std::optional<T> if_done(const Reader& reader, T value) {
  return reader.done() ? std::make_optional(std::move(value)) : std::nullopt;
}

}  // namespace

std::string own_host() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "an unknown host";
}

Milliseconds beat_interval(Milliseconds timeout) { return std::clamp(timeout / 4, Milliseconds(1), Milliseconds(250)); }

std::string bytes_of(const Greeting& greeting) {
  return Writer()
      .text(kHello)
      .number(kByteOrder)
      .number<std::int32_t>(greeting.rank)
      .number<std::int32_t>(greeting.size)
      .number<std::int64_t>(greeting.pid)
      .text(greeting.token)
      .text(greeting.host)
      .number<std::int32_t>(greeting.launched)
      .done();
}

std::optional<Greeting> parse_greeting(const std::string& bytes) {
  Reader reader(bytes);
  if (reader.text(kHello.size()) != kHello || reader.number<std::uint32_t>() != kByteOrder) return std::nullopt;
  Greeting greeting;
  greeting.rank = reader.number<std::int32_t>();
  greeting.size = reader.number<std::int32_t>();
  greeting.pid = reader.number<std::int64_t>();
  greeting.token = reader.text(kMaxGreeting);
  greeting.host = reader.text(kMaxGreeting);
  greeting.launched = reader.number<std::int32_t>();
  return if_done(reader, std::move(greeting));
}

std::string bytes_of(const Request& request) {
  return Writer()
      .number(static_cast<std::uint8_t>(request.line))
      .number<std::uint8_t>(request.to_root ? 1 : 0)
      .number(request.number)
      .number(request.time_left)
      .text(request.phase)
      .text(request.part)
      .done();
}

std::optional<Request> parse_request(const std::string& bytes) {
  Reader reader(bytes);
  Request request;
  request.line = reader.line();
  request.to_root = reader.flag();
  request.number = reader.number<std::uint32_t>();
  request.time_left = reader.number<std::int64_t>();
  request.phase = reader.text(kMaxPhase);
  request.part = reader.text(kMaxPart);
  return if_done(reader, std::move(request));
}

std::string bytes_of(const Cancel& cancel) { return Writer().number(static_cast<std::uint8_t>(cancel.line)).number(cancel.number).done(); }

std::optional<Cancel> parse_cancel(const std::string& bytes) {
  Reader reader(bytes);
  Cancel cancel;
  cancel.line = reader.line();
  cancel.number = reader.number<std::uint32_t>();
  return if_done(reader, cancel);
}

std::string reply_head(const Cancel& request) { return bytes_of(request); }

std::string reply_body(const std::vector<std::string>& parts) {
  Writer writer;
  for (const std::string& part : parts) writer.text(part);
  return writer.done();
}

std::optional<Reply> parse_reply(const std::string& bytes, int size) {
  Reader reader(bytes);
  Reply reply;
  reply.request.line = reader.line();
  reply.request.number = reader.number<std::uint32_t>();
  if (reader.done()) return reply;
  for (int r = 0; r < size && reader.good(); ++r) reply.parts.push_back(reader.text(kMaxPart));
  return if_done(reader, std::move(reply));
}

std::string bytes_of(const Beat& beat) {
  return Writer().number(beat.progress).number(beat.step).number(beat.age).number<std::uint8_t>(beat.waiting ? 1 : 0).number<std::uint8_t>(beat.launching ? 1 : 0).number(beat.position).text(beat.phase).done();
}

std::optional<Beat> parse_beat(const std::string& bytes) {
  Reader reader(bytes);
  Beat beat;
  beat.progress = reader.number<std::uint64_t>();
  beat.step = reader.number<std::int64_t>();
  beat.age = reader.number<std::int64_t>();
  beat.waiting = reader.flag();
  beat.launching = reader.flag();
  beat.position = reader.number<std::uint64_t>();
  beat.phase = reader.text(kMaxPhase);
  return if_done(reader, std::move(beat));
}

std::string bytes_of(const Failure& failure) {
  return Writer().number<std::int32_t>(failure.rank).number<std::int32_t>(failure.code).text(std::string_view(failure.text).substr(0, kMaxText)).done();
}

std::optional<Failure> parse_failure(const std::string& bytes) {
  Reader reader(bytes);
  Failure failure;
  failure.rank = reader.number<std::int32_t>();
  failure.code = reader.number<std::int32_t>();
  failure.text = reader.text(kMaxText);
  return if_done(reader, std::move(failure));
}

std::string bytes_of(const Ended& ended) {
  return Writer().number<std::int32_t>(ended.rank).number<std::int64_t>(ended.pid).number<std::int32_t>(ended.status).number<std::uint8_t>(ended.out_of_memory ? 1 : 0).done();
}

std::optional<Ended> parse_ended(const std::string& bytes) {
  Reader reader(bytes);
  Ended ended;
  ended.rank = reader.number<std::int32_t>();
  ended.pid = reader.number<std::int64_t>();
  ended.status = reader.number<std::int32_t>();
  ended.out_of_memory = reader.flag();
  return if_done(reader, ended);
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string list = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < ranks.size(); ++i) list += concat(i == 0 ? " " : ", ", ranks[i]);
  return list;
}

std::string place_text(std::int64_t step, const std::string& phase) { return step < 0 ? concat("; ", phase) : concat("; step ", step, ", ", phase); }

}  // namespace detr::dist

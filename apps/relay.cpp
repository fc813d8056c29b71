#include "apps/relay.h"

#include <unistd.h>

#include <array>
#include <cerrno>

#include "runtime/error.h"

namespace detr::apps {
namespace {

constexpr std::size_t kMostQueued = std::size_t{1} << 20;   // then the pipes are left alone until stderr has taken some
constexpr std::size_t kLongestLine = 8192;
constexpr std::size_t kPiece = 4096;                        // a pipe that is writable takes so much without waiting

}  // namespace

Relay::Relay() : terminal_(::isatty(STDERR_FILENO) != 0) {}

void Relay::add(int rank, FileHandle pipe) { sources_.push_back({rank, std::move(pipe), {}}); }

void Relay::say(const std::string& text) {
  if (terminal_) out_ += "\r\033[K";   // over the bar of rank 0
  out_ += text + "\n";
  while (write_some()) {
  }
}

void Relay::line(const Source& source, std::string_view text) {
  if (terminal_) out_ += "\r\033[K";
  out_ += concat("[rank ", source.rank, "] ", text, "\n");
}

void Relay::read(Source& source) {
  std::array<char, kPiece> bytes;
  while (source.pipe.get() >= 0 && out_.size() < kMostQueued) {
    const ssize_t got = ::read(source.pipe.get(), bytes.data(), bytes.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      if (!source.rest.empty()) line(source, source.rest);
      source.rest.clear();
      source.pipe = FileHandle();
      return;
    }
    source.rest.append(bytes.data(), static_cast<std::size_t>(got));
    std::size_t begin = 0;
    for (std::size_t end = 0; (end = source.rest.find('\n', begin)) != std::string::npos; begin = end + 1) {
      line(source, std::string_view(source.rest).substr(begin, end - begin));
    }
    source.rest.erase(0, begin);
    if (source.rest.size() <= kLongestLine) continue;
    line(source, source.rest);
    source.rest.clear();
  }
}

bool Relay::write_some() {
  pollfd ready{STDERR_FILENO, POLLOUT, 0};
  if (out_.empty() || ::poll(&ready, 1, 0) <= 0) return false;
  const ssize_t written = ::write(STDERR_FILENO, out_.data(), std::min(out_.size(), kPiece));
  if (written < 0 && (errno == EINTR || errno == EAGAIN)) return false;
  if (written < 0) out_.clear();   // nobody reads it
  else out_.erase(0, static_cast<std::size_t>(written));
  return !out_.empty();
}

void Relay::add_polls(std::vector<pollfd>& wanted) const {
  if (!out_.empty()) wanted.push_back({STDERR_FILENO, POLLOUT, 0});
  if (out_.size() >= kMostQueued) return;
  for (const Source& source : sources_) {
    if (source.pipe.get() >= 0) wanted.push_back({source.pipe.get(), POLLIN, 0});
  }
}

void Relay::pump() {
  for (Source& source : sources_) read(source);
  while (write_some()) {
  }
}

void Relay::finish(std::chrono::steady_clock::time_point deadline) {
  pump();
  while (!out_.empty() && std::chrono::steady_clock::now() < deadline) {
    pollfd ready{STDERR_FILENO, POLLOUT, 0};
    static_cast<void>(::poll(&ready, 1, 10));
    pump();
  }
  for (Source& source : sources_) {
    if (!source.rest.empty()) say(concat("[rank ", source.rank, "] ", source.rest));
    source.rest.clear();
  }
}

}  // namespace detr::apps

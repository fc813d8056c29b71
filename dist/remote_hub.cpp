#include "dist/remote_hub.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <system_error>
#include <thread>

#include "dist/messages.h"
#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::dist {
namespace {

constexpr Milliseconds kTry{1000};      // for an attempt to connect, which nothing interrupts
constexpr Milliseconds kPause{50};      // between attempts
constexpr Milliseconds kLastWord{200};  // for what is left to send at the end

}  // namespace

struct RemoteHub::State {
  explicit State(RemoteHubOptions o) : options(std::move(o)) {}

  void serve();
  bool connect();
  bool take(const Frame& frame);
  void end(const Failure& failure);
  void push(Frame::Kind kind, const std::string& bytes);

  const RemoteHubOptions options;
  Socket socket;   // of the thread
  FrameReader reader{kMaxText + 64};
  Wake wake, changed;
  mutable std::mutex mutex;
  Outbox out;
  std::optional<Failure> failure;
  bool done = false, closing = false;
  std::thread thread;
};

void RemoteHub::State::push(Frame::Kind kind, const std::string& bytes) {
  {
    const std::lock_guard lock(mutex);
    out.push(encode({kind, bytes}));
  }
  wake.signal();
}

void RemoteHub::State::end(const Failure& reason) {
  const std::lock_guard lock(mutex);
  if (!failure && !done) failure = reason;
  changed.signal();
}

/// False where there is nothing more to do.
bool RemoteHub::State::connect() {
  const Clock::time_point deadline = Clock::now() + options.start_timeout;
  while (true) {
    {
      const std::lock_guard lock(mutex);
      if (closing) return false;
    }
    try {
      socket = connect_to(options.host, options.port, std::min(deadline, Clock::now() + kTry));
      socket.expect_signs(options.timeout);
      return true;
    } catch (const CommError& error) {
      if (Clock::now() >= deadline) {
        end({-1, kPeerCode, error.what()});
        return false;
      }
    }
    pollfd woken{wake.descriptor(), POLLIN, 0};
    static_cast<void>(::poll(&woken, 1, static_cast<int>(kPause.count())));
    wake.clear();
  }
}

/// False if the frame is none that a hub sends.
bool RemoteHub::State::take(const Frame& frame) {
  switch (frame.kind) {
    case Frame::Kind::welcome:
    case Frame::Kind::stop: return true;   // the ranks hear it themselves
    case Frame::Kind::refuse: end({-1, 2, "refused: " + escape_control(frame.bytes)}); return true;
    case Frame::Kind::fail: {
      const std::optional<Failure> told = parse_failure(frame.bytes);
      if (told) end(*told);
      return told.has_value();
    }
    case Frame::Kind::bye: {
      const std::lock_guard lock(mutex);
      done = !failure;
      changed.signal();
      return true;
    }
    default: return false;
  }
}

void RemoteHub::State::serve() {
  if (!connect()) return;
  Clock::time_point last = Clock::time_point::max();
  while (true) {
    std::array<pollfd, 2> wanted{{{socket.descriptor(), POLLIN, 0}, {wake.descriptor(), POLLIN, 0}}};
    {
      const std::lock_guard lock(mutex);
      const bool gone = !out.flush(socket);
      if (closing && last == Clock::time_point::max()) last = Clock::now() + kLastWord;
      if (closing && (gone || out.empty() || Clock::now() >= last)) return;
      if (!out.empty()) wanted[0].events |= POLLOUT;
    }
    static_cast<void>(::poll(wanted.data(), wanted.size(), last == Clock::time_point::max() ? -1 : poll_time(last)));
    wake.clear();
    FrameReader::State state = reader.pump(socket);
    for (; state == FrameReader::State::whole; state = reader.pump(socket)) {
      if (!take(reader.take())) break;
    }
    if (state != FrameReader::State::more) return end({-1, kPeerCode, concat("the hub of the job, ", options.host, ":", options.port, ", is gone")});
  }
}

RemoteHub::RemoteHub(RemoteHubOptions options) : state_(std::make_unique<State>(std::move(options))) {
  const RemoteHubOptions& o = state_->options;
  state_->push(Frame::Kind::hello, bytes_of(Greeting{o.first, o.size, ::getpid(), o.token, own_host(), static_cast<int>(o.pids.size())}));
  try {
    state_->thread = std::thread([state = state_.get()] { state->serve(); });
  } catch (const std::system_error& error) {
    throw CommError("control of the launcher: no thread: ", error.what());
  }
}

RemoteHub::~RemoteHub() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
  }
  state_->wake.signal();
  state_->thread.join();
}

void RemoteHub::stop() noexcept {
  try {
    state_->push(Frame::Kind::stop, {});
  } catch (const std::exception&) {   // no memory for it; a second signal ends the job
  }
}

void RemoteHub::child_ended(int rank, int wait_status, bool out_of_memory) {
  const int local = rank - state_->options.first;
  DETR_CHECK(local >= 0 && local < std::ssize(state_->options.pids), "remote hub: rank ", rank, " is not of this launcher");
  state_->push(Frame::Kind::ended, bytes_of(Ended{rank, state_->options.pids[static_cast<std::size_t>(local)], wait_status, out_of_memory}));
}

void RemoteHub::fail(const Failure& failure) { state_->push(Frame::Kind::fail, bytes_of(failure)); }

std::optional<Failure> RemoteHub::failure() const {
  const std::lock_guard lock(state_->mutex);
  return state_->failure;
}

bool RemoteHub::done() const {
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

int RemoteHub::descriptor() const { return state_->changed.descriptor(); }

}  // namespace detr::dist

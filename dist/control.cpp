#include "dist/control.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "dist/messages.h"
#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::dist {
namespace {

constexpr Milliseconds kLastWord{200};     // for the last message of a rank to go out
constexpr Milliseconds kTellEvery{50};     // at least, between two beats for new phases
constexpr Milliseconds kHubMargin{2000};   // after a deadline, for the hub to say who is missing

}  // namespace

/// The thread reads, beats and sends what did not fit at once; callers send what they can themselves.
struct Control::State {
  State(Socket s, ControlOptions o)
      : options(std::move(o)), socket(std::move(s)), reader((kMaxPart + sizeof(std::uint64_t)) * static_cast<std::size_t>(options.size) + 64) {}

  void run() noexcept;
  void serve();
  bool take(const Frame& frame);
  void end(Failure failure);
  bool beat();
  void push(Frame::Kind kind, const std::string& bytes);
  bool last_word(std::unique_lock<std::mutex>& lock, Frame::Kind kind, const std::string& bytes);
  Reply exchange(bool to_root, std::string_view bytes, const std::string& phase, Clock::time_point deadline, Line line);
  std::int64_t read_place(std::array<char, 64>& phase) const noexcept;
  std::string place() const;
  void move() noexcept;

  const ControlOptions options;
  Socket socket;
  FrameReader reader;
  Wake wake;
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  Outbox out;
  struct Call {
    bool waiting = false, cancelled = false;
    std::uint32_t number = 0;   // of the last request
    std::string phase;
    std::optional<Reply> reply;
  };
  std::array<Call, 2> calls;
  bool welcome = false, over = false, closing = false, left = false;   // over: nothing more is read or sent
  std::string refused, failed;                                         // failed: what calls throw
  std::optional<Failure> verdict;
  std::thread thread;

  std::atomic<bool> stop{false}, wish{false}, entered{false};   // `entered`: a phase that the hub has not been told
  std::atomic<Clock::time_point> told{Clock::time_point()};       // when it was told last
  std::atomic<std::uint64_t> progress{0};
  std::atomic<Clock::duration::rep> moved{Clock::now().time_since_epoch().count()};
  mutable std::mutex place_mutex;   // of what is below; held for a copy
  Waits waits = Waits::nobody;
  std::uint64_t step_began = 0;   // the progress when the step was entered
  // enter() writes the one that is not current, so that a handler of signals, which must not lock, reads a whole one.
  struct Spot {
    std::atomic<std::int64_t> step{-1};
    std::array<std::atomic<char>, 64> phase{'s', 't', 'a', 'r', 't'};   // ends with a zero
  };
  std::array<Spot, 2> spots;
  std::atomic<std::size_t> current{0};
};

void Control::State::move() noexcept {
  moved.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  progress.fetch_add(1, std::memory_order_relaxed);
}

std::int64_t Control::State::read_place(std::array<char, 64>& phase) const noexcept {
  const Spot& spot = spots[current.load(std::memory_order_acquire)];
  for (std::size_t i = 0; i < phase.size(); ++i) phase[i] = spot.phase[i].load(std::memory_order_relaxed);
  phase.back() = '\0';
  return spot.step.load(std::memory_order_relaxed);
}

std::string Control::State::place() const {
  std::array<char, 64> phase{};
  std::int64_t step = -1;
  {
    const std::lock_guard lock(place_mutex);
    step = read_place(phase);
  }
  return place_text(step, phase.data());
}

/// Sends at once what the socket takes; the thread does the rest. With the lock held.
void Control::State::push(Frame::Kind kind, const std::string& bytes) {
  if (over) return;
  out.push(encode({kind, bytes}));
  static_cast<void>(out.flush(socket));   // an error shows up where the thread reads
  if (!out.empty()) wake.signal();
}

/// Sends and waits a little for it to be gone; false if it is not.
bool Control::State::last_word(std::unique_lock<std::mutex>& lock, Frame::Kind kind, const std::string& bytes) {
  push(kind, bytes);
  return changed.wait_for(lock, kLastWord, [&] { return out.empty() || over; });
}

/// The job has ended: the hub says so, or is gone.
void Control::State::end(Failure failure) {
  bool tell = false;
  {
    const std::lock_guard lock(mutex);
    over = true;
    tell = welcome && !left && !closing && options.on_abort;
    changed.notify_all();
  }
  if (tell) options.on_abort(failure);
  const std::lock_guard lock(mutex);
  if (failed.empty()) failed = failure.text;
  verdict = std::move(failure);
  changed.notify_all();
}

/// False if the frame is none that a hub sends.
bool Control::State::take(const Frame& frame) {
  if (frame.kind == Frame::Kind::fail) {
    std::optional<Failure> failure = parse_failure(frame.bytes);
    if (failure) end(*std::move(failure));
    return failure.has_value();
  }
  const std::lock_guard lock(mutex);
  if (frame.kind == Frame::Kind::welcome) {
    welcome = true;
  } else if (frame.kind == Frame::Kind::refuse) {
    refused = escape_control(frame.bytes);
    over = true;
  } else if (frame.kind == Frame::Kind::stop) {
    stop.store(true);
  } else if (frame.kind == Frame::Kind::reply) {
    std::optional<Reply> reply = parse_reply(frame.bytes, options.size);
    if (!reply) return false;
    Call& call = calls[static_cast<std::size_t>(reply->request.line)];
    // A reply to a call that was cancelled comes too late.
    if (call.waiting && call.number == reply->request.number) call.reply = std::move(reply);
  } else {
    return false;
  }
  changed.notify_all();
  return true;
}

/// With the lock held. Skipped while the hub does not read what it was sent before.
bool Control::State::beat() {
  if (!welcome || left || !out.empty()) return false;
  Beat beat;
  beat.progress = progress.load(std::memory_order_relaxed);
  const Clock::time_point last{Clock::duration(moved.load(std::memory_order_relaxed))};
  beat.age = std::chrono::duration_cast<Milliseconds>(Clock::now() - last).count();
  std::array<char, 64> phase{};
  {
    const std::lock_guard place_lock(place_mutex);
    beat.step = read_place(phase);
    beat.waiting = waits == Waits::peers || (waits == Waits::loader && calls[1].waiting);
    beat.launching = waits == Waits::device;
    beat.position = progress.load(std::memory_order_relaxed) - step_began;
  }
  beat.phase = phase.data();
  if (calls[0].waiting) {
    beat.waiting = true;
    beat.launching = false;
    beat.phase = calls[0].phase;
  }
  push(Frame::Kind::beat, bytes_of(beat));
  return true;
}

/// The thread. What it cannot do, for want of memory, is a failure of this rank.
void Control::State::run() noexcept {
  try {
    serve();
  } catch (const std::exception& error) {
    end({options.rank, dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? 4 : 1, concat("rank ", options.rank, ": control: ", error.what(), place())});
  }
}

void Control::State::serve() {
  const Milliseconds interval = beat_interval(options.timeout);
  Clock::time_point next_beat = Clock::now();
  bool wish_sent = false;
  while (true) {
    std::array<pollfd, 2> wanted{{{socket.descriptor(), POLLIN, 0}, {wake.descriptor(), POLLIN, 0}}};
    {
      const std::lock_guard lock(mutex);
      if (closing || over) return;
      if (wish.load() && !wish_sent && welcome) {
        wish_sent = true;
        push(Frame::Kind::stop, {});
      }
      const bool news = Clock::now() >= told.load() + kTellEvery && entered.exchange(false);
      if (news || Clock::now() >= next_beat) {
        static_cast<void>(beat());
        told = Clock::now();
        next_beat = Clock::now() + (welcome ? interval : Milliseconds(5));
      }
      if (!out.empty()) wanted[0].events |= POLLOUT;
    }
    const Clock::time_point look = told.load() + kTellEvery;
    static_cast<void>(::poll(wanted.data(), wanted.size(), poll_time(look > Clock::now() ? std::min(look, next_beat) : next_beat)));
    wake.clear();
    for (bool more = true; more;) {
      switch (reader.pump(socket)) {
        case FrameReader::State::more: more = false; break;
        case FrameReader::State::whole:
          if (take(reader.take())) break;
          [[fallthrough]];
        case FrameReader::State::bad:
        case FrameReader::State::closed:
          return end({-1, kPeerCode, concat("rank ", options.rank, ": the hub of the job is gone", place())});
      }
      const std::lock_guard lock(mutex);
      if (over) return;
    }
    const std::lock_guard lock(mutex);
    if (!out.empty() && out.flush(socket) && out.empty()) changed.notify_all();
  }
}

Control::Control(std::unique_ptr<State> state) : state_(std::move(state)) {}

std::shared_ptr<Control> Control::over(Socket socket, ControlOptions options) {
  DETR_CHECK(options.size >= 1 && options.rank >= 0 && options.rank < options.size, "control: rank ", options.rank, " of ", options.size);
  DETR_CHECK(options.timeout.count() > 0, "control: the timeout must be positive");
  socket.expect_signs(options.timeout);
  const Clock::time_point deadline = Clock::now() + options.start_timeout;
  const int rank = options.rank;
  std::shared_ptr<Control> made(new Control(std::make_unique<State>(std::move(socket), std::move(options))));
  State& state = *made->state_;
  try {
    state.thread = std::thread([&state] { state.run(); });
  } catch (const std::system_error& error) {
    throw CommError("rank ", rank, ": control: no thread: ", error.what());
  }
  std::unique_lock lock(state.mutex);
  state.push(Frame::Kind::hello, bytes_of(Greeting{rank, state.options.size, ::getpid(), state.options.token, own_host()}));
  state.changed.wait_until(lock, deadline, [&] { return state.welcome || !state.refused.empty() || state.verdict; });
  if (!state.refused.empty()) throw ConfigError("rank ", rank, ": refused: ", state.refused);
  if (state.verdict && state.verdict->rank < 0 && !state.welcome) throw CommError("rank ", rank, ": control: the hub closed the connection");
  if (state.verdict) throw CommError(state.verdict->text);
  if (!state.welcome) throw CommError("rank ", rank, ": control: no welcome of the hub in time");
  return made;
}

std::shared_ptr<Control> Control::connect(const std::string& host, int port, ControlOptions options) {
  const Clock::time_point start = Clock::now();
  Socket socket;
  try {
    socket = connect_to(host, port, start + options.start_timeout);
  } catch (const CommError& error) {
    throw CommError("rank ", options.rank, ": control: ", error.what());
  }
  options.start_timeout -= std::min(options.start_timeout, std::chrono::floor<Milliseconds>(Clock::now() - start));
  return over(std::move(socket), std::move(options));
}

Control::~Control() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
  }
  state_->wake.signal();
  if (state_->thread.joinable()) state_->thread.join();
  if (state_->left) state_->socket.finish(kLastWord);
}

int Control::rank() const { return state_->options.rank; }
int Control::size() const { return state_->options.size; }
Milliseconds Control::timeout() const { return state_->options.timeout; }
std::string Control::own_address() const { return state_->socket.own_address(); }
std::string Control::hub_address() const { return state_->socket.peer_address(); }

Reply Control::State::exchange(bool to_root, std::string_view bytes, const std::string& name, Clock::time_point deadline, Line line) {
  DETR_CHECK(bytes.size() <= kMaxPart, "control, ", name, ": ", bytes.size(), " bytes, at most ", kMaxPart);
  DETR_CHECK(name.size() <= kMaxPhase, "control: the name of an exchange has ", name.size(), " bytes, at most ", kMaxPhase);
  Call& call = calls[static_cast<std::size_t>(line)];
  std::unique_lock lock(mutex);
  DETR_CHECK(!left, "control, ", name, ": this rank has left");
  DETR_CHECK(!call.waiting, "control, ", name, ": another thread waits on this line");
  if (!failed.empty()) throw CommError(escape_control(failed));
  if (call.cancelled) throw CommError("rank ", options.rank, ": ", name, ": cancelled");
  if (line == Line::main) move();
  call.reply.reset();
  call.phase = name;
  call.waiting = true;
  const Milliseconds time_left(poll_time(deadline));
  push(Frame::Kind::exchange, bytes_of(Request{line, to_root, ++call.number, time_left.count(), name, std::string(bytes)}));
  // The hub keeps the deadline, since it knows who is missing. That it says nothing at all is the last resort.
  const bool in_time = changed.wait_for(lock, time_left + kHubMargin, [&] { return call.reply || call.cancelled || !failed.empty(); });
  call.waiting = false;
  if (line == Line::main) move();
  if (call.reply) return *std::move(call.reply);
  if (!failed.empty()) throw CommError(escape_control(failed));
  push(Frame::Kind::cancel, bytes_of(Cancel{line, call.number}));
  if (in_time) throw CommError("rank ", options.rank, ": ", name, ": cancelled");
  failed = concat("rank ", options.rank, ": ", name, ": no word of the hub in time");
  push(Frame::Kind::fail, bytes_of(Failure{options.rank, kPeerCode, failed}));
  throw CommError(failed);
}

std::vector<std::string> Control::all_gather(std::string_view bytes, const std::string& phase, Clock::time_point deadline, Line line) {
  Reply reply = state_->exchange(false, bytes, phase, deadline, line);
  if (reply.parts.empty()) throw CommError("rank ", rank(), ": ", phase, ": the hub's reply has no parts");
  return std::move(reply.parts);
}

std::vector<std::string> Control::gather_to_root(std::string_view bytes, const std::string& phase, Clock::time_point deadline, Line line) {
  return state_->exchange(true, bytes, phase, deadline, line).parts;
}

void Control::cancel(Line line) noexcept {
  const std::lock_guard lock(state_->mutex);
  state_->calls[static_cast<std::size_t>(line)].cancelled = true;
  state_->changed.notify_all();
}

void Control::reopen(Line line) noexcept {
  const std::lock_guard lock(state_->mutex);
  state_->calls[static_cast<std::size_t>(line)].cancelled = false;
}

void Control::enter(std::string_view phase, std::int64_t step, Waits waits) noexcept {
  {
    const std::lock_guard lock(state_->place_mutex);
    state_->waits = waits;
    if (step != state_->spots[state_->current.load(std::memory_order_relaxed)].step.load(std::memory_order_relaxed)) state_->step_began = state_->progress.load(std::memory_order_relaxed);
    const std::size_t next = 1 - state_->current.load(std::memory_order_relaxed);
    State::Spot& spot = state_->spots[next];
    spot.step.store(step, std::memory_order_relaxed);
    const std::size_t length = std::min(phase.size(), spot.phase.size() - 1);
    for (std::size_t i = 0; i < length; ++i) spot.phase[i].store(phase[i], std::memory_order_relaxed);
    spot.phase[length].store('\0', std::memory_order_relaxed);
    state_->current.store(next, std::memory_order_release);
  }
  state_->move();
  // The hub should know what a rank did when it was lost, but not each phase of a quick step.
  if (!state_->entered.exchange(true) && Clock::now() >= state_->told.load() + kTellEvery) state_->wake.signal();   // sooner, serve() looks by itself
}

std::int64_t Control::place(std::array<char, 64>& phase) const noexcept { return state_->read_place(phase); }

void Control::tick() noexcept { state_->move(); }

bool Control::stop_wished() const noexcept { return state_->stop.load(std::memory_order_relaxed); }

void Control::wish_stop() noexcept {
  state_->stop.store(true);
  state_->wish.store(true);
  state_->wake.signal();
}

void Control::fail(int code, const std::string& text) noexcept {
  try {
    std::unique_lock lock(state_->mutex);
    if (!state_->failed.empty() || state_->left) return;
    state_->failed = text.empty() ? concat("rank ", rank(), ": failed") : text;
    state_->changed.notify_all();
    static_cast<void>(state_->beat());   // the hub names the place of the last beat
    static_cast<void>(state_->last_word(lock, Frame::Kind::fail, bytes_of(Failure{rank(), code, state_->failed})));
  } catch (const std::exception&) {   // no memory left for the message: the hub sees the connection close
  }
}

void Control::leave() noexcept {
  try {
    std::unique_lock lock(state_->mutex);
    if (state_->left || !state_->failed.empty()) return;
    state_->left = true;
    static_cast<void>(state_->last_word(lock, Frame::Kind::bye, {}));
  } catch (const std::exception&) {   // as above
  }
}

std::string Control::lost_peer() const {
  const std::lock_guard lock(state_->mutex);
  return escape_control(state_->verdict ? state_->verdict->text : state_->failed);
}

std::optional<Failure> Control::verdict(Clock::time_point deadline) const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_until(lock, deadline, [&] { return state_->verdict.has_value(); });
  return state_->verdict;
}

}  // namespace detr::dist

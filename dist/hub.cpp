#include "dist/hub.h"

#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <limits>
#include <list>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "dist/exchanges.h"
#include "dist/judge.h"
#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::dist {
namespace {

constexpr Milliseconds kLook{50};        // how often the clock is looked at
constexpr Milliseconds kFlush{200};      // for what is left to send at the end
constexpr std::size_t kMaxStrangers = 64;
constexpr int kFramesAtOnce = 16;        // of one connection, before the others have their turn
constexpr Milliseconds kLastWords{1000}; // for what a process on another host said before its end, which comes another way, to be here

struct Connection {
  Socket socket;
  int attached = -1;   // the rank that it was attached for
  int rank = -1;       // once it has greeted
  int first = 0, launched = 0;   // of a launcher's: its ranks
  std::string host;              // of a launcher's
  bool closing = false;   // once what is left has been sent
  bool stranger() const { return rank < 0 && attached < 0 && launched == 0; }
  FrameReader reader{kMaxGreeting};
  Outbox out;
};

}  // namespace

/// The thread holds the mutex except while it polls; the other calls change the same state and wake it.
struct Hub::State {
  explicit State(HubOptions o)
      : options(std::move(o)), now(Clock::now()), last(now), judge(options.size, options.start_timeout, options.timeout, now), exchanges(options.size) {}

  void run() noexcept;
  void serve();
  void read(Connection& connection, int frames = kFramesAtOnce);
  void take(Connection& connection, const Frame& frame);
  void greet(Connection& connection, const Frame& frame);
  void greet_launcher(Connection& connection, const Greeting& greeting);
  void ended(const Connection& connection, const Ended& ended);
  void settle_ends();
  void tell_failure();
  void exchange(int rank, Request request);
  void bad(Connection& connection, const std::string& how);
  void drop(Connection& connection, const std::string& how);
  void send(Connection& connection);
  void accept();
  void tell_stop();
  void decide();
  Connection* connection_of(int rank);

  const HubOptions options;
  Wake wake, changed;
  mutable std::mutex mutex;
  bool stopping = false;
  bool stop_wished = false, told = false;
  Clock::time_point now, last;   // the hub's clock, which stands still while the hub itself is held up; the real one at the last look
  Judge judge;
  Exchanges exchanges;
  std::list<Connection> connections;
  std::optional<Listener> listener;
  Clock::time_point listener_rest;   // the listener is left alone until then
  struct End {
    Ended ended;
    Clock::time_point deadline;   // for the rank's own connection to be read to its end
  };
  std::vector<End> ends;   // that launchers have told
  std::vector<std::string> warnings;
  std::thread thread;
};

Connection* Hub::State::connection_of(int rank) {
  const auto found = std::ranges::find_if(connections, [&](const Connection& c) { return c.rank == rank && c.socket.open(); });
  return found == connections.end() ? nullptr : &*found;
}

/// The connection is over; without a goodbye its rank is lost.
void Hub::State::drop(Connection& connection, const std::string& how) {
  const int rank = connection.rank >= 0 ? connection.rank : connection.attached;
  if (rank >= 0 && !connection.closing) judge.closed(rank, how, now);
  connection.socket = Socket();
}

void Hub::State::bad(Connection& connection, const std::string& how) {
  if (connection.stranger()) {
    warnings.push_back(concat("a connection to the control port was refused: it ", how));
    connection.closing = true;
  } else {
    drop(connection, how);
  }
}

void Hub::State::read(Connection& connection, int frames) {
  for (int i = 0; i < frames && connection.socket.open() && !connection.closing; ++i) {
    switch (connection.reader.pump(connection.socket)) {
      case FrameReader::State::more: return;
      case FrameReader::State::closed: return drop(connection, "lost: its connection closed");
      case FrameReader::State::bad: return bad(connection, "sent what is no message");
      case FrameReader::State::whole: take(connection, connection.reader.take());
    }
  }
}

/// Sends what waits. One that has gone may have said goodbye, or what is wrong, before it went.
void Hub::State::send(Connection& connection) {
  if (!connection.socket.open() || connection.out.flush(connection.socket)) return;
  read(connection, std::numeric_limits<int>::max());
  if (connection.socket.open()) drop(connection, "lost: its connection closed");
}

void Hub::State::greet(Connection& connection, const Frame& frame) {
  const std::optional<Greeting> greeting = frame.kind == Frame::Kind::hello ? parse_greeting(frame.bytes) : std::nullopt;
  if (!greeting || greeting->token != options.token) return bad(connection, "did not greet with the token of this job");
  if (greeting->launched > 0) return greet_launcher(connection, *greeting);
  const int rank = greeting->rank;
  std::string refusal;
  if (greeting->size != options.size || rank < 0 || rank >= options.size) {
    refusal = concat("this job has ", options.size, " ranks; here comes rank ", rank, " of ", greeting->size);
  } else if (judge.ranks()[static_cast<std::size_t>(rank)].here || (connection.attached >= 0 && connection.attached != rank) ||
             std::ranges::any_of(connections, [&](const Connection& c) { return c.attached == rank && &c != &connection; })) {
    refusal = concat("there is a rank ", rank, " already");
  }
  if (!refusal.empty()) {
    warnings.push_back(concat("a process was refused: ", refusal, "; it is pid ", greeting->pid, " on ", escape_control(greeting->host)));
    connection.out.push(encode({Frame::Kind::refuse, refusal}));
    connection.closing = true;
    return;
  }
  connection.rank = rank;
  connection.reader.set_cap(kMaxRequest);
  connection.socket.expect_signs(options.timeout);
  judge.greeted(rank, greeting->pid, escape_control(greeting->host), now);
  connection.out.push(encode({Frame::Kind::welcome, {}}));
  if (stop_wished) connection.out.push(encode({Frame::Kind::stop, {}}));
  if (judge.failure()) connection.out.push(encode({Frame::Kind::fail, bytes_of(*judge.failure())}));
}

/// Several launchers may claim the same ranks, by mistake; what they tell counts where it is of a process that has greeted.
void Hub::State::greet_launcher(Connection& connection, const Greeting& greeting) {
  const bool fits = connection.attached < 0 && greeting.size == options.size && greeting.rank >= 0 && greeting.rank < options.size && greeting.launched <= options.size - greeting.rank;
  if (!fits) {
    warnings.push_back(concat("a launcher was refused: this job has ", options.size, " ranks; here come ranks from ", greeting.rank, " on of ", greeting.size));
    connection.out.push(encode({Frame::Kind::refuse, concat("this job has ", options.size, " ranks; here come ranks from ", greeting.rank, " on of ", greeting.size)}));
    connection.closing = true;
    return;
  }
  connection.first = greeting.rank;
  connection.launched = greeting.launched;
  connection.host = escape_control(greeting.host);
  connection.socket.expect_signs(options.timeout);
  for (int i = 0; i < greeting.launched; ++i) judge.expect_end(greeting.rank + i);
  connection.out.push(encode({Frame::Kind::welcome, {}}));
  if (judge.failure()) connection.out.push(encode({Frame::Kind::fail, bytes_of(*judge.failure())}));
}

void Hub::State::ended(const Connection& connection, const Ended& ended) {
  const RankState& state = judge.ranks()[static_cast<std::size_t>(ended.rank)];
  if (state.here && (state.pid != ended.pid || state.host != connection.host)) return;   // one that was refused
  ends.push_back({ended, now + kLastWords});
}

/// The ends of processes on other hosts count once all is known that they have said.
void Hub::State::settle_ends() {
  std::erase_if(ends, [&](const End& end) {
    if (now < end.deadline && connection_of(end.ended.rank) != nullptr) return false;
    judge.ended(end.ended.rank, end.ended.status, end.ended.out_of_memory, now);
    return true;
  });
}

void Hub::State::exchange(int rank, Request request) {
  if (request.line == Line::main) judge.waits(rank, request.phase, now);
  const bool on_main = request.line == Line::main;
  for (const Exchanges::Answer& answer : exchanges.put(rank, std::move(request), now)) {
    if (on_main) judge.goes_on(answer.rank, now);
    Connection* to = connection_of(answer.rank);
    if (to == nullptr) continue;
    const std::string head = reply_head(answer.request);
    to->out.push(encode_head(Frame::Kind::reply, head.size() + answer.body->size()) + head);
    if (!answer.body->empty()) to->out.push(answer.body);
  }
}

void Hub::State::take(Connection& connection, const Frame& frame) {
  if (connection.rank < 0 && connection.launched == 0) return greet(connection, frame);
  const int rank = connection.rank;
  bool good = true;
  const auto with = [&](auto parsed, const auto& use) {
    good = parsed.has_value();
    if (good) use(*std::move(parsed));
  };
  if (connection.launched > 0) {
    switch (frame.kind) {
      case Frame::Kind::fail: with(parse_failure(frame.bytes), [&](Failure&& failure) { judge.fail({failure.rank, failure.code, escape_control(failure.text)}); }); break;
      case Frame::Kind::stop: stop_wished = true; break;
      case Frame::Kind::ended:
        with(parse_ended(frame.bytes), [&](const Ended& end) {
          good = end.rank >= connection.first && end.rank < connection.first + connection.launched;
          if (good) ended(connection, end);
        });
        break;
      default: good = false;
    }
    if (!good) drop(connection, "sent what is no message");
    return;
  }
  switch (frame.kind) {
    case Frame::Kind::exchange: with(parse_request(frame.bytes), [&](Request&& request) { exchange(rank, std::move(request)); }); break;
    case Frame::Kind::cancel: with(parse_cancel(frame.bytes), [&](const Cancel& cancel) { exchanges.cancel(rank, cancel); }); break;
    case Frame::Kind::beat: with(parse_beat(frame.bytes), [&](const Beat& beat) { judge.beat(rank, beat, now); }); break;
    case Frame::Kind::fail: with(parse_failure(frame.bytes), [&](Failure&& failure) { judge.failed(rank, std::move(failure), now); }); break;
    case Frame::Kind::stop: stop_wished = true; break;
    case Frame::Kind::bye: judge.left(rank, now); break;
    default: good = false;
  }
  if (!good) drop(connection, "sent what is no message");
}

void Hub::State::accept() {
  std::size_t strangers = 0;
  for (const Connection& c : connections) strangers += c.stranger() ? 1 : 0;
  for (Socket next = listener->accept(); next.open(); next = listener->accept()) {
    if (++strangers > kMaxStrangers) {   // the one that has been silent for longest goes
      std::ranges::find_if(connections, [](const Connection& c) { return c.stranger(); })->socket = Socket();
      std::erase_if(connections, [](const Connection& c) { return !c.socket.open(); });
    }
    connections.emplace_back().socket = std::move(next);
  }
  // A connection that cannot be taken, for want of a descriptor, stays there and would keep poll(2) from waiting.
  listener_rest = now + kLook;
}

void Hub::State::decide() {
  if (!judge.failure()) {
    for (std::size_t r = 0; r < judge.ranks().size(); ++r) {
      if (!judge.ranks()[r].left) continue;
      if (const auto waiting = exchanges.waits_for(static_cast<int>(r))) {
        judge.blame({static_cast<int>(r)}, concat("has left without coming to ", escape_control(waiting->phase), ", awaited by ", ranks_text(waiting->ranks)));
      }
    }
    judge.decide(now, warnings);
    if (const auto crossed = exchanges.crossed(); crossed && !judge.failure()) {
      const auto& [few, others] = *crossed;
      judge.blame(few.ranks, concat("waits in ", escape_control(few.phase), ", ", ranks_text(others.ranks), " in ", escape_control(others.phase)));
    }
    if (auto late = exchanges.late(now); late && !judge.failure()) {
      // Who waits elsewhere is late because of somebody else.
      std::ranges::stable_partition(late->ranks, [&](int r) { return !judge.ranks()[static_cast<std::size_t>(r)].waiting; });
      judge.blame(late->ranks, concat("has not come to ", escape_control(late->phase), " by its deadline"));
    }
  }
  tell_failure();
  if (judge.failure() || judge.all_left()) changed.signal();
}

void Hub::State::tell_failure() {
  if (!judge.failure() || told) return;
  told = true;
  for (Connection& c : connections) {
    if (!c.closing && !c.stranger()) c.out.push(encode({Frame::Kind::fail, bytes_of(*judge.failure())}));
  }
}

void Hub::State::tell_stop() {
  for (Connection& c : connections) {
    if (c.rank >= 0) c.out.push(encode({Frame::Kind::stop, {}}));
  }
}

/// The thread. What the hub itself cannot do, for want of memory or because a warning cannot be told, is a failure of the job.
void Hub::State::run() noexcept {
  try {
    serve();
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex);
    judge.fail({-1, dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? 4 : 1, concat("the hub of the job has failed: ", error.what())});
    decide();
    for (Connection& c : connections) static_cast<void>(c.out.flush(c.socket));
  }
}

void Hub::State::serve() {
  Clock::time_point end = Clock::time_point::max();
  bool stop_told = false;
  while (true) {
    std::vector<pollfd> wanted;
    std::vector<Connection*> places;
    std::vector<std::string> lines;
    bool unsent = false, listens = false;
    {
      const std::lock_guard lock(mutex);
      if (stopping && end == Clock::time_point::max()) end = Clock::now() + kFlush;
      wanted.push_back({wake.descriptor(), POLLIN, 0});
      listens = listener && now >= listener_rest;
      if (listens) wanted.push_back({listener->socket().descriptor(), POLLIN, 0});
      for (Connection& c : connections) {
        unsent = unsent || !c.out.empty();
        wanted.push_back({c.socket.descriptor(), static_cast<short>((c.closing ? 0 : POLLIN) | (c.out.empty() ? 0 : POLLOUT)), 0});
        places.push_back(&c);
      }
      if (end != Clock::time_point::max() && (!unsent || Clock::now() >= end)) return;
    }
    static_cast<void>(::poll(wanted.data(), wanted.size(), static_cast<int>(std::min(kLook, std::max(Milliseconds(1), options.timeout / 20)).count())));
    {
      const std::lock_guard lock(mutex);
      // Where the hub itself was stopped or starved, the ranks must have as long as they would have had: their beats wait in the sockets.
      const Clock::time_point real = Clock::now();
      now += std::min<Clock::duration>(real - last, 2 * kLook);
      last = real;
      wake.clear();
      for (std::size_t i = 0; i < places.size(); ++i) {
        if (wanted[wanted.size() - places.size() + i].revents != 0) read(*places[i]);
      }
      if (listens && wanted[1].revents != 0) accept();
      settle_ends();
      decide();
      if (stop_wished && !stop_told) {
        stop_told = true;
        tell_stop();
      }
      for (Connection& c : connections) {
        send(c);
        if (c.socket.open() && c.closing && c.out.empty()) c.socket = Socket();
      }
      std::erase_if(connections, [](const Connection& c) { return !c.socket.open(); });
      lines.swap(warnings);
    }
    if (options.warn) std::ranges::for_each(lines, options.warn);
  }
}

Hub::Hub(HubOptions options) {
  DETR_CHECK(options.size >= 1, "hub: at least one rank, got ", options.size);
  DETR_CHECK(options.timeout.count() > 0 && options.start_timeout.count() > 0, "hub: the timeouts must be positive");
  state_ = std::make_unique<State>(std::move(options));
  try {
    state_->thread = std::thread([state = state_.get()] { state->run(); });
  } catch (const std::system_error& error) {
    throw CommError("hub: no thread: ", error.what());
  }
}

Hub::~Hub() {
  {
    const std::lock_guard lock(state_->mutex);
    if (!state_->judge.failure() && state_->judge.all_left()) {
      for (Connection& c : state_->connections) {
        if (c.launched > 0) c.out.push(encode({Frame::Kind::bye, {}}));
      }
    }
    state_->stopping = true;
  }
  state_->wake.signal();
  state_->thread.join();
}

void Hub::attach(int rank, Socket socket) {
  DETR_CHECK(rank >= 0 && rank < state_->options.size, "hub: rank ", rank, " of ", state_->options.size, " cannot be attached");
  {
    const std::lock_guard lock(state_->mutex);
    Connection& connection = state_->connections.emplace_back();
    connection.socket = std::move(socket);
    connection.attached = rank;
    state_->judge.expect_end(rank);
    if (state_->told) connection.out.push(encode({Frame::Kind::fail, bytes_of(*state_->judge.failure())}));
  }
  state_->wake.signal();
}

void Hub::listen(Listener listener) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->listener.emplace(std::move(listener));
  }
  state_->wake.signal();
}

void Hub::stop() noexcept {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop_wished = true;
  }
  state_->wake.signal();
}

void Hub::child_ended(int rank, int wait_status, bool out_of_memory) {
  DETR_CHECK(rank >= 0 && rank < state_->options.size, "hub: there is no rank ", rank);
  {
    const std::lock_guard lock(state_->mutex);
    // What it said last may still lie in its socket.
    for (Connection& c : state_->connections) {
      if ((c.rank >= 0 ? c.rank : c.attached) == rank) state_->read(c, std::numeric_limits<int>::max());
    }
    state_->judge.ended(rank, wait_status, out_of_memory, state_->now);
  }
  state_->wake.signal();
}

void Hub::fail(const Failure& failure) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->judge.fail(failure);
    state_->tell_failure();   // even where this is the hub's last moment
  }
  state_->wake.signal();
}

std::optional<Failure> Hub::failure() const {
  const std::lock_guard lock(state_->mutex);
  return state_->judge.failure();
}

bool Hub::done() const {
  const std::lock_guard lock(state_->mutex);
  return state_->judge.all_left();
}

int Hub::descriptor() const { return state_->changed.descriptor(); }

std::vector<RankState> Hub::ranks() const {
  const std::lock_guard lock(state_->mutex);
  return state_->judge.ranks();
}

std::string random_token() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) throw CommError("no random bytes from the kernel");
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4U];
    text += "0123456789abcdef"[byte & 15U];
  }
  return text;
}

}  // namespace detr::dist

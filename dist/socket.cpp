#include "dist/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <thread>
#include <tuple>
#include <utility>

#include "runtime/error.h"

namespace detr::dist {
namespace {

constexpr std::uint32_t kMagic = 0x44455452;   // "DETR"
constexpr std::size_t kHeaderBytes = 16;       // magic, kind, length

/// The addresses of host:port, freed with the object.
class Addresses {
 public:
  Addresses(const std::string& host, int port, int flags) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &first_);
    if (status != 0) throw CommError(host, ":", port, ": ", gai_strerror(status));
  }
  ~Addresses() { freeaddrinfo(first_); }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  const addrinfo& first() const { return *first_; }

 private:
  addrinfo* first_ = nullptr;
};

Socket make_socket(const addrinfo& address) {
  Socket made(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!made.open()) throw CommError("socket: ", std::strerror(errno));
  return made;
}

void without_delay(const Socket& socket) {
  const int on = 1;
  static_cast<void>(setsockopt(socket.descriptor(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
}

/// Whether the socket is connected by the deadline; errno has the reason if not.
bool finish_connecting(const Socket& socket, Clock::time_point deadline) {
  pollfd wanted{socket.descriptor(), POLLOUT, 0};
  int ready = 0;
  do ready = ::poll(&wanted, 1, poll_time(deadline));
  while (ready < 0 && errno == EINTR);
  if (ready <= 0) {
    errno = ETIMEDOUT;
    return false;
  }
  int error = 0;
  socklen_t length = sizeof error;
  static_cast<void>(getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &error, &length));
  errno = error;
  return error == 0;
}

/// What getsockname(2) or getpeername(2) says, as numbers.
std::string address_text(int descriptor, int (*name)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  std::array<char, NI_MAXHOST> text{};
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (name(descriptor, generic, &length) != 0 || (address.ss_family != AF_INET && address.ss_family != AF_INET6)) return {};
  return getnameinfo(generic, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0 ? text.data() : "";
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

Socket::~Socket() {
  if (open()) static_cast<void>(::close(descriptor_));
}

Socket Socket::adopt(int descriptor) {
  int kind = 0;
  socklen_t length = sizeof kind;
  if (getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &kind, &length) != 0 || kind != SOCK_STREAM) throw CommError("descriptor ", descriptor, " is no stream socket");
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags < 0 || ::fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) != 0 || ::fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0) {
    throw CommError("descriptor ", descriptor, ": ", std::strerror(errno));
  }
  return Socket(descriptor);
}

void Socket::keep_on_exec() const noexcept { static_cast<void>(::fcntl(descriptor_, F_SETFD, 0)); }

void Socket::expect_signs(Milliseconds timeout) const noexcept {
  const int on = 1, ms = static_cast<int>(std::clamp<std::int64_t>(timeout.count(), 1, 1 << 30)), seconds = std::max(1, ms / 4000), tries = 3;
  for (const auto& [level, option, value] : {std::tuple{SOL_SOCKET, SO_KEEPALIVE, &on}, {IPPROTO_TCP, TCP_KEEPIDLE, &seconds}, {IPPROTO_TCP, TCP_KEEPINTVL, &seconds},
                                             {IPPROTO_TCP, TCP_KEEPCNT, &tries}, {IPPROTO_TCP, TCP_USER_TIMEOUT, &ms}}) {
    static_cast<void>(setsockopt(descriptor_, level, option, value, sizeof *value));
  }
}

void Socket::finish(Milliseconds limit) const noexcept {
  const Clock::time_point deadline = Clock::now() + limit;
  static_cast<void>(::shutdown(descriptor_, SHUT_WR));
  std::array<char, 4096> unread;
  pollfd wanted{descriptor_, POLLIN, 0};
  while (Clock::now() < deadline && ::poll(&wanted, 1, poll_time(deadline)) != 0) {
    const ssize_t count = ::recv(descriptor_, unread.data(), unread.size(), 0);
    if (count == 0 || (count < 0 && errno != EINTR && errno != EAGAIN)) return;
  }
}

std::string Socket::own_address() const { return address_text(descriptor_, ::getsockname); }
std::string Socket::peer_address() const { return address_text(descriptor_, ::getpeername); }

Listener::Listener(const std::string& host, int port) {
  const Addresses addresses(host, port, AI_PASSIVE);
  socket_ = make_socket(addresses.first());
  const int on = 1;
  static_cast<void>(setsockopt(socket_.descriptor(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
  if (::bind(socket_.descriptor(), addresses.first().ai_addr, addresses.first().ai_addrlen) != 0 || ::listen(socket_.descriptor(), SOMAXCONN) != 0) {
    throw CommError("cannot listen on ", host, ":", port, ": ", std::strerror(errno));
  }
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (getsockname(socket_.descriptor(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) throw CommError("getsockname: ", std::strerror(errno));
  port_ = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
}

Socket Listener::accept() const {
  Socket accepted(::accept4(socket_.descriptor(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (accepted.open()) without_delay(accepted);
  return accepted;
}

Socket connect_to(const std::string& host, int port, Clock::time_point deadline) {
  const Addresses addresses(host, port, 0);
  while (true) {
    int error = 0;
    for (const addrinfo* address = &addresses.first(); address != nullptr; address = address->ai_next) {
      Socket socket = make_socket(*address);
      const int status = ::connect(socket.descriptor(), address->ai_addr, address->ai_addrlen);
      // One address that swallows packets must not use up the time of the others.
      if (status == 0 || (errno == EINPROGRESS && finish_connecting(socket, std::min(deadline, Clock::now() + Milliseconds(3000))))) {
        without_delay(socket);
        return socket;
      }
      error = errno;
    }
    if (Clock::now() >= deadline) throw CommError("cannot connect to ", host, ":", port, ": ", std::strerror(error));
    std::this_thread::sleep_for(std::min<Clock::duration>(Milliseconds(20), deadline - Clock::now()));
  }
}

std::pair<Socket, Socket> socket_pair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()) != 0) throw CommError("socketpair: ", std::strerror(errno));
  return {Socket(ends[0]), Socket(ends[1])};
}

int poll_time(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1 << 30));
}

Wake::Wake() : socket_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!socket_.open()) throw CommError("eventfd: ", std::strerror(errno));
}

void Wake::signal() const noexcept {
  const int before = errno;   // a signal handler must leave it alone
  const std::uint64_t one = 1;
  static_cast<void>(!::write(socket_.descriptor(), &one, sizeof one));
  errno = before;
}

void Wake::clear() const noexcept {
  std::uint64_t count = 0;
  static_cast<void>(!::read(socket_.descriptor(), &count, sizeof count));
}

std::string encode_head(Frame::Kind kind, std::size_t length) {
  const auto number = static_cast<std::uint32_t>(kind);
  const std::uint64_t bytes = length;
  std::string out(kHeaderBytes, '\0');
  std::memcpy(out.data(), &kMagic, 4);
  std::memcpy(out.data() + 4, &number, 4);
  std::memcpy(out.data() + 8, &bytes, 8);
  return out;
}

std::string encode(const Frame& frame) { return encode_head(frame.kind, frame.bytes.size()) + frame.bytes; }

bool FrameReader::take_header() {
  std::uint32_t magic = 0, kind = 0;
  std::uint64_t length = 0;
  std::memcpy(&magic, header_.data(), 4);
  std::memcpy(&kind, header_.data() + 4, 4);
  std::memcpy(&length, header_.data() + 8, 8);
  if (magic != kMagic || kind < 1 || kind > static_cast<std::uint32_t>(Frame::Kind::ended) || length > cap_) return false;
  frame_.kind = static_cast<Frame::Kind>(kind);
  wanted_ = length;
  return true;
}

FrameReader::State FrameReader::pump(const Socket& socket) {
  std::array<char, 16384> chunk;
  while (true) {
    const bool in_header = header_.size() < kHeaderBytes;
    const std::size_t left = in_header ? kHeaderBytes - header_.size() : wanted_ - frame_.bytes.size();
    if (left == 0) return State::whole;
    const ssize_t count = ::recv(socket.descriptor(), chunk.data(), std::min(left, chunk.size()), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return State::more;
    if (count <= 0) return State::closed;
    (in_header ? header_ : frame_.bytes).append(chunk.data(), static_cast<std::size_t>(count));
    if (in_header && header_.size() == kHeaderBytes && !take_header()) return State::bad;
  }
}

Frame FrameReader::take() {
  header_.clear();
  return std::exchange(frame_, {});
}

bool Outbox::flush(const Socket& socket) {
  while (!queue_.empty()) {
    const std::string& bytes = *queue_.front();
    const ssize_t count = ::send(socket.descriptor(), bytes.data() + sent_, bytes.size() - sent_, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno == EAGAIN;
    sent_ += static_cast<std::size_t>(count);
    if (sent_ < bytes.size()) continue;
    queue_.pop_front();
    sent_ = 0;
  }
  return true;
}

}  // namespace detr::dist

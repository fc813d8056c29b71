#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "dist/communicator.h"

namespace detr::dist {

/// Owner of a socket. It does not block: calls wait in poll(2), with a deadline.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(other.descriptor_) { other.descriptor_ = -1; }
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  /// Takes over an open socket, such as an inherited one, and makes it close on exec and not block. Throws CommError if it is none.
  static Socket adopt(int descriptor);

  bool open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  /// Lets a program that this process execs inherit it. For a child between fork and exec: safe there.
  void keep_on_exec() const noexcept;
  /// A TCP connection whose peer or network is gone without a word is reported as closed after this time, by the kernel's probes. A process that is
  /// stopped answers them. Without effect on other sockets.
  void expect_signs(Milliseconds timeout) const noexcept;
  /// Says that nothing more comes, and waits for the other end to close. A TCP connection that is closed with bytes unread, such as a message that came
  /// too late to matter, is reset, and what was sent on it last may never arrive.
  void finish(Milliseconds limit) const noexcept;
  /// The addresses of this end and of the other end, as numbers ("10.0.0.7", "fe80::1%eth0"); empty where the socket is none of IP.
  std::string own_address() const;
  std::string peer_address() const;

 private:
  int descriptor_ = -1;
};

/// A TCP socket that listens, by default on the loopback with a port that the kernel picks. Throws CommError if that fails.
class Listener {
 public:
  explicit Listener(const std::string& host = "127.0.0.1", int port = 0);
  int port() const { return port_; }
  const Socket& socket() const { return socket_; }
  /// The next connection, or a socket that is not open if there is none.
  Socket accept() const;

 private:
  Socket socket_;
  int port_ = 0;
};

/// A connection, tried until the deadline: the other side may start later. Throws CommError.
Socket connect_to(const std::string& host, int port, Clock::time_point deadline);

/// Two sockets that are connected to each other; both close on exec. Throws CommError.
std::pair<Socket, Socket> socket_pair();

/// Milliseconds until the deadline for poll(2), rounded up; 0 if it has passed.
int poll_time(Clock::time_point deadline);

/// Wakes a poll(2) from any thread, or from a signal handler.
class Wake {
 public:
  Wake();   ///< throws CommError
  void signal() const noexcept;
  /// Readable after signal(), until clear().
  int descriptor() const { return socket_.descriptor(); }
  void clear() const noexcept;

 private:
  Socket socket_;
};

/// A message: kind, length and bytes.
struct Frame {
  enum class Kind : std::uint32_t { hello = 1, welcome, refuse, exchange, reply, cancel, beat, stop, fail, bye, ended };
  Kind kind = Kind::hello;
  std::string bytes;
};
/// What stands in front of the bytes of a message.
std::string encode_head(Frame::Kind kind, std::size_t length);
/// The message as it is sent.
std::string encode(const Frame& frame);

/// Reads messages as their bytes arrive.
class FrameReader {
 public:
  enum class State { more, whole, closed, bad };
  /// A message of more than `cap` bytes is bad.
  explicit FrameReader(std::size_t cap) : cap_(cap) {}
  void set_cap(std::size_t cap) { cap_ = cap; }
  /// Takes what has arrived of a message, up to its end: `whole` until take(). `closed` and `bad` are final.
  State pump(const Socket& socket);
  /// The message that is whole; the reader goes on to the next one.
  Frame take();

 private:
  bool take_header();

  std::size_t cap_, wanted_ = 0;
  std::string header_;
  Frame frame_;
};

/// What is to be sent, in order, as the socket takes it.
class Outbox {
 public:
  using Bytes = std::shared_ptr<const std::string>;
  void push(Bytes bytes) { queue_.push_back(std::move(bytes)); }
  void push(std::string bytes) { push(std::make_shared<const std::string>(std::move(bytes))); }
  bool empty() const { return queue_.empty(); }
  /// Sends what fits without waiting; false if the peer has gone.
  bool flush(const Socket& socket);

 private:
  std::deque<Bytes> queue_;
  std::size_t sent_ = 0;   // of the first
};

}  // namespace detr::dist

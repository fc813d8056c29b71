#pragma once
#include <cstddef>
#include <string>

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

  bool open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  /// Wakes whoever waits on it, on both sides. For any thread.
  void shut() const noexcept;
  /// Writes everything; false if the peer has gone or the deadline has passed.
  bool write(const std::string& bytes, Clock::time_point deadline) const;

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

/// Milliseconds until the deadline for poll(2), rounded up; 0 if it has passed.
int poll_time(Clock::time_point deadline);

/// A message: kind, length and bytes.
struct Frame {
  enum class Kind : std::uint32_t { hello = 1, data = 2, fail = 3 };
  Kind kind = Kind::data;
  std::string bytes;
};
/// The message as it is sent.
std::string encode(const Frame& frame);

/// Reads one message as its bytes arrive.
class FrameReader {
 public:
  enum class State { more, whole, closed, bad };
  /// A message of more than `cap` bytes is bad.
  explicit FrameReader(std::size_t cap) : cap_(cap) {}
  /// Takes what has arrived and belongs to this message. `closed` and `bad` are final.
  State pump(const Socket& socket);
  const Frame& frame() const { return frame_; }

 private:
  bool take_header();

  std::size_t cap_, wanted_ = 0;
  std::string header_;
  Frame frame_;
};

}  // namespace detr::dist

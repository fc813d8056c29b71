#pragma once
#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>

#include <csignal>

#include "dist/control.h"

namespace detr::dist {

/// While it lives SIGPIPE is blocked in this thread and in threads that it starts: Gloo writes to connections whose peer may have gone. A
/// signal that came meanwhile is taken away, so the process needs no handler.
class WithoutSigpipe {
 public:
  WithoutSigpipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~WithoutSigpipe() {
    const timespec at_once{0, 0};
    if (!was_pending_) static_cast<void>(sigtimedwait(&pipe_, nullptr, &at_once));
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSigpipe(const WithoutSigpipe&) = delete;
  WithoutSigpipe& operator=(const WithoutSigpipe&) = delete;

 private:
  sigset_t pipe_, before_;
  bool was_pending_ = false;
};

/// A Gloo context whose pairs find each other by the control.
class MeshContext final : public ::gloo::Context {
 public:
  MeshContext(int own_rank, int ranks) : ::gloo::Context(own_rank, ranks) {}
  /// Connects every pair of ranks; `host` is this rank's address or name. Throws CommError, or what Gloo throws.
  void connect(Control& control, const std::string& host, Clock::time_point deadline);
  /// Fails what other threads wait for in this context.
  void poison() noexcept;
};

}  // namespace detr::dist

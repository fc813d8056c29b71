#pragma once
#include "dist/control.h"

namespace detr::dist {

struct GlooOptions {
  std::string host = "127.0.0.1";   ///< this rank's address (or name) for the data connections
  Milliseconds timeout{120000};     ///< longest wait for a peer inside a collective
};

/// The engine for CPU tensors: Gloo over TCP, ring sums. One thread of its own takes collectives from a queue, in order, and waits for
/// peers in Gloo while the caller goes on. Connects all pairs of ranks within the control' timeout; throws CommError.
/// Collectives issued in another order on one rank do not meet (their tags differ) and end at the timeout.
std::unique_ptr<Communicator> gloo_communicator(std::shared_ptr<Control> control, Milliseconds connect_timeout, const GlooOptions& options = {});

}  // namespace detr::dist

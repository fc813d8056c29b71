#pragma once
#include "dist/control.h"

namespace detr::dist {

struct GlooOptions {
  std::string host = "127.0.0.1";   ///< this rank's address (or name) for the data connections
  Milliseconds timeout{120000};     ///< longest wait for a peer inside a collective
};

/// The engine for CPU tensors: Gloo over TCP, ring sums. One thread of its own takes collectives from a queue, in order, and waits for
/// peers in Gloo while the caller goes on; where the stream is on a GPU, it waits for the work before the collective first. Connects all pairs of ranks
/// within `connect_timeout`; throws CommError.
/// Collectives issued in another order on one rank do not meet (their tags differ) and end at the timeout.
std::unique_ptr<Communicator> gloo_communicator(std::shared_ptr<Control> control, Milliseconds connect_timeout, const GlooOptions& options = {});

/// The same for tensors on the stream's device, where there is no NCCL or several ranks share a GPU: a collective copies to page-locked memory of the
/// host on a queue beside the stream, and Work::wait() copies back. Not fit for capture. On a CPU stream the same steps are copies in memory.
std::unique_ptr<Communicator> staged_gloo_communicator(std::shared_ptr<Control> control, const Stream& stream, Milliseconds connect_timeout,
                                                       const GlooOptions& options = {});

}  // namespace detr::dist

#pragma once
#include <utility>
#include <vector>

#include "dist/control.h"

namespace detr::dist {

/// Sets what repeatable sums need in NCCL's environment (ring sums, no NVLS) and turns its fixed port off, each unless it is set already. Before
/// the first communicator. Returns the variables with their values, for the log and the manifest.
std::vector<std::pair<std::string, std::string>> set_nccl_environment();

/// Gets past NCCL's refusal of several ranks on one GPU, by a host id of each rank's own, with the loopback between them; each unless it is set
/// already. Right sums, slow: for tests and rehearsals. Before the first communicator, in every rank of the job.
void let_ranks_share_a_gpu(int rank);

/// The engine for CUDA tensors, one GPU a rank: NCCL, not blocking, on a queue of its own beside the caller's stream, to which events tie
/// it; fit for capture once every collective has run eagerly. Throws CommError where not all ranks come within `connect_timeout`;
/// `timeout` bounds each call's own wait for NCCL to accept it. Graphs that hold collectives must go before the communicator does.
std::unique_ptr<Communicator> nccl_communicator(std::shared_ptr<Control> control, const Stream& stream, Milliseconds connect_timeout, Milliseconds timeout);

}  // namespace detr::dist

#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "apps/world.h"
#include "train/config.h"
#include "train/replicas.h"

namespace detr::apps {

/// The engine for ranks on CPUs or on GPUs, as Communicator::engine() names it: what comm.backend says, or for "auto" NCCL on GPUs and Gloo on CPUs.
/// Throws ConfigError or DeviceError where it does not fit the device or is not in the build.
std::string engine_name(const train::CommConfig& comm, bool on_cpus);

/// Where each rank's Gloo listens, from the own end and the hub's end of its control connection, as addresses (both empty: a socket pair): where its own end is,
/// unless that is of the loopback; a rank beside the hub is where those of other hosts see the hub; on one host all are on the loopback.
std::vector<std::string> gloo_addresses(const std::vector<std::pair<std::string, std::string>>& connections);

/// Engine and place of a job's ranks, for the line about it: "4 ranks over gloo on 10.0.0.1, 10.0.0.2".
std::string describe_ranks(const std::string& engine, const std::vector<std::string>& addresses, int size);

/// The other ranks for a trainer whose model is on the stream's device: the control and the engine; all ranks call it. Warns on stderr where NCCL may
/// lack memory. `described`: out, describe_ranks().
train::RunRanks run_ranks(const World& world, const train::CommConfig& comm, const std::shared_ptr<dist::Control>& control, const Stream& stream, std::string& described);

/// Empty, or one line with the option for containers where less than `need` bytes are free in a folder of shared memory.
std::string shared_memory_warning(const std::filesystem::path& folder, std::uintmax_t need);

/// Where the record of a rank's last collectives is written when the job fails.
void write_record_to(const std::filesystem::path& folder, int rank);
/// Writes it, once there is an engine and a folder. For any thread; called when the job fails.
void write_record() noexcept;

}  // namespace detr::apps

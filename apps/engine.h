#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "apps/world.h"
#include "train/config.h"
#include "train/replicas.h"

namespace detr::apps {

/// The engine for ranks on CPUs or on GPUs, as Communicator::engine() names it: what comm.backend says, or for "auto" NCCL on GPUs and Gloo on CPUs.
/// Throws ConfigError or DeviceError where it does not fit the device or is not in the build.
std::string engine_name(const train::CommConfig& comm, bool on_cpus);

/// The other ranks for a trainer whose model is on the stream's device: the control and the engine. Warns on stderr where NCCL may lack memory.
train::RunRanks run_ranks(const World& world, const train::CommConfig& comm, const std::shared_ptr<dist::Control>& control, const Stream& stream);

/// Empty, or one line with the option for containers where less than `need` bytes are free in a folder of shared memory.
std::string shared_memory_warning(const std::filesystem::path& folder, std::uintmax_t need);

/// Where the record of a rank's last collectives is written when the job fails.
void write_record_to(const std::filesystem::path& folder, int rank);
/// Writes it, once there is an engine and a folder. For any thread; called when the job fails.
void write_record() noexcept;

}  // namespace detr::apps

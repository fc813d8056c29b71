#pragma once
#include <filesystem>
#include <memory>

#include "apps/world.h"
#include "train/replicas.h"

namespace detr::apps {

/// The other ranks for a trainer: the control, and the engine that --comm names: NCCL on GPUs and Gloo on CPUs by default.
train::RunRanks run_ranks(const World& world, const RankFlags& flags, const std::shared_ptr<dist::Control>& control);

/// "4 ranks over nccl", for a run's first line. Throws ConfigError or DeviceError where the engine does not fit the device or is not in the build.
std::string describe_ranks(const World& world, const RankFlags& flags, const Stream& stream);

/// Where the record of a rank's last collectives is written when the job fails.
void write_record_to(const std::filesystem::path& folder, int rank);
/// Writes it, once there is an engine and a folder. For any thread; called when the job fails.
void write_record() noexcept;

}  // namespace detr::apps

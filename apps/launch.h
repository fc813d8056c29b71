#pragma once
#include <chrono>
#include <functional>
#include <string>

#include "apps/cli.h"
#include "apps/world.h"

namespace detr::apps {

void add_rank_flags(CLI::App& app, RankFlags& flags);
/// Those that stand for keys of the configuration.
void apply_rank_flags(const RankFlags& flags, train::Config& config);

/// What `count` returns, or throws as a DeviceError, in a child process, so that this one touches no driver. Throws DeviceError where the child says nothing within `patience`:
/// it is killed then. The child dies with this process.
int count_in_child(const std::function<int()>& count, std::chrono::milliseconds patience);

/// Throws ConfigError naming the ranks where another launcher has started this process as one of several: a verb that knows no ranks would run, print and write
/// in each of them.
void expect_alone(const std::string& verb);

/// find_world() for this process. A child process counts the GPUs, so that this one has not touched CUDA when it forks.
World world_of_process(const RankFlags& flags, const CommonOptions& common);

/// Starts the ranks of this host as copies of this process and watches over them until all are gone; for World::Role::launcher. To be called
/// from the main thread, before any other thread and any call of CUDA.
///
/// Each rank is a process group of its own, with /dev/null for stdin, that dies with this process. Rank 0 has stdout and stderr of this one; what others
/// write comes to stderr in lines with the rank in front. SIGINT, SIGTERM, SIGUSR1 and SIGHUP (unless ignored) are stop wishes for the whole
/// job; the second one ends it at once. When a rank fails the others have one second; then they are killed.
///
/// The result is the exit code of the job with the text of the failure that came first. Throws ConfigError for a malformed DETRTRAIN_FAULT
/// or a limit of open files that is too low.
Outcome launch(const World& world, const train::CommConfig& comm, const CommonOptions& common);

}  // namespace detr::apps

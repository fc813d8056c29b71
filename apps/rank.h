#pragma once
#include <functional>
#include <memory>
#include <string>

#include "apps/cli.h"
#include "apps/world.h"
#include "dist/control.h"

namespace detr::apps {

/// The options of this process's verb: device and threads of its rank; only rank 0 tells progress and prints a JSON object.
/// Throws DeviceError where the GPU of the local rank is not there.
CommonOptions rank_options(const World& world, const CommonOptions& common);

/// Where ranks of several processes or hosts come to the hub: on the loopback where the meeting point is a loopback address, else on all
/// addresses of this host (a host's own name may lead it to its loopback, and the others elsewhere). Throws CommError where the port is taken.
dist::Listener listen_for_ranks(const World& world);

/// Makes this process a rank of its job (World::Role::rank), once: connects it to the hub, which rank 0 runs itself where another launcher started
/// the ranks. From here on
///   SIGINT, SIGTERM, SIGUSR1 and SIGHUP (unless ignored) are stop wishes for the whole job, however often they come;
///   when the job fails the process ends within moments with the exit code of the failure, from any state and without destructors (they can hang in a
///   driver or a library); rank 0 says why where no launcher of ours does;
///   a crash and an exception that nobody catches are told on stderr with the rank.
/// Throws CommError if the hub is not there, not free or refuses; ConfigError where it says why.
std::shared_ptr<dist::Control> join_job(const World& world, const train::CommConfig& comm, const CommonOptions& common, const std::string& verb);

/// In a rank: what is to be done when the job fails, before the process ends; on a thread of the control's, while the others go on. Calls add up.
void at_failure(std::function<void()> action);

/// In a rank: tells the hub why it fails, waits for the job to end, and ends the process. Objects that must not be destroyed on the way
/// must still be there: call it where the exception is caught first. Elsewhere it does nothing.
void fail_rank(int code, const std::string& text) noexcept;

/// In a rank: the clean end, after everything else. Returns the exit code: `code`, or another one where the hub is in this process and a rank
/// that still works fails. Elsewhere it does nothing and returns `code`.
int leave_job(int code) noexcept;

/// This process prints the results: it is no rank, or rank 0.
bool prints_results();
/// A launcher of ours has started this process, and prints errors.
bool has_launcher();

/// The object of --json for an error, as text on one line.
std::string error_json(const std::string& verb, int code, const std::string& text);

}  // namespace detr::apps

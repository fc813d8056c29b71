#include "apps/engine.h"

#include <algorithm>
#include <iostream>
#include <mutex>
#include <system_error>

#include "dist/build.h"
#include "dist/gloo/communicator.h"
#include "dist/nccl/communicator.h"
#include "runtime/error.h"
#include "runtime/files.h"

namespace detr::apps {
namespace {

/// What NCCL's manual gives a container. Where the driver lets NCCL it takes memory of another kind.
constexpr std::uintmax_t kSharedMemory = std::uintmax_t{1} << 30;

constexpr std::size_t kMostShown = 4;   // addresses in a line

/// What write_record() needs; the process ends with it.
struct Record {
  std::mutex mutex;
  std::filesystem::path folder;
  int rank = 0;
  dist::Communicator* communicator = nullptr;
};
Record& record() {
  static Record* const instance = new Record;   // a thread may write while the process ends
  return *instance;
}

}  // namespace

std::string engine_name(const train::CommConfig& comm, bool on_cpus) {
  if (on_cpus) {
    if (comm.backend == "nccl") throw ConfigError("comm.backend (--comm): nccl is for GPUs; on CPUs it is gloo");
    if (!dist::kHasGloo) throw DeviceError("this build has no Gloo: several ranks on CPUs need it");
    return "gloo";
  }
  if (comm.backend != "gloo" && dist::kHasNccl) return "nccl";
  if (comm.backend != "gloo") throw DeviceError("this build has no NCCL; --comm gloo goes through host memory");
  if (!dist::kHasGloo) throw DeviceError("this build has no Gloo");
  return "gloo-staged";
}

std::string shared_memory_warning(const std::filesystem::path& folder, std::uintmax_t need) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(folder, error);
  if (!error && space.available >= need) return {};
  const std::string free = error ? error.message() : concat(space.available >> 20, " MiB are free");
  return concat(folder.string(), ": ", free, ", and NCCL may want up to ", need >> 20, " MiB there for ranks on one host; a container gets them by --shm-size=", need >> 20, "m or --ipc=host");
}

std::vector<std::string> gloo_addresses(const std::vector<std::pair<std::string, std::string>>& connections) {
  const auto reaches_far = [](const std::string& address) { return !address.empty() && !is_loopback(address); };
  std::string hub;   // as other hosts see its host
  for (const auto& [own, seen] : connections) {
    if (hub.empty() && reaches_far(seen)) hub = seen;
  }
  std::vector<std::string> addresses;
  for (const auto& [own, seen] : connections) addresses.push_back(reaches_far(own) ? own : hub.empty() ? "127.0.0.1" : hub);
  return addresses;
}

std::string describe_ranks(const std::string& engine, const std::vector<std::string>& addresses, int size) {
  std::vector<std::string> hosts;
  for (const std::string& address : addresses) {
    if (std::find(hosts.begin(), hosts.end(), address) == hosts.end()) hosts.push_back(address);
  }
  std::string text = concat(size, " ranks over ", engine);
  for (std::size_t i = 0; i < std::min(hosts.size(), kMostShown); ++i) text += concat(i == 0 ? " on " : ", ", hosts[i]);
  return hosts.size() > kMostShown ? concat(text, " and ", hosts.size() - kMostShown, " more") : text;
}

train::RunRanks run_ranks(const World& world, const train::CommConfig& comm, const std::shared_ptr<dist::Control>& control, const Stream& stream, std::string& described) {
  train::RunRanks ranks;
  const std::string engine = engine_name(comm, stream.device().is_cpu());
  ranks.control = control;
  ranks.timeout = comm.timeout();
  ranks.settings = {{"engine", engine}};
  if constexpr (dist::kHasNccl) {
    if (engine == "nccl") {
      for (const auto& setting : dist::set_nccl_environment()) ranks.settings.push_back(setting);
      const std::string warning = world.local_rank == 0 && world.local_size > 1 ? shared_memory_warning("/dev/shm", kSharedMemory) : "";
      if (!warning.empty()) std::cerr << concat("warning: ", warning, "\n") << std::flush;
    }
  }
  std::vector<std::string> addresses;
  if (engine != "nccl") {
    std::vector<std::pair<std::string, std::string>> connections;
    // Ranks read their data for as long as it takes; the hub knows one that stands still.
    const dist::Clock::time_point deadline = dist::Clock::now() + std::chrono::hours(24);
    for (const std::string& ends : control->all_gather(control->own_address() + "\n" + control->hub_address(), "ends of the connections", deadline)) {
      const std::size_t cut = std::min(ends.find('\n'), ends.size());
      connections.emplace_back(ends.substr(0, cut), ends.substr(std::min(cut + 1, ends.size())));
    }
    addresses = gloo_addresses(connections);
  }
  described = describe_ranks(engine, addresses, world.size);
  ranks.connect = [engine, comm, control, address = addresses.empty() ? "" : addresses[static_cast<std::size_t>(world.rank)]](const Stream& on) {
    std::unique_ptr<dist::Communicator> communicator;
    if (engine == "nccl") {
      if constexpr (dist::kHasNccl) communicator = dist::nccl_communicator(control, on, comm.start_timeout(), comm.timeout());
    } else if constexpr (dist::kHasGloo) {
      const dist::GlooOptions options{address, comm.timeout()};
      communicator = engine == "gloo" ? dist::gloo_communicator(control, comm.start_timeout(), options) : dist::staged_gloo_communicator(control, on, comm.start_timeout(), options);
    }
    const std::lock_guard lock(record().mutex);
    record().communicator = communicator.get();
    return communicator;
  };
  ranks.closed = [] {
    const std::lock_guard lock(record().mutex);
    record().communicator = nullptr;
  };
  return ranks;
}

void write_record_to(const std::filesystem::path& folder, int rank) {
  const std::lock_guard lock(record().mutex);
  record().folder = folder;
  record().rank = rank;
}

void write_record() noexcept {
  try {
    Record& own = record();
    const std::lock_guard lock(own.mutex);
    if (own.folder.empty() || own.communicator == nullptr) return;
    std::filesystem::create_directories(own.folder);
    replace_file_unsynced(own.folder / concat("collectives-rank", own.rank, ".json"), own.communicator->record().json(own.rank) + '\n');   // the job must end now
  } catch (...) {   // there is something worse to tell
  }
}

}  // namespace detr::apps

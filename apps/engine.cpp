#include "apps/engine.h"

#include <unistd.h>

#include <array>
#include <fstream>
#include <mutex>

#include "dist/build.h"
#include "dist/gloo/communicator.h"
#include "dist/nccl/communicator.h"
#include "runtime/error.h"

namespace detr::apps {
namespace {

dist::Milliseconds milliseconds(double seconds) { return dist::Milliseconds(static_cast<std::int64_t>(seconds * 1000)); }

/// Where other ranks reach this one's engine: on one host the loopback.
std::string own_address(const World& world) {
  if (world.host.empty() || world.host == "127.0.0.1" || world.host == "localhost") return "127.0.0.1";
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "127.0.0.1";
}

std::string engine_of(const RankFlags& flags, const Stream& stream) {
  if (stream.device().is_cpu()) {
    if (flags.engine == "nccl") throw ConfigError("--comm nccl sums on GPUs; this run is on the CPU");
    if (!dist::kHasGloo) throw DeviceError("this build has no Gloo: several ranks on CPUs need it");
    return "gloo";
  }
  if (flags.engine != "gloo" && dist::kHasNccl) return "nccl";
  if (flags.engine != "gloo") throw DeviceError("this build has no NCCL; --comm gloo goes through host memory");
  if (!dist::kHasGloo) throw DeviceError("this build has no Gloo");
  return "gloo-staged";
}

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

train::RunRanks run_ranks(const World& world, const RankFlags& flags, const std::shared_ptr<dist::Control>& control) {
  train::RunRanks ranks;
  ranks.control = control;
  ranks.timeout = milliseconds(flags.timeout_s);
  ranks.settings = {{"engine", flags.engine}};
  if constexpr (dist::kHasNccl) {
    for (const auto& setting : dist::set_nccl_environment()) ranks.settings.push_back(setting);
  }
  const dist::Milliseconds start = milliseconds(flags.start_timeout_s);
  ranks.connect = [flags, control, start, address = own_address(world)](const Stream& stream) {
    const std::string name = engine_of(flags, stream);
    std::unique_ptr<dist::Communicator> communicator;
    if (name == "nccl") {
      if constexpr (dist::kHasNccl) communicator = dist::nccl_communicator(control, stream, start, milliseconds(flags.timeout_s));
    } else if constexpr (dist::kHasGloo) {
      const dist::GlooOptions options{address, milliseconds(flags.timeout_s)};
      communicator = name == "gloo" ? dist::gloo_communicator(control, start, options) : dist::staged_gloo_communicator(control, stream, start, options);
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

std::string describe_ranks(const World& world, const RankFlags& flags, const Stream& stream) { return concat(world.size, " ranks over ", engine_of(flags, stream)); }

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
    std::ofstream(own.folder / concat("collectives-rank", own.rank, ".json")) << own.communicator->record().json(own.rank) << '\n';
  } catch (...) {   // there is something worse to tell
  }
}

}  // namespace detr::apps

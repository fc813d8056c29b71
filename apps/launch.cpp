#include "apps/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "apps/supervisor.h"
#include "dist/socket.h"
#include "runtime/error.h"
#include "runtime/faults.h"
#include "runtime/files.h"
#include "runtime/gpus.h"

namespace detr::apps {
namespace {

constexpr std::chrono::seconds kDriverPatience{120};   // a driver may take long to wake many GPUs

}  // namespace

int count_in_child(const std::function<int()>& count, std::chrono::milliseconds patience) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw Error("pipe: ", std::strerror(errno));
  FileHandle read_end(ends[0]), write_end(ends[1]);
  const pid_t parent = ::getpid(), child = ::fork();
  if (child < 0) throw Error("fork: ", std::strerror(errno));
  if (child == 0) {
    if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || ::getppid() != parent) ::_exit(1);
    std::string answer;
    try {
      answer = std::to_string(count());
    } catch (const std::exception& error) {
      answer = concat("!", error.what());
    }
    ::_exit(::write(write_end.get(), answer.data(), answer.size()) < 0 ? 1 : 0);
  }
  write_end = FileHandle();
  const dist::Clock::time_point deadline = dist::Clock::now() + patience;
  std::string answer;
  std::array<char, 512> bytes{};
  bool late = false;
  while (true) {
    pollfd wanted{read_end.get(), POLLIN, 0};
    const int ready = ::poll(&wanted, 1, dist::poll_time(deadline));
    if (ready < 0 && errno == EINTR) continue;
    late = ready == 0;
    const ssize_t got = ready <= 0 ? 0 : ::read(read_end.get(), bytes.data(), bytes.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    answer.append(bytes.data(), static_cast<std::size_t>(got));
  }
  if (late) static_cast<void>(::kill(child, SIGKILL));
  // One that is stuck in a driver cannot even be killed; it is left behind.
  for (int tries = 0; ::waitpid(child, nullptr, late ? WNOHANG : 0) != child && (errno == EINTR || late) && tries < 100; ++tries) {
    if (late) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (late) throw DeviceError("the GPUs cannot be counted: the driver has not answered within ", std::chrono::duration<double>(patience).count(), " s; -d cpu does without");
  if (answer.starts_with('!')) throw DeviceError(answer.substr(1));
  if (answer.empty()) throw DeviceError("the GPUs cannot be counted: the driver ended the process that asked");
  return std::stoi(answer);
}

void add_rank_flags(CLI::App& app, RankFlags& flags) {
  app.add_option("--gpus", flags.gpus, "one rank for each GPU: a number of them, all, or indices such as 0,1,3");
  app.add_option("--ranks,--nproc-per-node", flags.ranks, "ranks on CPUs (with -d cpu)")->check(whole_number(1, kMostLocalRanks));
  app.add_option("--nnodes", flags.nodes, "hosts of the job; the same command on each")->check(whole_number(1, kMostRanks));
  app.add_option("--node-rank", flags.node_rank, "number of this host, from 0 on")->check(whole_number(0, kMostRanks));
  app.add_option("--rdzv", flags.rendezvous, "HOST:PORT where the host with --node-rank 0 (of other launchers: rank 0) listens");
  app.add_option("--rdzv-id", flags.rendezvous_id, "name of the job, the same on every host: two jobs never mix");
  app.add_option("--master-addr", flags.master_addr, "with --master-port the same as --rdzv");
  app.add_option("--master-port", flags.master_port, "see --master-addr")->check(whole_number(1, 65535));
  app.add_option("--comm", flags.engine, "nccl, gloo, or auto: NCCL on GPUs, Gloo on CPUs")->check(CLI::IsMember({"auto", "nccl", "gloo"}));
  app.add_option("--comm-timeout", flags.timeout_s, "seconds after which a rank that others wait for counts as stalled")->check(real_number(0.1, 86400));
  app.add_option("--start-timeout", flags.start_timeout_s, "seconds for all ranks to come")->check(real_number(0.1, 86400));
}

World world_of_process(const RankFlags& flags, const CommonOptions& common) {
  int gpus = -1;
  Surroundings surroundings;
  surroundings.variable = [](const char* name) -> const char* { return std::getenv(name); };
  surroundings.count_gpus = [&gpus] {
    return gpus < 0 ? gpus = count_in_child([] { return static_cast<int>(list_gpus().size()); }, kDriverPatience) : gpus;
  };
  surroundings.parent = static_cast<int>(::getppid());
  return find_world(flags, common.device, surroundings);
}

void expect_alone(const std::string& verb) {
  const World world = world_of_process({}, {});
  if (world.role == World::Role::alone) return;
  throw ConfigError(verb, " runs as one process, and this is rank ", world.rank, " of ", world.size, ": start it once; several ranks evaluate inside train");
}

void apply_rank_flags(const RankFlags& flags, train::Config& config) {
  if (!flags.engine.empty()) config.set("comm.backend", nlohmann::json(flags.engine).dump(), "--comm");
  if (flags.timeout_s > 0) config.set("comm.timeout_s", nlohmann::json(flags.timeout_s).dump(), "--comm-timeout");
  if (flags.start_timeout_s > 0) config.set("comm.start_timeout_s", nlohmann::json(flags.start_timeout_s).dump(), "--start-timeout");
}

Outcome launch(const World& world, const train::CommConfig& comm, const CommonOptions& common) {
  static_cast<void>(Faults::from_environment(world.rank, world.size));   // a malformed one ends the job before it begins
  Supervisor supervisor(world, comm, common.quiet);
  return supervisor.run();
}

}  // namespace detr::apps

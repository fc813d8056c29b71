#include "apps/world.h"

#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <regex>

#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::apps {
namespace {

/// The whole of a text as a number from lowest to highest, or nothing.
std::optional<std::int64_t> parse_number(const std::string& text, std::int64_t lowest, std::int64_t highest) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < lowest || value > highest) return std::nullopt;
  return value;
}

/// Environment variables; one that is empty counts as not set.
class Variables {
 public:
  explicit Variables(const std::function<const char*(const char*)>& variable) : variable_(variable) {}

  std::string text(const std::string& name) const {
    const char* value = variable_(name.c_str());
    return value ? value : "";
  }
  bool has(const std::string& name) const { return !text(name).empty(); }
  std::string needed(const std::string& name, const std::string& beside) const {
    const std::string value = text(name);
    if (value.empty()) throw ConfigError(beside, " is set but ", name, " is not: a set of variables that is not complete; set both or neither");
    return value;
  }
  int number(const std::string& name, std::int64_t lowest, std::int64_t highest, const std::string& beside) const {
    const std::string value = needed(name, beside);
    const auto parsed = parse_number(value, lowest, highest);
    if (!parsed) throw ConfigError(name, "=", escape_control(value), ": wanted a whole number from ", lowest, " to ", highest);
    return static_cast<int>(*parsed);
  }
  /// The number, or `otherwise` where it is not set.
  int number_or(const std::string& name, std::int64_t lowest, std::int64_t highest, int otherwise) const {
    return has(name) ? number(name, lowest, highest, name) : otherwise;
  }

 private:
  const std::function<const char*(const char*)>& variable_;
};

/// Sets host and port from HOST:PORT; an IPv6 address stands in brackets.
void set_meeting_point(World& world, const std::string& text, const std::string& name) {
  static const std::regex pattern(R"((\[([0-9A-Fa-f:.%\w]+)\]|([^\s\[\]:]+)):([0-9]{1,5}))");
  std::smatch parts;
  const bool matched = std::regex_match(text, parts, pattern);
  const auto port = matched ? parse_number(parts[4].str(), 1, 65535) : std::nullopt;
  if (!port) throw ConfigError(name, " ", escape_control(text), ": wanted HOST:PORT, such as node1:29400");
  world.host = parts[2].matched ? parts[2].str() : parts[3].str();
  world.port = static_cast<int>(*port);
}

/// --rdzv, or --master-addr with --master-port; empty if there is none.
std::string rendezvous_of(const RankFlags& flags) {
  const bool master = !flags.master_addr.empty() || flags.master_port != 0;
  if (!flags.rendezvous.empty() && master) throw ConfigError("--rdzv and --master-addr, --master-port exclude each other");
  if (!master) return flags.rendezvous;
  if (flags.master_addr.empty() || flags.master_port == 0) throw ConfigError("--master-addr and --master-port belong together");
  return concat(flags.master_addr.find(':') == std::string::npos ? flags.master_addr : "[" + flags.master_addr + "]", ":", flags.master_port);
}

/// The flag about a meeting point that is given; empty if none is.
std::string meeting_flag(const RankFlags& flags) {
  if (!flags.rendezvous.empty()) return "--rdzv";
  if (!flags.rendezvous_id.empty()) return "--rdzv-id";
  if (!flags.master_addr.empty()) return "--master-addr";
  return flags.master_port != 0 ? "--master-port" : "";
}

/// The warning where nothing about the job's token is secret; empty where only this host reaches the meeting point.
std::string open_to_all(const World& world) {
  if (is_loopback(world.host)) return {};
  return concat("without --rdzv-id NAME, the same on all hosts, any program that reaches ", meeting_point(world), " can take a rank's place");
}

/// What --rdzv-id adds to a token.
std::string with_id(const std::string& token, const RankFlags& flags) { return flags.rendezvous_id.empty() ? token : token + " " + flags.rendezvous_id; }

std::string gpus_text(int count) {
  if (count == 0) return "there is no GPU";
  return count == 1 ? "there is one GPU, cuda:0" : concat("there are ", count, " GPUs, cuda:0 to cuda:", count - 1);
}

/// The devices that --gpus names; `asked` is the flag with its value, as it was given.
std::vector<std::string> gpu_devices(const std::string& gpus, const std::string& asked, const Surroundings& surroundings) {
  const auto wrong = [&](const std::string& wanted) -> ConfigError { return ConfigError(escape_control(asked), ": wanted ", wanted); };
  std::vector<std::int64_t> indices;
  if (gpus.find(',') != std::string::npos) {
    for (std::size_t begin = 0; begin <= gpus.size();) {
      const std::size_t end = std::min(gpus.find(',', begin), gpus.size());
      const auto index = parse_number(gpus.substr(begin, end - begin), 0, 999);
      if (!index) throw wrong("a number of GPUs, all, or indices such as 0,1,3");
      indices.push_back(*index);
      begin = end + 1;
    }
    if (indices.size() > kMostLocalRanks) throw wrong(concat("at most ", kMostLocalRanks, " ranks"));
  } else {
    const auto count = gpus == "all" ? std::make_optional<std::int64_t>(surroundings.count_gpus()) : parse_number(gpus, 1, kMostLocalRanks);
    if (!count) throw wrong(concat("a number of GPUs from 1 to ", kMostLocalRanks, ", all, or indices such as 0,1,3"));
    for (std::int64_t i = 0; i < *count; ++i) indices.push_back(i);
  }
  const int there = surroundings.count_gpus();
  if (there == 0) throw DeviceError(asked, ": ", gpus_text(0), "; -d cpu --ranks N trains on CPUs");
  std::vector<std::string> devices;
  for (const std::int64_t index : indices) {
    if (index >= there) throw DeviceError(asked, ": there is no cuda:", index, "; ", gpus_text(there));
    devices.push_back(concat("cuda:", index));
  }
  return devices;
}

/// The indices of -d cuda:0,1; empty where it is no list.
std::string listed_gpus(const std::string& device) {
  static const std::regex list("cuda:([0-9]+(,[0-9]+)+)");
  std::smatch parts;
  return std::regex_match(device, parts, list) ? parts[1].str() : "";
}

/// The devices of this host's ranks: of --gpus, of -d with a list, or of --ranks with -d.
std::vector<std::string> devices_of(const RankFlags& flags, const std::string& device, const Surroundings& surroundings) {
  if (const std::string listed = listed_gpus(device); !listed.empty()) {
    if (!flags.gpus.empty() || flags.ranks != 0) throw ConfigError("-d ", device, " and ", flags.gpus.empty() ? "--ranks" : "--gpus", " exclude each other");
    return gpu_devices(listed, "-d " + device, surroundings);
  }
  if (!flags.gpus.empty()) {
    if (flags.ranks != 0) throw ConfigError("--gpus and --ranks exclude each other: --gpus starts one rank for each GPU, --ranks is for -d cpu");
    if (device != "auto" && device != "cuda") {
      throw ConfigError("--gpus and -d ", escape_control(device), " contradict each other: --gpus says which devices there are");
    }
    return gpu_devices(flags.gpus, "--gpus " + flags.gpus, surroundings);
  }
  if (flags.ranks < 1 || flags.ranks > kMostLocalRanks) throw ConfigError("--ranks ", flags.ranks, ": wanted a whole number from 1 to ", kMostLocalRanks);
  if (device == "cpu" || (device == "auto" && surroundings.count_gpus() == 0)) return std::vector<std::string>(static_cast<std::size_t>(flags.ranks), "cpu");
  if (device == "auto" || device == "cuda") return gpu_devices(std::to_string(flags.ranks), concat("--ranks ", flags.ranks), surroundings);
  if (flags.ranks == 1) return {device};
  throw ConfigError("--ranks ", flags.ranks, " and -d ", escape_control(device),
                    " contradict each other: --gpus 0,1 says which device each rank has, and -d cpu is for CPUs");
}

/// Of --gpus or --ranks: the launcher, or the one rank there is.
World own_launcher(const RankFlags& flags, const std::string& device, const Surroundings& surroundings, const Variables& variables) {
  const int world_size = variables.number_or("WORLD_SIZE", 1, kMostRanks, 1);
  if (world_size > 1) {
    throw ConfigError(!flags.gpus.empty() ? "--gpus" : flags.ranks != 0 ? "--ranks" : "-d " + device, " and WORLD_SIZE=", world_size,
                      " contradict each other: ranks are started by this command or by another launcher, not by both");
  }
  const int nodes = std::max(flags.nodes, 1);
  if (flags.node_rank >= nodes) throw ConfigError("--node-rank ", flags.node_rank, ": wanted less than --nnodes, which is ", nodes);
  if (nodes > 1 && flags.node_rank < 0) throw ConfigError("--nnodes ", nodes, " needs --node-rank, a number from 0 to ", nodes - 1);
  if (flags.nodes == 0 && flags.node_rank >= 0) throw ConfigError("--node-rank needs --nnodes, the number of hosts");
  if (const std::string flag = meeting_flag(flags); flags.nodes == 0 && !flag.empty()) throw ConfigError(flag, " needs --nnodes and --node-rank: ranks of one host meet without it");
  World world;
  const std::string meeting = rendezvous_of(flags);
  if (nodes > 1 && meeting.empty()) throw ConfigError("--nnodes ", nodes, " needs --rdzv HOST:PORT, the same on every host, where the host with --node-rank 0 listens");
  if (!meeting.empty()) set_meeting_point(world, meeting, "--rdzv");
  if (nodes > 1) {
    world.token = "rdzv " + flags.rendezvous_id;
    if (flags.rendezvous_id.empty()) world.warning = open_to_all(world);
  } else {
    world.host.clear();
    world.port = 0;
  }
  const std::vector<std::string> devices = devices_of(flags, device, surroundings);
  world.local_size = static_cast<int>(devices.size());
  world.size = world.local_size * nodes;
  if (world.size > kMostRanks) throw ConfigError(nodes, " hosts of ", world.local_size, " ranks: at most ", kMostRanks, " ranks in all");
  world.rank = std::max(flags.node_rank, 0) * world.local_size;
  world.device = devices[0];
  if (world.size > 1) {
    world.role = World::Role::launcher;
    world.devices = devices;
  }
  return world;
}

/// A rank that our launcher has started.
World own_rank(const Variables& variables) {
  const std::string beside = "DETRTRAIN_TOKEN";
  World world;
  world.role = World::Role::rank;
  world.token = variables.text(beside);
  world.size = variables.number("WORLD_SIZE", 2, kMostRanks, beside);
  world.rank = variables.number("RANK", 0, world.size - 1, beside);
  world.local_size = variables.number("LOCAL_WORLD_SIZE", 1, world.size, beside);
  world.local_rank = variables.number("LOCAL_RANK", 0, world.local_size - 1, beside);
  world.device = variables.needed("DETRTRAIN_DEVICE", beside);
  if (variables.has("DETRTRAIN_HUB")) set_meeting_point(world, variables.text("DETRTRAIN_HUB"), "DETRTRAIN_HUB");
  else world.control_descriptor = variables.number("DETRTRAIN_CONTROL_FD", 3, std::numeric_limits<int>::max(), beside);
  return world;
}

World torchrun_rank(const RankFlags& flags, const Variables& variables) {
  World world;
  world.size = variables.number("WORLD_SIZE", 1, kMostRanks, "RANK");
  world.rank = variables.number("RANK", 0, world.size - 1, "WORLD_SIZE");
  if (world.size == 1) return world;
  world.role = World::Role::rank;
  world.starter = World::Starter::torchrun;
  world.local_rank = variables.number("LOCAL_RANK", 0, kMostRanks - 1, "RANK");
  world.local_size = variables.number_or("LOCAL_WORLD_SIZE", 1, world.size, world.local_rank + 1);
  if (world.local_rank >= world.local_size) throw ConfigError("LOCAL_RANK=", world.local_rank, ": wanted less than LOCAL_WORLD_SIZE, which is ", world.local_size);
  const std::string run = variables.text("TORCHELASTIC_RUN_ID");
  world.token = with_id(concat("torchrun ", run, " ", variables.text("TORCHELASTIC_RESTART_COUNT")), flags);
  const bool constant = flags.rendezvous_id.empty() && (run.empty() || run == "none");   // torchrun's own where it is told none
  if (const std::string meeting = rendezvous_of(flags); !meeting.empty()) {
    set_meeting_point(world, meeting, "--rdzv");
    if (constant) world.warning = open_to_all(world);
    return world;
  }
  world.host = variables.needed("MASTER_ADDR", "WORLD_SIZE");
  // The store of torchrun's agent listens on the port itself.
  const int above = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True" ? 1 : 0;
  world.port = variables.number("MASTER_PORT", 1, 65535 - above, "WORLD_SIZE") + above;
  world.above_master_port = above == 1;
  if (constant) world.warning = open_to_all(world);
  return world;
}

std::string mpi_size_name(const Variables& variables) {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    if (variables.number_or(name, 0, std::numeric_limits<int>::max(), 0) > 1) return name;
  }
  return {};
}

std::string mpi_rank_name(const std::string& size_name) { return size_name == "PMI_SIZE" ? "PMI_RANK" : "OMPI_COMM_WORLD_RANK"; }

World slurm_rank(const RankFlags& flags, const Variables& variables) {
  const std::string beside = "SLURM_STEP_NUM_TASKS";
  World world;
  world.role = World::Role::rank;
  world.starter = World::Starter::slurm;
  world.size = variables.number(beside, 2, kMostRanks, beside);
  world.rank = variables.number("SLURM_PROCID", 0, world.size - 1, beside);
  world.local_rank = variables.number("SLURM_LOCALID", 0, world.size - 1, beside);
  const int on_node = tasks_of_node(variables.text("SLURM_STEP_TASKS_PER_NODE"), variables.number_or("SLURM_NODEID", 0, kMostRanks, 0));
  world.local_size = std::max(on_node, world.local_rank + 1);
  const std::string job = variables.needed("SLURM_JOB_ID", beside);
  const auto id = parse_number(job, 0, std::numeric_limits<std::int64_t>::max());
  if (!id) throw ConfigError("SLURM_JOB_ID=", escape_control(job), ": wanted a number");
  world.token = with_id(concat("slurm ", job, " ", variables.text("SLURM_STEP_ID")), flags);
  if (const std::string meeting = rendezvous_of(flags); !meeting.empty()) {
    set_meeting_point(world, meeting, "--rdzv");
  } else {
    world.host = first_host(variables.needed("SLURM_STEP_NODELIST", beside));
    world.port = static_cast<int>(20000 + *id % 20000);
  }
  return world;
}

World mpi_rank(const RankFlags& flags, const Variables& variables, const std::string& size_name, int parent) {
  const bool open_mpi = size_name == "OMPI_COMM_WORLD_SIZE";
  World world;
  world.role = World::Role::rank;
  world.starter = World::Starter::mpi;
  world.size = variables.number(size_name, 2, kMostRanks, size_name);
  world.rank = variables.number(mpi_rank_name(size_name), 0, world.size - 1, size_name);
  world.local_rank = variables.number(open_mpi ? "OMPI_COMM_WORLD_LOCAL_RANK" : "MPI_LOCALRANKID", 0, world.size - 1, size_name);
  world.local_size = variables.number_or(open_mpi ? "OMPI_COMM_WORLD_LOCAL_SIZE" : "MPI_LOCALNRANKS", world.local_rank + 1, world.size, world.local_rank + 1);
  world.token = "mpi " + flags.rendezvous_id;
  const std::string meeting = rendezvous_of(flags);
  if (!meeting.empty()) {
    set_meeting_point(world, meeting, "--rdzv");
  } else if (variables.has("MASTER_ADDR") || variables.has("MASTER_PORT")) {
    world.host = variables.needed("MASTER_ADDR", "MASTER_PORT");
    world.port = variables.number("MASTER_PORT", 1, 65535, "MASTER_ADDR");
  } else if (world.local_size == world.size) {
    // On one host all ranks have one parent, whose number no other job of this moment has.
    world.host = "127.0.0.1";
    world.port = 20000 + parent % 20000;
    world.token = with_id(concat("mpi ", parent), flags);
    return world;
  } else {
    throw ConfigError(size_name, "=", world.size, " on several hosts needs --rdzv HOST:PORT, or MASTER_ADDR and MASTER_PORT, where rank 0 listens");
  }
  if (flags.rendezvous_id.empty()) world.warning = open_to_all(world);
  return world;
}

/// A rank that something else has started, or the only process there is.
World foreign_rank(const RankFlags& flags, const Surroundings& surroundings, const Variables& variables) {
  if (variables.has("RANK") || variables.has("WORLD_SIZE")) return torchrun_rank(flags, variables);
  for (const auto& [rank, size] : {std::pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), std::pair("PMI_RANK", "PMI_SIZE")}) {
    if (variables.has(rank)) static_cast<void>(variables.needed(size, rank));
  }
  const int tasks = variables.number_or("SLURM_STEP_NUM_TASKS", 0, std::numeric_limits<int>::max(), 0);
  const std::string mpi = mpi_size_name(variables);
  if (tasks > 1) {
    const World world = slurm_rank(flags, variables);
    if (mpi.empty()) return world;
    const std::string rank_name = mpi_rank_name(mpi);
    const int size = variables.number(mpi, 2, kMostRanks, mpi), rank = variables.number(rank_name, 0, size - 1, mpi);
    if (world.size == size && world.rank == rank) return world;
    throw ConfigError("SLURM_STEP_NUM_TASKS=", world.size, " with SLURM_PROCID=", world.rank, " and ", mpi, "=", size, " with ", rank_name, "=", rank,
                      " contradict each other: unset those of the one that did not start the ranks");
  }
  return mpi.empty() ? World() : mpi_rank(flags, variables, mpi, surroundings.parent);
}

}  // namespace

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.starts_with("127.") || host.starts_with("::ffff:127."); }

std::string meeting_point(const World& world) {
  const bool numbers = world.host.find(':') != std::string::npos;
  return concat(numbers ? "[" : "", world.host, numbers ? "]" : "", ":", world.port, world.above_master_port ? " (MASTER_PORT + 1: torchrun listens on MASTER_PORT itself)" : "");
}

World find_world(const RankFlags& flags, const std::string& device, const Surroundings& surroundings) {
  const Variables variables(surroundings.variable);
  if (variables.has("DETRTRAIN_TOKEN")) return own_rank(variables);
  if (!flags.gpus.empty() || flags.ranks != 0 || !listed_gpus(device).empty()) return own_launcher(flags, device, surroundings, variables);
  if (flags.nodes > 1 || flags.node_rank >= 0) throw ConfigError(flags.nodes > 1 ? "--nnodes" : "--node-rank", " needs --gpus or --ranks, for the ranks of this host");
  World world = foreign_rank(flags, surroundings, variables);
  world.device = device;
  if (const std::string flag = meeting_flag(flags); world.role == World::Role::alone && !flag.empty()) {
    const auto set = [&](const char* name) { return variables.has(name); };
    const bool foreign = set("WORLD_SIZE") || set("SLURM_STEP_NUM_TASKS") || set("OMPI_COMM_WORLD_SIZE") || set("PMI_SIZE");
    if (!foreign) throw ConfigError(flag, " is for several ranks: --gpus or --ranks with --nnodes and --node-rank, or another launcher");
    World nowhere;   // one rank needs no meeting point, but a wrong one is told
    if (const std::string meeting = rendezvous_of(flags); !meeting.empty()) set_meeting_point(nowhere, meeting, "--rdzv");
  }
  if (world.role == World::Role::rank && device.starts_with("cuda:")) {
    throw ConfigError("-d ", escape_control(device), " with ", world.size, " ranks: the device is that of the local rank; use -d cuda");
  }
  return world;
}

std::string first_host(const std::string& list) {
  static const std::regex pattern(R"(([A-Za-z0-9_.-]*)(\[([0-9]+)[0-9,-]*\])?([A-Za-z0-9_.-]*)(,.*)?)");
  std::smatch parts;
  if (!std::regex_match(list, parts, pattern) || (parts[1].str() + parts[4].str()).empty()) {
    throw ConfigError("SLURM_STEP_NODELIST=", escape_control(list), ": wanted a list such as node[07-09,12]");
  }
  return parts[1].str() + parts[3].str() + parts[4].str();
}

int tasks_of_node(const std::string& list, int node) {
  static const std::regex entry(R"(([0-9]{1,6})(\(x([0-9]{1,6})\))?(,|$))");
  for (auto at = std::sregex_iterator(list.begin(), list.end(), entry); at != std::sregex_iterator(); ++at) {
    const int hosts = (*at)[3].matched ? std::stoi((*at)[3].str()) : 1;
    if (node < hosts) return std::stoi((*at)[1].str());
    node -= hosts;
  }
  return 0;
}

}  // namespace detr::apps

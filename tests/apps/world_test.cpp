// Who a process is: the table of flags and of what other launchers leave in the environment.
#include <map>

#include "apps/world.h"
#include "runtime/error.h"
#include "tests/support.h"

namespace detr::apps {
namespace {

using Role = World::Role;
using Starter = World::Starter;
using Variables = std::map<std::string, std::string>;

RankFlags with_gpus(const std::string& gpus) {
  RankFlags flags;
  flags.gpus = gpus;
  return flags;
}

RankFlags with_ranks(int ranks) {
  RankFlags flags;
  flags.ranks = ranks;
  return flags;
}

RankFlags at(const std::string& rendezvous) {
  RankFlags flags;
  flags.rendezvous = rendezvous;
  return flags;
}

World world_of(const Variables& variables, const RankFlags& flags = {}, const std::string& device = "auto", int gpus = 0) {
  Surroundings surroundings;
  surroundings.variable = [&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
  surroundings.count_gpus = [gpus] { return gpus; };
  surroundings.parent = 54321;
  return find_world(flags, device, surroundings);
}

template <class E = ConfigError>
void expect_refused(const std::string& text, const Variables& variables, const RankFlags& flags = {}, const std::string& device = "auto", int gpus = 0) {
  test::expect_throws<E>([&] { static_cast<void>(world_of(variables, flags, device, gpus)); }, text);
}

/// `variables` without one of them.
Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

const Variables kTorchrun = {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}, {"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "job7"}};
const Variables kSlurm = {{"SLURM_STEP_NUM_TASKS", "6"}, {"SLURM_PROCID", "4"}, {"SLURM_LOCALID", "1"}, {"SLURM_NODEID", "1"}, {"SLURM_STEP_TASKS_PER_NODE", "3(x2)"},
                          {"SLURM_STEP_NODELIST", "node[07-09,12]"}, {"SLURM_JOB_ID", "4000123"}, {"SLURM_STEP_ID", "2"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "3"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Variables kPmi = {{"PMI_SIZE", "4"}, {"PMI_RANK", "2"}, {"MPI_LOCALRANKID", "0"}};

TEST_CASE("world: one process", "[cpu]") {
  const World world = world_of({});
  CHECK(world.role == Role::alone);
  CHECK(world.size == 1);
  CHECK(world.device == "auto");
  CHECK(world_of({}, {}, "cuda:3", 8).device == "cuda:3");
  // One rank needs no launcher, whoever starts it.
  CHECK(world_of({}, with_ranks(1), "cpu").role == Role::alone);
  CHECK(world_of({}, with_ranks(1), "cpu").device == "cpu");
  CHECK(world_of({}, with_ranks(1), "cuda:3", 4).device == "cuda:3");
  CHECK(world_of({}, with_gpus("1"), "auto", 2).device == "cuda:0");
  CHECK(world_of({}, with_gpus("all"), "auto", 1).role == Role::alone);
  CHECK(world_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).role == Role::alone);
  CHECK(world_of({{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}}).role == Role::alone);
  CHECK(world_of({{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "4"}}).role == Role::alone);   // a batch script itself
  CHECK(world_of({{"OMPI_COMM_WORLD_SIZE", "1"}}).role == Role::alone);
  CHECK(world_of({{"RANK", ""}, {"WORLD_SIZE", ""}}).role == Role::alone);
}

TEST_CASE("world: our launcher", "[cpu]") {
  const auto devices = [](const World& world) { return world.devices; };
  using Devices = std::vector<std::string>;
  CHECK(world_of({}, with_ranks(3), "cpu").role == Role::launcher);
  CHECK(devices(world_of({}, with_ranks(3), "cpu", 8)) == Devices{"cpu", "cpu", "cpu"});
  CHECK(devices(world_of({}, with_ranks(2), "auto", 0)) == Devices{"cpu", "cpu"});
  CHECK(devices(world_of({}, with_ranks(2), "auto", 2)) == Devices{"cuda:0", "cuda:1"});
  CHECK(devices(world_of({}, with_ranks(2), "cuda", 2)) == Devices{"cuda:0", "cuda:1"});
  CHECK(devices(world_of({}, with_gpus("2"), "auto", 4)) == Devices{"cuda:0", "cuda:1"});
  CHECK(devices(world_of({}, with_gpus("all"), "cuda", 3)) == Devices{"cuda:0", "cuda:1", "cuda:2"});
  CHECK(devices(world_of({}, with_gpus("3,0,1"), "auto", 4)) == Devices{"cuda:3", "cuda:0", "cuda:1"});
  CHECK(devices(world_of({}, with_gpus("0,0"), "auto", 1)) == Devices{"cuda:0", "cuda:0"});
  CHECK(devices(world_of({}, {}, "cuda:0,2", 4)) == Devices{"cuda:0", "cuda:2"});
  CHECK(world_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}}, with_ranks(2), "cpu").size == 2);
  CHECK(world_of(kSlurm, with_ranks(2), "cpu").size == 2);   // the flags come first

  for (const int ranks : {-1, 257, 1000}) expect_refused("--ranks", {}, with_ranks(ranks), "cpu");
  for (const char* gpus : {"0", "-1", "x", "2x", "1000", "0,", ",1", "0,-1", "0,x", "1.5"}) expect_refused("--gpus", {}, with_gpus(gpus), "auto", 8);
  expect_refused("contradict", {}, with_gpus("2"), "cpu", 8);
  expect_refused("contradict", {}, with_ranks(2), "cuda:0", 8);
  expect_refused("WORLD_SIZE=4", {{"RANK", "0"}, {"WORLD_SIZE", "4"}}, with_ranks(2), "cpu");
  expect_refused("WORLD_SIZE", {{"WORLD_SIZE", "x"}}, with_ranks(2), "cpu");
  RankFlags both = with_gpus("2");
  both.ranks = 2;
  expect_refused("exclude each other", {}, both, "auto", 2);

  expect_refused<DeviceError>("there is no GPU", {}, with_gpus("2"));
  expect_refused<DeviceError>("there is no GPU", {}, with_gpus("all"));
  expect_refused<DeviceError>("there is no GPU", {}, with_ranks(2), "cuda");
  expect_refused<DeviceError>("there is no cuda:2; there are 2 GPUs, cuda:0 to cuda:1", {}, with_gpus("0,2"), "auto", 2);
  expect_refused<DeviceError>("there is one GPU", {}, with_gpus("2"), "auto", 1);
  expect_refused<DeviceError>("there are 2 GPUs", {}, with_ranks(4), "auto", 2);
  expect_refused<DeviceError>("-d cuda:0,1: there is no GPU", {}, {}, "cuda:0,1");
  expect_refused("-d cuda:0,1 and WORLD_SIZE=4", {{"RANK", "0"}, {"WORLD_SIZE", "4"}}, {}, "cuda:0,1", 2);
}

TEST_CASE("world: our launcher on several hosts", "[cpu]") {
  RankFlags flags = with_ranks(3);
  flags.nodes = 2;
  flags.node_rank = 1;
  flags.rendezvous = "node1:29400";
  flags.rendezvous_id = "blue";
  const World world = world_of({}, flags, "cpu");
  CHECK(world.role == Role::launcher);
  CHECK(world.size == 6);
  CHECK(world.rank == 3);
  CHECK(world.local_size == 3);
  CHECK(world.host == "node1");
  CHECK(world.port == 29400);
  CHECK(world.token == "rdzv blue");

  RankFlags master = flags;
  master.rendezvous.clear();
  master.master_addr = "fe80::1";
  expect_refused("belong together", {}, master, "cpu");
  master.master_port = 29401;
  CHECK(world_of({}, master, "cpu").host == "fe80::1");
  CHECK(world_of({}, master, "cpu").port == 29401);
  master.rendezvous = "node1:1";
  expect_refused("exclude each other", {}, master, "cpu");

  const auto refused = [&](const std::string& text, const auto& change) {
    RankFlags changed = flags;
    change(changed);
    expect_refused(text, {}, changed, "cpu");
  };
  refused("--rdzv", [](RankFlags& f) { f.rendezvous.clear(); });
  refused("--node-rank", [](RankFlags& f) { f.node_rank = -1; });
  refused("--node-rank 2", [](RankFlags& f) { f.node_rank = 2; });
  refused("--gpus or --ranks", [](RankFlags& f) { f.ranks = 0; });
  refused("at most 4096", [](RankFlags& f) { f.nodes = 5000; });
  for (const char* bad : {"node1", "node1:", ":1", "node1:0", "node1:65536", "node1:x", "no de:1", "[::1]", "::1:29400"}) refused("--rdzv", [&](RankFlags& f) { f.rendezvous = bad; });
  // One host needs no meeting point.
  RankFlags one = with_ranks(2);
  one.nodes = 1;
  CHECK(world_of({}, one, "cpu").port == 0);
  one.node_rank = 0;
  one.rendezvous = "node1:29400";   // a script's, for any number of hosts
  CHECK(world_of({}, one, "cpu").port == 0);
  one.rendezvous = "node1";
  expect_refused("--rdzv node1", {}, one, "cpu");

  CHECK(world.warning.empty());
  flags.rendezvous_id.clear();
  CHECK(world_of({}, flags, "cpu").warning.find("without --rdzv-id NAME, the same on all hosts, any program that reaches node1:29400") != std::string::npos);
  flags.rendezvous = "127.0.0.1:29400";
  CHECK(world_of({}, flags, "cpu").warning.empty());
}

TEST_CASE("world: flags about a meeting point that have no effect are told", "[cpu]") {
  const auto each = [](const std::string& flag, const auto& change) {
    for (const int ranks : {0, 1, 2}) {
      RankFlags flags = with_ranks(ranks);
      change(flags);
      INFO(flag << ", ranks " << ranks);
      expect_refused(flag, {}, flags, "cpu");
    }
  };
  each("--rdzv ", [](RankFlags& f) { f.rendezvous = "node1:29400"; });
  each("--rdzv-id ", [](RankFlags& f) { f.rendezvous_id = "x"; });
  each("--node-rank ", [](RankFlags& f) { f.node_rank = 0; });
  each("--master-addr ", [](RankFlags& f) { f.master_addr = "node1", f.master_port = 1; });
  each("--master-port ", [](RankFlags& f) { f.master_port = 1; });
  expect_refused("--nnodes", {}, at("node1:29400"), "cuda:0,1", 2);
  // A world of one that another launcher has started needs none, but a wrong one is told.
  const Variables one = {{"RANK", "0"}, {"WORLD_SIZE", "1"}};
  CHECK(world_of(one, at("node1:29400")).role == Role::alone);
  expect_refused("--rdzv node1", one, at("node1"));
}

TEST_CASE("world: a rank of our launcher", "[cpu]") {
  const Variables ours = {{"DETRTRAIN_TOKEN", "abc"}, {"DETRTRAIN_CONTROL_FD", "3"}, {"DETRTRAIN_DEVICE", "cuda:1"}, {"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}};
  const World world = world_of(ours, with_ranks(2), "cpu");
  CHECK(world.role == Role::rank);
  CHECK(world.starter == Starter::detrtrain);
  CHECK(world.rank == 1);
  CHECK(world.size == 4);
  CHECK(world.local_rank == 1);
  CHECK(world.local_size == 2);
  CHECK(world.device == "cuda:1");
  CHECK(world.token == "abc");
  CHECK(world.control_descriptor == 3);
  CHECK(!world.hub_at_rank_0());
  const World far = world_of(with(without(ours, "DETRTRAIN_CONTROL_FD"), "DETRTRAIN_HUB", "[::1]:29400"));
  CHECK(far.control_descriptor == -1);
  CHECK(far.host == "::1");
  CHECK(far.port == 29400);
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "DETRTRAIN_DEVICE", "DETRTRAIN_CONTROL_FD"}) expect_refused(name, without(ours, name));
  expect_refused("RANK=4", with(ours, "RANK", "4"));
}

TEST_CASE("world: torchrun", "[cpu]") {
  const World world = world_of(kTorchrun, {}, "cuda");
  CHECK(world.role == Role::rank);
  CHECK(world.starter == Starter::torchrun);
  CHECK(world.rank == 5);
  CHECK(world.size == 8);
  CHECK(world.local_rank == 1);
  CHECK(world.local_size == 4);
  CHECK(world.host == "node1");
  CHECK(world.port == 29500);
  CHECK(world.token == "torchrun job7 ");
  CHECK(world.device == "cuda");
  CHECK(world.hub_at_rank_0());
  CHECK(world_of(with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "True")).port == 29501);   // torchrun itself listens on the other
  CHECK(world_of(with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "False")).port == 29500);
  CHECK(world_of(kTorchrun, at("node2:1234")).host == "node2");
  CHECK(world_of(with(with(kTorchrun, "SLURM_STEP_NUM_TASKS", "2"), "SLURM_PROCID", "1")).starter == Starter::torchrun);   // srun torchrun
  CHECK(world_of(with(kTorchrun, "TORCHELASTIC_RESTART_COUNT", "1")).token != world.token);

  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) expect_refused(name, without(kTorchrun, name));
  for (const auto& [name, value] : Variables{{"RANK", "8"}, {"WORLD_SIZE", "0"}, {"LOCAL_RANK", "4"}, {"LOCAL_WORLD_SIZE", "9"}, {"MASTER_PORT", "0"}}) expect_refused(name + "=" + value, with(kTorchrun, name, value));
  for (const char* value : {"-1", "x", "5 ", "1e3", "99999999999999999999"}) expect_refused("RANK", with(kTorchrun, "RANK", value));
  expect_refused("MASTER_PORT", with(with(kTorchrun, "MASTER_PORT", "65535"), "TORCHELASTIC_USE_AGENT_STORE", "True"));
  RankFlags named = at("node2:1234");
  named.rendezvous_id = "blue";
  CHECK(world_of(kTorchrun, named).token == "torchrun job7  blue");
  CHECK(world.warning.empty());   // the run has an id
  CHECK(!world_of(with(kTorchrun, "TORCHELASTIC_RUN_ID", "none")).warning.empty());
  CHECK(world_of(with(with(kTorchrun, "TORCHELASTIC_RUN_ID", "none"), "MASTER_ADDR", "127.0.0.1")).warning.empty());
  CHECK(meeting_point(world) == "node1:29500");
  CHECK(meeting_point(world_of(with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "True"))) == "node1:29501 (MASTER_PORT + 1: torchrun listens on MASTER_PORT itself)");
  CHECK(meeting_point(world_of(kTorchrun, at("[::1]:5"))) == "[::1]:5");

  expect_refused("-d cuda:0", kTorchrun, {}, "cuda:0");   // all ranks of a host on one device
}

TEST_CASE("world: Slurm", "[cpu]") {
  const World world = world_of(kSlurm);
  CHECK(world.role == Role::rank);
  CHECK(world.starter == Starter::slurm);
  CHECK(world.rank == 4);
  CHECK(world.size == 6);
  CHECK(world.local_rank == 1);
  CHECK(world.local_size == 3);
  CHECK(world.host == "node07");
  CHECK(world.port == 20123);
  CHECK(world.token == "slurm 4000123 2");
  CHECK(world_of(kSlurm, at("login:7")).port == 7);
  CHECK(world_of(without(kSlurm, "SLURM_STEP_NODELIST"), at("login:7")).host == "login");
  CHECK(world_of(without(kSlurm, "SLURM_STEP_TASKS_PER_NODE")).local_size == 2);   // at least
  for (const char* name : {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"}) expect_refused(name, without(kSlurm, name));
  expect_refused("SLURM_PROCID=6", with(kSlurm, "SLURM_PROCID", "6"));
  expect_refused("SLURM_STEP_NODELIST", with(kSlurm, "SLURM_STEP_NODELIST", "[,]"));
  // srun gives MPI's variables as well.
  CHECK(world_of(with(with(kSlurm, "PMI_SIZE", "6"), "PMI_RANK", "4")).starter == Starter::slurm);
  expect_refused("contradict", with(with(kSlurm, "PMI_SIZE", "6"), "PMI_RANK", "3"));
  expect_refused("contradict", with(with(kSlurm, "OMPI_COMM_WORLD_SIZE", "12"), "OMPI_COMM_WORLD_RANK", "4"));
}

TEST_CASE("world: MPI", "[cpu]") {
  const World world = world_of(kOpenMpi);
  CHECK(world.role == Role::rank);
  CHECK(world.starter == Starter::mpi);
  CHECK(world.rank == 3);
  CHECK(world.size == 4);
  CHECK(world.local_rank == 3);
  CHECK(world.local_size == 4);
  CHECK(world.host == "127.0.0.1");   // one host
  CHECK(world.port == 20000 + 14321);
  CHECK(world.token == "mpi 54321");
  CHECK(world_of(kOpenMpi, at("node3:99")).host == "node3");
  const Variables spread = with(with(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_RANK", "1"), "OMPI_COMM_WORLD_LOCAL_SIZE", "2");
  expect_refused("--rdzv", spread);
  CHECK(world_of(with(with(spread, "MASTER_ADDR", "node1"), "MASTER_PORT", "7")).port == 7);
  expect_refused("MASTER_PORT", with(spread, "MASTER_ADDR", "node1"));
  CHECK(world_of(kPmi, at("node3:99")).rank == 2);
  CHECK(world_of(with(kPmi, "MPI_LOCALNRANKS", "4")).host == "127.0.0.1");
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"}) expect_refused(name, without(kOpenMpi, name));
  for (const char* name : {"PMI_RANK", "MPI_LOCALRANKID"}) expect_refused(name, without(kPmi, name), at("node3:99"));
  // Half a set is no single process.
  expect_refused("OMPI_COMM_WORLD_SIZE", {{"OMPI_COMM_WORLD_RANK", "1"}});
  expect_refused("PMI_SIZE", {{"PMI_RANK", "1"}});
  CHECK(world_of({{"SLURM_PROCID", "1"}}).role == Role::alone);   // of a batch script
  CHECK(!world_of(kPmi, at("node3:99")).warning.empty());
  CHECK(world_of(kOpenMpi).warning.empty());
  expect_refused("OMPI_COMM_WORLD_RANK=4", with(kOpenMpi, "OMPI_COMM_WORLD_RANK", "4"));
}

TEST_CASE("world: Slurm's lists", "[cpu]") {
  CHECK(first_host("node07") == "node07");
  CHECK(first_host("node07,node08") == "node07");
  CHECK(first_host("node[07-09,12]") == "node07");
  CHECK(first_host("node[7]") == "node7");
  CHECK(first_host("a-b.c[003-010]-ib,z") == "a-b.c003-ib");
  for (const char* bad : {"", ",", "[,]", "node[", "node[a]", "node]", "no de"}) test::expect_throws<ConfigError>([&] { static_cast<void>(first_host(bad)); }, "SLURM_STEP_NODELIST");
  CHECK(tasks_of_node("4", 0) == 4);
  CHECK(tasks_of_node("2(x3),1", 0) == 2);
  CHECK(tasks_of_node("2(x3),1", 2) == 2);
  CHECK(tasks_of_node("2(x3),1", 3) == 1);
  CHECK(tasks_of_node("2(x3),1", 4) == 0);
  CHECK(tasks_of_node("", 0) == 0);
}

}  // namespace
}  // namespace detr::apps

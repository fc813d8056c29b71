#pragma once
#include <functional>
#include <string>
#include <vector>

namespace detr::apps {

/// Flags about several ranks, as they were given.
struct RankFlags {
  std::string gpus;                 ///< a count, all, or a list such as 0,1,3
  int ranks = 0;                    ///< 0: not given
  int nodes = 0, node_rank = -1;    ///< 0, -1: not given
  std::string rendezvous;           ///< HOST:PORT
  std::string rendezvous_id;
  std::string master_addr;          ///< with master_port another way to give `rendezvous`
  int master_port = 0;
  // Of the configuration (comm.*), where they are given.
  std::string engine;               ///< auto, nccl or gloo; empty: not given
  double timeout_s = 0, start_timeout_s = 0;   ///< 0: not given
};

/// Ranks that one launcher starts, and ranks of a job.
constexpr int kMostLocalRanks = 256, kMostRanks = 4096;

/// Who this process is, among those of its job.
struct World {
  enum class Role {
    alone,      ///< the whole job
    launcher,   ///< starts the ranks of this host
    rank,       ///< one of several
  };
  /// What started the ranks.
  enum class Starter { detrtrain, torchrun, slurm, mpi };

  Role role = Role::alone;
  Starter starter = Starter::detrtrain;
  int rank = 0, size = 1;               ///< of a launcher: its first rank
  int local_rank = 0, local_size = 1;   ///< local_size: as far as known
  std::string device;                   ///< for -d: cpu, cuda:1; of a foreign starter auto or cuda as well: then the GPU of the local rank
  std::vector<std::string> devices;     ///< of a launcher: one a rank
  std::string token;                    ///< the job's own; empty in a launcher of one host, which makes one
  std::string host;                     ///< where the hub listens: empty where control_descriptor is the connection, or there is none
  int port = 0;
  bool above_master_port = false;       ///< port is MASTER_PORT + 1
  int control_descriptor = -1;          ///< the rank's end of the launcher's socket pair
  std::string warning;                  ///< for rank 0, or its launcher, to tell; empty: none

  /// The hub runs in the process of rank 0.
  bool hub_at_rank_0() const { return role == Role::rank && starter != Starter::detrtrain; }
};

/// What the answer depends on besides the flags.
struct Surroundings {
  std::function<const char*(const char*)> variable;   ///< getenv(3)
  std::function<int()> count_gpus;                    ///< that this process may use; called only where the answer depends on it
  int parent = 0;                                     ///< process id of the parent
};

/// A name or address that leads a host to itself.
bool is_loopback(const std::string& host);

/// HOST:PORT where the ranks meet, and why the port is not the one that was given.
std::string meeting_point(const World& world);

/// Who this process is, by the first of these that applies: variables of our own launcher; --gpus or --ranks; torchrun's RANK and
/// WORLD_SIZE; SLURM_STEP_NUM_TASKS > 1; OMPI_COMM_WORLD_SIZE or PMI_SIZE > 1. `device` is the value of -d.
/// Throws ConfigError naming the variables or flags where a set is not complete, a number is out of range, a flag has no effect or two contradict each other;
/// DeviceError where GPUs are asked for that are not there.
World find_world(const RankFlags& flags, const std::string& device, const Surroundings& surroundings);

/// The first host of a list as Slurm writes it: node07 of node[07-09,12],login. Throws ConfigError where it is none.
std::string first_host(const std::string& list);
/// Tasks on host `node` of a list such as 2(x3),1; 0 where it is none or has no such host.
int tasks_of_node(const std::string& list, int node);

}  // namespace detr::apps

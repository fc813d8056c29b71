#pragma once
#include <optional>
#include <string>
#include <vector>

#include "dist/hub.h"
#include "dist/messages.h"

namespace detr::dist {

/// The part of the hub that watches the ranks and says who failed first. It neither waits nor sends: events come in with their time, which never runs
/// backwards, and decide() is asked now and then.
///
/// Note [Who failed first]
/// A rank that fails takes others along: their collectives break, and some report that before the hub knows of the first. So a loss (a connection or
/// a process that ended without a word) and a failure of a rank's own outrank failures with kPeerCode, which wait: for 1 s, and on while some rank
/// is suspected of a stall, since it is the one that the others gave up on. A failure of a rank's own waits for a moment, too: where all ranks have the same one,
/// such as a loss that is not finite, it is nobody's, and whose word comes first is chance. A loss itself waits too: for a moment, so that a second rank lost at the
/// same time is listed, and where a child process is expected to be reaped, for that, which tells a crash from a kill.
///
/// Note [Who stands still]
/// A rank is stalled when it has given no sign for T, or has not moved for T while another waits. Waiting for other ranks is known (Waits::peers) or,
/// of a rank that gives work to a GPU, guessed: where a peer does not come, its kernels pile up behind the collective until the queue is full, and then it stands
/// still anywhere. So it counts as waiting as long as it has not moved, though it can also be the one that hangs. Of the ranks that can be meant, one that
/// gives no sign is blamed before one that stands still at other work, and that one before those that give work to GPUs; of these the one that is farthest
/// behind in the step, since it cannot have waited for those who are ahead of it.
class Judge {
 public:
  using Time = Clock::time_point;
  /// size ranks, of which all must greet within `start_timeout` of `now`; `timeout` is T.
  Judge(int size, Milliseconds start_timeout, Milliseconds timeout, Time now);

  /// The end of rank's process will be told by ended(), too.
  void expect_end(int rank);
  void greeted(int rank, long pid, std::string host, Time now);
  void beat(int rank, const Beat& beat, Time now);
  /// The rank says that it waits in an exchange from now on; it gets what it waits for, which is no sign of its own.
  void waits(int rank, const std::string& phase, Time now);
  void goes_on(int rank, Time now);
  void left(int rank, Time now);
  void failed(int rank, Failure failure, Time now);
  /// The connection has closed, or broken ("sent what is no message").
  void closed(int rank, const std::string& how, Time now);
  /// The process has ended, with the status of waitpid(2).
  void ended(int rank, int wait_status, bool out_of_memory, Time now);
  /// The job fails for another reason.
  void fail(const Failure& failure);
  /// The same with the text "rank 1: <what>; step 417, backward", and the further ranks named. Nothing for an empty list, or where a rank is lost.
  void blame(const std::vector<int>& ranks, const std::string& what);

  /// Looks at the clock. Lines worth a warning are added to `warnings`.
  void decide(Time now, std::vector<std::string>& warnings);
  const std::optional<Failure>& failure() const { return failure_; }
  bool all_left() const;
  const std::vector<RankState>& ranks() const { return states_; }

 private:
  struct Watch {
    std::uint64_t progress = 0, warned = ~std::uint64_t{0};   // `warned`: the progress at the last warning
    Time moved, sign, waits_since;        // the last move; the last sign of life; meaningful while the rank waits
    bool launching = false;               // gives work to a GPU: see Note [Who stands still]
    std::uint64_t position = 0;           // in the step
    bool expected = false;                // ended() will come
    std::optional<Failure> word;          // what the rank said itself
    std::optional<Time> lost_at;
    std::string lost_how;
    int lost_code = kPeerCode;
    bool lost_known = false;              // the process's status is in lost_how
  };
  void lose(int rank, const std::string& how, int code, bool known, Time now);
  void decide_own(Time now);
  void decide_lost(Time now);
  void decide_stalled(Time now, std::vector<std::string>& warnings);
  void decide_peers(Time now);
  bool silent(int rank, Time now) const;
  Clock::duration stalled_for(int rank, Time now) const;
  int suspect(Clock::duration stalled, Time now) const;
  bool gone(int rank) const;
  std::string named(int rank, const std::string& what) const;
  Failure with_name(Failure failure) const;

  Milliseconds timeout_, interval_;
  Time start_end_;
  std::vector<RankState> states_;
  std::vector<Watch> watches_;
  std::vector<int> lost_, own_, words_;   // in order; failures of a rank's own, and those with kPeerCode
  Time first_own_, first_word_;
  std::optional<Failure> failure_;
};

}  // namespace detr::dist

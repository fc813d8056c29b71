#include "dist/judge.h"

#include <sys/wait.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstring>
#include <tuple>

#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::dist {
namespace {

constexpr Milliseconds kSettle{100};   // in which a second loss or failure counts as one at the same time
constexpr Milliseconds kGrace{1000};   // for a root cause, and for a process to be reaped
constexpr std::chrono::seconds kNobodyMoves{60};   // at least, where no rank is known to wait for another

bool is_crash(int signal) {
  return signal == SIGSEGV || signal == SIGABRT || signal == SIGFPE || signal == SIGBUS || signal == SIGILL || signal == SIGTRAP || signal == SIGSYS;
}

std::string signal_text(int signal) {
  const char* name = sigabbrev_np(signal);
  return name == nullptr ? concat("killed by signal ", signal) : concat("killed by signal ", signal, " (SIG", name, ")");
}

/// Seconds, with one digit below ten.
std::string seconds_text(Clock::duration time) {
  const auto ms = std::chrono::duration_cast<Milliseconds>(time).count();
  return ms < 10000 ? concat(ms / 1000, ".", ms / 100 % 10, " s") : concat(ms / 1000, " s");
}

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

}  // namespace

Judge::Judge(int size, Milliseconds start_timeout, Milliseconds timeout, Time now)
    : timeout_(timeout), interval_(beat_interval(timeout)), start_end_(now + start_timeout), states_(at(size)), watches_(at(size)) {
  for (RankState& state : states_) state.phase = "start";
}

bool Judge::gone(int rank) const {
  const RankState& state = states_[at(rank)];
  return state.left || state.lost || state.failed;
}

std::string Judge::named(int rank, const std::string& what) const {
  return concat("rank ", rank, ": ", what, place_text(states_[at(rank)].step, states_[at(rank)].phase));
}

/// The failure of a rank's own words, which may name a rank already.
Failure Judge::with_name(Failure failure) const {
  const std::string& text = failure.text;
  const bool names_ranks = text.starts_with("rank ") || (text.starts_with("ranks ") && text.size() > 6 && std::isdigit(static_cast<unsigned char>(text[6])));
  if (!names_ranks) failure.text = named(failure.rank, text);
  return failure;
}

void Judge::expect_end(int rank) { watches_[at(rank)].expected = true; }

void Judge::greeted(int rank, long pid, std::string host, Time now) {
  RankState& state = states_[at(rank)];
  state.here = true;
  state.pid = pid;
  state.host = std::move(host);
  watches_[at(rank)].moved = watches_[at(rank)].sign = now;
}

void Judge::beat(int rank, const Beat& beat, Time now) {
  RankState& state = states_[at(rank)];
  Watch& watch = watches_[at(rank)];
  const bool moved = beat.progress != watch.progress;
  // The age says when it moved between two beats; never before what is known already.
  if (moved) watch.moved = std::max(watch.moved, now - Milliseconds(std::clamp<std::int64_t>(beat.age, 0, 1 << 30)));
  if (beat.waiting && (moved || !state.waiting)) watch.waits_since = moved ? watch.moved : now;
  watch.progress = beat.progress;
  watch.sign = now;
  watch.launching = beat.launching;
  watch.position = beat.position;
  state.waiting = beat.waiting;
  state.step = beat.step;
  state.phase = escape_control(beat.phase);
}

void Judge::waits(int rank, const std::string& phase, Time now) {
  goes_on(rank, now);
  watches_[at(rank)].sign = now;
  states_[at(rank)].waiting = true;
  states_[at(rank)].phase = escape_control(phase);
  watches_[at(rank)].waits_since = now;
}

void Judge::goes_on(int rank, Time now) {
  states_[at(rank)].waiting = false;
  watches_[at(rank)].launching = false;
  watches_[at(rank)].moved = now;
}

void Judge::left(int rank, Time now) {
  states_[at(rank)].left = true;
  states_[at(rank)].waiting = false;
  watches_[at(rank)].sign = now;
}

void Judge::failed(int rank, Failure failure, Time now) {
  RankState& state = states_[at(rank)];
  if (gone(rank)) return;
  state.failed = true;
  failure.rank = rank;
  failure.text = escape_control(failure.text);
  Watch& watch = watches_[at(rank)];
  if (failure.code != kPeerCode) {
    if (own_.empty()) first_own_ = now;
    own_.push_back(rank);
    state.waiting = false;
  } else {
    if (!state.waiting) watch.waits_since = now;
    state.waiting = true;   // for good: on whoever it gave up on
    if (words_.empty()) first_word_ = now;
    words_.push_back(rank);
  }
  watch.word = std::move(failure);
}

void Judge::lose(int rank, const std::string& how, int code, bool known, Time now) {
  RankState& state = states_[at(rank)];
  Watch& watch = watches_[at(rank)];
  if (!watch.lost_at) {
    watch.lost_at = now;
    lost_.push_back(rank);
  }
  state.lost = true;
  state.waiting = false;
  watch.lost_known = known;
  watch.lost_how = how;
  watch.lost_code = code;
}

void Judge::closed(int rank, const std::string& how, Time now) {
  if (!gone(rank)) lose(rank, how, kPeerCode, false, now);
}

void Judge::ended(int rank, int wait_status, bool out_of_memory, Time now) {
  RankState& state = states_[at(rank)];
  state.status = wait_status;
  if (state.failed || watches_[at(rank)].lost_known) return;
  if (WIFSIGNALED(wait_status)) {
    const int signal = WTERMSIG(wait_status), code = out_of_memory ? 4 : is_crash(signal) ? 1 : kPeerCode;
    lose(rank, concat(signal_text(signal), out_of_memory ? ", out of memory" : "", state.left ? ", after its end" : ""), code, true, now);
  } else if (WIFEXITED(wait_status) && !state.left) {
    const int code = WEXITSTATUS(wait_status);
    // Before its greeting a rank cannot say what is wrong; its exit code does.
    lose(rank, concat("ended with exit code ", code, " and no word"), state.here || code == 0 ? 1 : code, true, now);
  }
}

void Judge::fail(const Failure& failure) {
  if (!failure_) failure_ = failure;
}

void Judge::blame(const std::vector<int>& ranks, const std::string& what) {
  if (ranks.empty() || !lost_.empty() || !own_.empty()) return;   // what is being looked into explains this
  std::string text = named(ranks.front(), what);
  if (ranks.size() > 1) text += concat("; also ", ranks_text({ranks.begin() + 1, ranks.end()}));
  fail({ranks.front(), kPeerCode, text});
}

bool Judge::all_left() const {
  return std::ranges::all_of(states_, [](const RankState& state) { return state.left; });
}

void Judge::decide(Time now, std::vector<std::string>& warnings) {
  if (!failure_) decide_own(now);
  if (!failure_ && own_.empty()) decide_lost(now);
  const auto open = [&] { return !failure_ && own_.empty() && lost_.empty(); };
  if (open() && now >= start_end_) {
    std::vector<int> missing;
    for (int r = 0; r < static_cast<int>(states_.size()); ++r) {
      if (!states_[at(r)].here) missing.push_back(r);
    }
    if (!missing.empty()) fail({missing.front(), kPeerCode, concat(ranks_text(missing), ": did not come within the start timeout")});
  }
  if (open()) decide_stalled(now, warnings);
  if (open()) decide_peers(now);
}

void Judge::decide_own(Time now) {
  if (own_.empty()) return;
  const Failure& first = *watches_[at(own_.front())].word;
  const bool by_all = std::ranges::all_of(watches_, [&](const Watch& w) { return w.word && w.word->code == first.code && w.word->text == first.text; });
  if (by_all && states_.size() > 1) fail({-1, first.code, first.text});
  else if (now >= first_own_ + kSettle) fail(with_name(first));
}

void Judge::decide_lost(Time now) {
  if (lost_.empty()) return;
  const int first = lost_.front();
  const Watch& watch = watches_[at(first)];
  if (now < *watch.lost_at + kSettle || (watch.expected && !watch.lost_known && now < *watch.lost_at + kGrace)) return;
  std::string text = named(first, watch.lost_how);
  if (lost_.size() > 1) text += concat("; also lost: ", ranks_text({lost_.begin() + 1, lost_.end()}));
  fail({first, watch.lost_code, text});
}

bool Judge::silent(int rank, Time now) const { return now - watches_[at(rank)].sign > 2 * interval_; }

/// See Note [Who stands still].
Clock::duration Judge::stalled_for(int rank, Time now) const {
  const Watch& watch = watches_[at(rank)];
  if (gone(rank) || !states_[at(rank)].here) return {};
  Clock::duration others{};   // how long another rank has been waiting
  for (int r = 0; r < static_cast<int>(states_.size()); ++r) {
    const Watch& other = watches_[at(r)];
    if (r == rank) continue;
    if (states_[at(r)].waiting) others = std::max(others, now - other.waits_since);
    else if (other.launching && !gone(r)) others = std::max(others, other.sign - other.moved);
  }
  // One that beats is known not to have moved up to its last beat. One that has fallen silent may be stopped, whatever it and the others did before.
  const Clock::duration still = states_[at(rank)].waiting ? Clock::duration{} : watch.sign - watch.moved;
  const Clock::duration unheard = now - watch.sign - interval_;
  return std::max(std::min(others, still), unheard);
}

/// The rank to blame where some have been stalled for that long; -1 if there is none.
int Judge::suspect(Clock::duration stalled, Time now) const {
  using Key = std::tuple<int, std::int64_t, std::uint64_t, Time>;   // the least is blamed
  std::optional<std::pair<Key, int>> first;
  for (int r = 0; r < static_cast<int>(states_.size()); ++r) {
    const RankState& state = states_[at(r)];
    const Watch& watch = watches_[at(r)];
    const bool quiet = silent(r, now);
    const Time stopped = quiet ? watch.sign : watch.moved;
    if (gone(r) || !state.here || (state.waiting && !quiet) || now - stopped < stalled / 2) continue;
    const Key key = quiet ? Key{0, 0, 0, stopped} : watch.launching ? Key{2, state.step, watch.position, stopped} : Key{1, 0, 0, stopped};
    if (!first || key < first->first) first.emplace(key, r);
  }
  return first ? first->second : -1;
}

void Judge::decide_stalled(Time now, std::vector<std::string>& warnings) {
  Clock::duration longest{}, quietest = Clock::duration::max();
  bool all_busy = true;
  for (int r = 0; r < static_cast<int>(states_.size()); ++r) {
    longest = std::max(longest, stalled_for(r, now));
    quietest = std::min(quietest, now - watches_[at(r)].moved);
    all_busy = all_busy && states_[at(r)].here && !gone(r) && !states_[at(r)].waiting;
  }
  const int rank = suspect(longest, now);
  if (rank >= 0 && all_busy && quietest >= std::max<Clock::duration>(kNobodyMoves, 4 * timeout_))
    return fail({rank, kPeerCode, named(rank, concat("has not moved for ", seconds_text(quietest), ", nor has any other rank"))});
  if (rank < 0 || longest < timeout_ / 3) return;
  const std::string text = named(rank, silent(rank, now) ? concat("no sign of life for ", seconds_text(longest)) : concat("has not moved for ", seconds_text(longest), " while others wait"));
  if (longest >= timeout_) {
    fail({rank, kPeerCode, text});
  } else if (Watch& watch = watches_[at(rank)]; watch.warned != watch.progress) {
    watch.warned = watch.progress;
    warnings.push_back(text);
  }
}

void Judge::decide_peers(Time now) {
  if (words_.empty()) return;
  bool all_gone = true, suspect = false;
  for (int r = 0; r < static_cast<int>(states_.size()); ++r) {
    all_gone = all_gone && gone(r);
    suspect = suspect || stalled_for(r, now) >= std::min<Clock::duration>(kGrace, timeout_ / 3);
  }
  if (all_gone || (now >= first_word_ + kGrace && !suspect)) fail(with_name(*watches_[at(words_.front())].word));
}

}  // namespace detr::dist

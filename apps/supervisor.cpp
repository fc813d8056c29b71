#include "apps/supervisor.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>

#include "apps/rank.h"
#include "dist/remote_hub.h"
#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::apps {
namespace {

using dist::Clock;
using dist::Milliseconds;

constexpr Milliseconds kGrace{1000};    // from the failure to the kill
constexpr Milliseconds kAnswer{1500};   // for the hub on another host to say what failed
constexpr Milliseconds kPatience{10000};  // for a killed process to be gone
constexpr int kControlDescriptor = 3;   // in a rank

/// This process's arguments, as it was given them.
std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> arguments;
  for (std::size_t begin = 0; begin < all.size();) {
    const std::size_t end = std::min(all.find('\0', begin), all.size());
    arguments.push_back(all.substr(begin, end - begin));
    begin = end + 1;
  }
  if (arguments.empty()) throw Error("/proc/self/cmdline cannot be read");
  return arguments;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> all;
  for (std::string& word : words) all.push_back(word.data());
  all.push_back(nullptr);
  return all;
}

/// Raises the limit of open files as far as it goes; a rank talks to each other rank.
void raise_file_limit(int ranks) {
  const rlim_t needed = 64 + 4 * static_cast<rlim_t>(ranks);
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (limit.rlim_max < needed) throw ConfigError("the limit of open files is ", limit.rlim_max, ", and ", ranks, " ranks need ", needed, ": ulimit -n ", needed);
  limit.rlim_cur = limit.rlim_max;
  static_cast<void>(::setrlimit(RLIMIT_NOFILE, &limit));
}

/// Between fork and the new program: calls that are safe there, and no more.
[[noreturn]] void become_rank(pid_t launcher, int control, int output, const sigset_t& mask, char* const* arguments, char* const* environment) {
  static_cast<void>(::prctl(PR_SET_PDEATHSIG, SIGKILL));
  if (::getppid() != launcher) ::_exit(1);   // it died before the line above
  static_cast<void>(::setpgid(0, 0));
  static_cast<void>(::signal(SIGTTOU, SIG_IGN));   // not of the terminal's group, yet rank 0 writes there
  static_cast<void>(::sigprocmask(SIG_SETMASK, &mask, nullptr));
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  bool good = null >= 0 && ::dup2(null, STDIN_FILENO) >= 0;
  if (output >= 0) good = good && ::dup2(output, STDOUT_FILENO) >= 0 && ::dup2(output, STDERR_FILENO) >= 0;
  if (control >= 0 && control != kControlDescriptor) good = good && ::dup2(control, kControlDescriptor) >= 0;
  if (control >= 0) good = good && ::fcntl(kControlDescriptor, F_SETFD, 0) == 0;
  static_cast<void>(::close_range(static_cast<unsigned>(control >= 0 ? kControlDescriptor + 1 : kControlDescriptor), ~0U, 0));
  if (good) ::execve("/proc/self/exe", arguments, environment);
  constexpr std::string_view kText = "detrtrain: this rank cannot be started\n";
  static_cast<void>(!::write(STDERR_FILENO, kText.data(), kText.size()));
  ::_exit(1);
}

bool is_interruption(int code) { return code > 128; }

/// The number after a word at the start of a line of a file, or nothing.
std::optional<std::int64_t> counter(const std::string& file, const std::string& word) {
  std::ifstream in(file);
  std::string name;
  std::int64_t value = 0;
  while (in >> name >> value) {
    if (name == word) return value;
  }
  return std::nullopt;
}

}  // namespace

std::int64_t oom_kills() {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    for (const std::string& folder : {path, std::string()}) {   // in a container its own group is the root
      const std::string file = controllers.empty() ? "/sys/fs/cgroup" + folder + "/memory.events" : "/sys/fs/cgroup/memory" + folder + "/memory.oom_control";
      if (!controllers.empty() && controllers.find("memory") == std::string::npos) continue;
      if (const auto count = counter(file, "oom_kill")) return *count;
    }
  }
  return counter("/proc/vmstat", "oom_kill").value_or(0);
}

bool Supervisor::Child::killed() const { return !running && WIFSIGNALED(status); }
int Supervisor::Child::code() const { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }

Supervisor::Supervisor(const World& world, const train::CommConfig& comm, bool quiet) : world_(world), comm_(comm), quiet_(quiet) {
  DETR_CHECK(world.role == World::Role::launcher && world.devices.size() == static_cast<std::size_t>(world.local_size), "supervisor: this process is no launcher");
}

Supervisor::~Supervisor() {
  kill_all();
  const Time deadline = Clock::now() + kPatience;
  for (const Child& child : children_) {
    while (child.running && !give_up_at_ && ::waitpid(child.pid, nullptr, WNOHANG) == 0 && Clock::now() < deadline) std::this_thread::sleep_for(Milliseconds(1));
  }
  if (signals_.get() >= 0) {
    const timespec none{};
    while (::sigtimedwait(&caught_, nullptr, &none) > 0) {   // one that has been obeyed must not end the process after all
    }
    static_cast<void>(::sigprocmask(SIG_SETMASK, &before_, nullptr));
  }
}

/// Signals come by a descriptor from here on. One that is ignored stays ignored.
void Supervisor::catch_signals() {
  ::signal(SIGCHLD, SIG_DFL);   // ignored by the parent, it would take the children's ends away
  sigemptyset(&stops_);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) {
    struct sigaction old {};
    ::sigaction(signal, nullptr, &old);
    if (old.sa_handler != SIG_IGN) sigaddset(&stops_, signal);
  }
  caught_ = stops_;
  sigaddset(&caught_, SIGCHLD);
  static_cast<void>(::sigprocmask(SIG_BLOCK, &caught_, &before_));
  signals_ = FileHandle(::signalfd(-1, &caught_, SFD_NONBLOCK | SFD_CLOEXEC));
  if (signals_.get() < 0) throw Error("signalfd: ", std::strerror(errno));
}

std::vector<std::string> Supervisor::environment_of(int local_rank, bool has_socket) const {
  const std::string& device = world_.devices[static_cast<std::size_t>(local_rank)];
  std::vector<std::string> set = {concat("RANK=", world_.rank + local_rank), concat("WORLD_SIZE=", world_.size), concat("LOCAL_RANK=", local_rank),
                                  concat("LOCAL_WORLD_SIZE=", world_.local_size), "DETRTRAIN_TOKEN=" + token_, "DETRTRAIN_DEVICE=" + device};
  if (has_socket) set.push_back(concat("DETRTRAIN_CONTROL_FD=", kControlDescriptor));
  else set.push_back(concat("DETRTRAIN_HUB=[", world_.host, "]:", world_.port));
  if (device != "cpu" && std::count(world_.devices.begin(), world_.devices.end(), device) > 1) {
    // NCCL takes ranks on one GPU for a mistake unless each seems to be on a host of its own.
    set.push_back(concat("NCCL_HOSTID=", token_, "-", local_rank));
    if (world_.size == world_.local_size) set.emplace_back("NCCL_SOCKET_IFNAME=lo");
  }
  const auto is_set = [&](const std::string& variable) {
    const std::string name = variable.substr(0, variable.find('=') + 1);
    return std::any_of(set.begin(), set.end(), [&](const std::string& ours) { return ours.starts_with(name); });
  };
  std::vector<std::string> all = set;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    if (!is_set(text) && !text.starts_with("DETRTRAIN_CONTROL_FD=") && !text.starts_with("DETRTRAIN_HUB=")) all.push_back(text);
  }
  return all;
}

void Supervisor::start_child(int local_rank) {
  Child& child = children_.emplace_back();
  child.rank = world_.rank + local_rank;
  dist::Socket rank_end;
  if (world_.rank == 0) std::tie(child.hub_end, rank_end) = dist::socket_pair();
  FileHandle read_end, write_end;
  if (child.rank != 0) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw Error("pipe: ", std::strerror(errno));
    read_end = FileHandle(ends[0]);
    write_end = FileHandle(ends[1]);
    if (::fcntl(read_end.get(), F_SETFL, O_NONBLOCK) != 0) throw Error("pipe: ", std::strerror(errno));
  }
  std::vector<std::string> environment = environment_of(local_rank, rank_end.open());
  const std::vector<char*> variables = pointers(environment), words = pointers(arguments_);
  // A stop signal that reaches the rank before it can obey waits.
  sigset_t mask = before_;
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) {
    if (sigismember(&stops_, signal) != 0) sigaddset(&mask, signal);
  }
  const pid_t launcher = ::getpid();
  child.pid = ::fork();
  if (child.pid < 0) throw Error("rank ", child.rank, " cannot be started: fork: ", std::strerror(errno));
  if (child.pid == 0) become_rank(launcher, rank_end.descriptor(), write_end.get(), mask, words.data(), variables.data());
  child.running = true;
  static_cast<void>(::setpgid(child.pid, child.pid));   // here too: whichever comes first
  if (child.rank != 0) relay_.add(child.rank, std::move(read_end));
}

void Supervisor::start_hub(std::optional<dist::Listener> listener) {
  dist::HubOptions options;
  options.size = world_.size;
  options.token = token_;
  options.start_timeout = comm_.start_timeout();
  options.timeout = comm_.timeout();
  options.warn = [this](const std::string& line) {   // on the hub's thread, which must not wait for stderr
    const std::lock_guard lock(warnings_mutex_);
    warnings_.push_back("warning: " + escape_control(line));
    warned_.signal();
  };
  auto hub = std::make_unique<dist::Hub>(std::move(options));
  hub_ = hub.get();
  watcher_ = std::move(hub);
  for (Child& child : children_) hub_->attach(child.rank, std::move(child.hub_end));
  if (listener) hub_->listen(*std::move(listener));
}

/// The hub is in the launcher of rank 0's host.
void Supervisor::find_hub() {
  dist::RemoteHubOptions options;
  options.host = world_.host;
  options.port = world_.port;
  options.token = token_;
  options.first = world_.rank;
  options.size = world_.size;
  for (const Child& child : children_) options.pids.push_back(child.pid);
  options.start_timeout = comm_.start_timeout();
  options.timeout = comm_.timeout();
  watcher_ = std::make_unique<dist::RemoteHub>(std::move(options));
}

void Supervisor::start() {
  raise_file_limit(world_.size);
  arguments_ = own_arguments();
  oom_before_ = oom_kills();
  token_ = world_.token.empty() ? dist::random_token() : world_.token;
  std::optional<dist::Listener> listener;
  if (world_.rank == 0 && world_.port != 0) listener = listen_for_ranks(world_);
  catch_signals();
  children_.reserve(world_.devices.size());
  for (int i = 0; i < world_.local_size; ++i) start_child(i);
  if (world_.rank == 0) start_hub(std::move(listener));
  else find_hub();
  if (world_.rank == 0 && !world_.warning.empty()) relay_.say("warning: " + escape_control(world_.warning));
  if (quiet_) return;
  if (world_.rank == 0 && world_.port != 0) relay_.say("ranks meet at " + meeting_point(world_));
  for (std::size_t i = 0; i < children_.size(); ++i) {
    const std::string& device = world_.devices[i];
    relay_.say(concat("rank ", children_[i].rank, " pid ", children_[i].pid, " device ", device));
    const auto here = world_.devices.begin() + static_cast<std::ptrdiff_t>(i);
    if (device != "cpu" && std::find(world_.devices.begin(), here, device) != here) {
      relay_.say(concat("warning: rank ", children_[i].rank, " shares ", device, " with another rank: right, but slow"));
    }
  }
}

void Supervisor::read_signals() {
  signalfd_siginfo info{};
  while (::read(signals_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    if (info.ssi_signo != SIGCHLD) stop(static_cast<int>(info.ssi_signo));
  }
}

void Supervisor::say_warnings() {
  warned_.clear();
  const std::lock_guard lock(warnings_mutex_);
  for (const std::string& line : warnings_) relay_.say(line);
  warnings_.clear();
}

void Supervisor::stop(int signal) {
  if (stop_signal_ != 0) {
    stopped_twice_ = true;
    stop_signal_ = signal;
    kill_at_ = Clock::now();
    return;
  }
  stop_signal_ = signal;
  watcher_->stop();
}

std::string Supervisor::second_signal_text() const { return concat("ended at once by a second signal (SIG", sigabbrev_np(stop_signal_), ")"); }

void Supervisor::reap() {
  for (Child& child : children_) {
    if (!child.running || ::waitpid(child.pid, &child.status, WNOHANG) != child.pid) continue;
    child.running = false;
    const bool out_of_memory = WIFSIGNALED(child.status) && WTERMSIG(child.status) == SIGKILL && oom_kills() > oom_before_;
    watcher_->child_ended(child.rank, child.status, out_of_memory);
    if (!hub_) note_failure(child, out_of_memory);
  }
}

/// What is known here of a failure that the hub on another host judges, if it can be reached.
void Supervisor::note_failure(const Child& child, bool out_of_memory) {
  const int code = child.code();
  if (own_failure_ || code == kDone || code == kStoppedAndSaved || is_interruption(code)) return;
  const int signal = child.killed() ? WTERMSIG(child.status) : 0;
  const bool outside = signal == SIGKILL || signal == SIGTERM || signal == SIGINT || signal == SIGHUP;
  own_failure_ = {child.rank, signal == 0 ? code : out_of_memory ? kMemory : outside ? kCommunication : kBug,
                  signal == 0 ? concat("rank ", child.rank, ": ended with exit code ", code) : concat("rank ", child.rank, ": killed by signal ", signal)};
  own_counts_at_ = Clock::now() + kAnswer;
}

void Supervisor::look(Time now) {
  if (!failure_) failure_ = watcher_->failure();
  if (own_counts_at_ && now >= *own_counts_at_ && !failure_) {
    failure_ = own_failure_;
    kill_at_ = now;   // the others have had their time
  }
  const bool running = std::any_of(children_.begin(), children_.end(), [](const Child& child) { return child.running; });
  if (failure_ && !kill_at_) kill_at_ = now + kGrace;
  // All have said goodbye: what is left is to end, which a driver may take its time for.
  if (!kill_at_ && running && watcher_->done()) kill_at_ = now + std::max<Milliseconds>(comm_.timeout(), kPatience);
  if (kill_at_ && now >= *kill_at_ && running && !give_up_at_) {
    kill_all();
    // Before anybody can take the killed ranks for the reason.
    if (stopped_twice_) watcher_->fail({world_.rank, 128 + stop_signal_, second_signal_text()});
    give_up_at_ = now + kPatience;
  }
}

/// So that all launchers give one exit code; those of other hosts wait for this one's word.
bool Supervisor::all_ends_known() const {
  const std::vector<dist::RankState> ranks = hub_->ranks();
  return std::all_of(ranks.begin(), ranks.end(), [](const dist::RankState& rank) { return rank.status.has_value(); });
}

bool Supervisor::over() {
  const bool running = std::any_of(children_.begin(), children_.end(), [](const Child& child) { return child.running; });
  if (give_up_at_ && Clock::now() >= *give_up_at_) return true;
  if (running) return false;
  if (failure_ || stopped_twice_) return true;
  // A rank that was killed after its goodbye is a failure that the hub tells.
  if (!watcher_->done() || std::any_of(children_.begin(), children_.end(), [](const Child& child) { return child.killed(); })) return false;
  if (!hub_ || world_.size == world_.local_size || all_ends_known()) return true;
  if (!ends_at_) ends_at_ = Clock::now() + kPatience;
  return Clock::now() >= *ends_at_;
}

void Supervisor::kill_all() {
  for (const Child& child : children_) {
    if (!child.running) continue;
    static_cast<void>(::kill(-child.pid, SIGKILL));
    static_cast<void>(::kill(child.pid, SIGKILL));
  }
}

Outcome Supervisor::run() {
  start();
  while (true) {
    reap();
    const Time now = Clock::now();
    look(now);
    if (over()) break;
    std::vector<pollfd> wanted{{signals_.get(), POLLIN, 0}, {warned_.descriptor(), POLLIN, 0}};
    const bool told = failure_ || watcher_->done();   // the descriptor stays readable then
    if (!told) wanted.push_back({watcher_->descriptor(), POLLIN, 0});
    relay_.add_polls(wanted);
    Time next = Time::max();
    if (kill_at_ && !give_up_at_) next = *kill_at_;
    if (give_up_at_) next = *give_up_at_;
    if (own_counts_at_ && !failure_) next = std::min(next, *own_counts_at_);
    if (told) next = std::min(next, now + Milliseconds(50));
    static_cast<void>(::poll(wanted.data(), wanted.size(), next == Time::max() ? -1 : dist::poll_time(next)));
    read_signals();
    relay_.pump();
    say_warnings();
  }
  Outcome end = outcome();
  if (!end.error.empty() && hub_) hub_->fail({world_.rank, end.code, end.error});   // the launchers of other hosts say the same
  hub_ = nullptr;
  watcher_.reset();   // sends what it has to tell
  say_warnings();
  relay_.finish(Clock::now() + Milliseconds(500));
  return end;
}

/// Rank and exit code of the ranks whose end is known, of all hosts where the hub is here; -1: a signal.
std::vector<std::pair<int, int>> Supervisor::codes() const {
  std::vector<std::pair<int, int>> all;
  if (!hub_) {
    for (const Child& child : children_) all.emplace_back(child.rank, child.code());
    return all;
  }
  const std::vector<dist::RankState> ranks = hub_->ranks();
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r].status) all.emplace_back(static_cast<int>(r), WIFEXITED(*ranks[r].status) ? WEXITSTATUS(*ranks[r].status) : -1);
  }
  return all;
}

Outcome Supervisor::outcome() {
  Outcome outcome;
  const auto stuck = std::find_if(children_.begin(), children_.end(), [](const Child& child) { return child.running; });
  if (stuck != children_.end() && !failure_ && !stopped_twice_) {
    failure_ = {stuck->rank, kCommunication, concat("rank ", stuck->rank, ": its process ", stuck->pid, " cannot be ended")};
  }
  if (stopped_twice_) {
    outcome.code = 128 + stop_signal_;
    outcome.error = second_signal_text();
    return outcome;
  }
  if (failure_) {
    outcome.code = failure_->code;
    outcome.error = failure_->text;
    return outcome;
  }
  // Each rank has said goodbye, and rank 0 what there was to say.
  outcome.reported = true;
  const std::vector<std::pair<int, int>> ends = codes();
  outcome.code = ends.front().second;
  if (std::all_of(ends.begin(), ends.end(), [](const auto& end) { return is_interruption(end.second); })) {
    if (stop_signal_ != 0) outcome.code = 128 + stop_signal_;   // the ranks do not know which signal it was
    return outcome;
  }
  const bool equal = std::all_of(ends.begin(), ends.end(), [&](const auto& end) { return end.second == outcome.code; });
  if (equal) return outcome;
  const auto other = std::find_if(ends.begin(), ends.end(), [](const auto& end) { return end.second != kDone && end.second != kStoppedAndSaved; });
  outcome.reported = false;
  outcome.code = other == ends.end() ? static_cast<int>(kBug) : other->second < 0 ? static_cast<int>(kCommunication) : other->second;
  outcome.error = "the ranks ended with different exit codes:";
  for (const auto& [rank, code] : ends) outcome.error += concat(" rank ", rank, ": ", code, ";");
  outcome.error.pop_back();
  return outcome;
}

}  // namespace detr::apps

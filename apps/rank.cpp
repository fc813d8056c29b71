#include "apps/rank.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string_view>
#include <vector>

#include "dist/hub.h"
#include "runtime/error.h"
#include "runtime/faults.h"
#include "runtime/gpus.h"
#include "runtime/text.h"
#include "runtime/thread_pool.h"

namespace detr::apps {
namespace {

using dist::Clock;
using dist::Milliseconds;

/// This process as a rank. Signal handlers, the control's thread and the end of main() need it, so it is never destroyed.
struct Membership {
  World world;
  std::string verb;
  bool json = false;
  Milliseconds timeout{};
  std::unique_ptr<dist::Hub> hub;   // of rank 0, where no launcher of ours has it
  std::shared_ptr<dist::Control> control;
  std::mutex mutex;
  std::vector<std::function<void()>> at_failure;
};
Membership* member = nullptr;
std::atomic<dist::Control*> signalled{nullptr};   // for the handlers

void write_text(int descriptor, std::string_view text) noexcept { static_cast<void>(!::write(descriptor, text.data(), text.size())); }

/// A line of text in memory of its own.
class Line {
 public:
  void add(std::string_view part) noexcept {
    const std::size_t count = std::min(part.size(), sizeof text_ - 1 - length_);
    std::copy_n(part.data(), count, text_ + length_);
    length_ += count;
  }
  void add(std::int64_t number) noexcept {   // >= 0
    char digits[20];
    char* at = digits + sizeof digits;
    do *--at = static_cast<char>('0' + number % 10);
    while ((number /= 10) != 0);
    add({at, static_cast<std::size_t>(digits + sizeof digits - at)});
  }
  void write() noexcept {
    text_[length_] = '\n';
    write_text(STDERR_FILENO, {text_, length_ + 1});
  }

 private:
  char text_[512];
  std::size_t length_ = 0;
};

/// The last words of a process that crashes: write(2) and nothing that could wait or allocate.
void write_last_words(std::string_view what, int number, std::string_view more) noexcept {
  Line line;
  line.add("rank ");
  line.add(std::int64_t{member->world.rank});
  line.add(what);
  if (number >= 0) line.add(std::int64_t{number});
  line.add(more.substr(0, 400));   // so that the place fits
  if (const dist::Control* control = signalled.load()) {
    std::array<char, 64> phase;
    const std::int64_t step = control->place(phase);
    line.add("; ");
    if (step >= 0) {
      line.add("step ");
      line.add(step);
      line.add(", ");
    }
    line.add(phase.data());
  }
  line.write();
}

extern "C" void on_crash(int signal) {
  write_last_words(": crashed by signal ", signal, {});
  static_cast<void>(::raise(signal));   // once more, with its default action
}

extern "C" void on_stop(int) {
  if (dist::Control* control = signalled.load()) control->wish_stop();
}

[[noreturn]] void on_terminate() {
  std::string_view what = "an exception of an unknown type";
  if (const std::exception_ptr error = std::current_exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      what = known.what();
      write_last_words(": nobody caught: ", -1, what);
      std::abort();
    } catch (...) {
    }
  }
  write_last_words(": nobody caught: ", -1, what);
  std::abort();
}

void install_handlers() {
  std::set_terminate(on_terminate);
  static char stack[32768];   // a crash may be for want of stack
  stack_t alternative{};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  static_cast<void>(::sigaltstack(&alternative, nullptr));
  struct sigaction crash {};
  crash.sa_handler = on_crash;
  crash.sa_flags = SA_ONSTACK | static_cast<int>(SA_RESETHAND) | SA_NODEFER;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) ::sigaction(signal, &crash, nullptr);
  struct sigaction stop {};
  stop.sa_handler = on_stop;
  stop.sa_flags = SA_RESTART;
  sigset_t waiting;   // the launcher has blocked them for a process that cannot obey yet
  sigemptyset(&waiting);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) {
    struct sigaction old {};
    ::sigaction(signal, nullptr, &old);
    if (old.sa_handler == SIG_IGN) continue;
    ::sigaction(signal, &stop, nullptr);
    sigaddset(&waiting, signal);
  }
  static_cast<void>(::pthread_sigmask(SIG_UNBLOCK, &waiting, nullptr));
}

void write_error(const dist::Failure& failure) {
  const std::string text = escape_control(failure.text);
  write_text(STDERR_FILENO, concat(member->world.rank == 0 ? "" : concat("[rank ", member->world.rank, "] "), "detrtrain: error: ", text, "\n"));
  if (member->json && member->world.rank == 0) write_text(STDOUT_FILENO, error_json(member->verb, failure.code, text) + "\n");
}

/// The job has failed; on the control's thread.
void on_abort(const dist::Failure& failure) {
  {
    const std::lock_guard lock(member->mutex);
    for (const auto& action : member->at_failure) action();
  }
  const World& world = member->world;
  const bool hub_lost = failure.rank < 0;
  if (world.starter != World::Starter::detrtrain) {   // else the launcher says it
    member->hub.reset();   // sends what it has to tell the others
    if (world.rank == 0 || hub_lost) write_error(hub_lost ? dist::Failure{0, failure.code, "rank 0 lost: " + failure.text} : failure);
  }
  ::_exit(failure.code);
}

}  // namespace

CommonOptions rank_options(const World& world, const CommonOptions& common) {
  CommonOptions own = common;
  own.device = world.device;
  if (world.role != World::Role::rank) return own;
  if (world.starter != World::Starter::detrtrain && world.device != "cpu") {
    const int count = static_cast<int>(list_gpus().size());
    // Where a launcher shows each rank its own GPU alone, that is the first.
    const int index = count == 1 && std::getenv("CUDA_VISIBLE_DEVICES") != nullptr ? 0 : world.local_rank;
    if (index >= count && (count > 0 || world.device == "cuda")) {
      throw DeviceError("rank ", world.rank, ": local rank ", world.local_rank, " has no GPU; there are ", count, ", and -d cpu is for CPUs");
    }
    own.device = count == 0 ? "cpu" : concat("cuda:", index);
  }
  if (own.threads == 0) own.threads = std::max(1, default_threads() / world.local_size);
  own.quiet = own.quiet || world.rank != 0;
  own.json = own.json && world.rank == 0;
  return own;
}

dist::Listener listen_for_ranks(const World& world) {
  try {
    if (is_loopback(world.host)) return dist::Listener(world.host, world.port);
    try {
      return dist::Listener("::", world.port);   // takes IPv4 too
    } catch (const CommError&) {
      return dist::Listener("0.0.0.0", world.port);
    }
  } catch (const CommError& error) {
    throw ConfigError("the meeting point of the ranks, ", meeting_point(world), ": ", error.what(), "; another rank 0 of this job, or another program; --rdzv HOST:PORT names another one");
  }
}

std::shared_ptr<dist::Control> join_job(const World& world, const train::CommConfig& comm, const CommonOptions& common, const std::string& verb) {
  DETR_CHECK(member == nullptr && world.role == World::Role::rank, "join_job: this process is no rank, or is one already");
  member = new Membership;
  member->world = world;
  member->verb = verb;
  member->json = common.json;
  member->timeout = comm.timeout();
  if (world.hub_at_rank_0() && world.rank == 0) {
    dist::HubOptions options;
    options.size = world.size;
    options.token = world.token;
    options.start_timeout = comm.start_timeout();
    options.timeout = member->timeout;
    options.warn = [](const std::string& line) { write_text(STDERR_FILENO, "warning: " + escape_control(line) + "\n"); };
    dist::Listener listener = listen_for_ranks(world);
    member->hub = std::make_unique<dist::Hub>(std::move(options));
    member->hub->listen(std::move(listener));
    if (!world.warning.empty()) write_text(STDERR_FILENO, concat("warning: ", escape_control(world.warning), "\n"));
    if (!common.quiet) write_text(STDERR_FILENO, concat("ranks meet at ", meeting_point(world), "\n"));
  }
  dist::ControlOptions options;
  options.rank = world.rank;
  options.size = world.size;
  options.token = world.token;
  options.start_timeout = comm.start_timeout();
  options.timeout = member->timeout;
  options.on_abort = on_abort;
  member->control = world.control_descriptor >= 0 ? dist::Control::over(dist::Socket::adopt(world.control_descriptor), std::move(options))
                                                  : dist::Control::connect(world.host, world.port, std::move(options));
  signalled.store(member->control.get());
  install_handlers();
  if (world.starter != World::Starter::detrtrain && !common.quiet) {
    write_text(STDERR_FILENO, concat("rank ", world.rank, " pid ", ::getpid(), " device ", rank_options(world, common).device, "\n"));
  }
  return member->control;
}

void at_failure(std::function<void()> action) {
  if (member == nullptr) return;
  const std::lock_guard lock(member->mutex);
  member->at_failure.push_back(std::move(action));
}

void fail_rank(int code, const std::string& text) noexcept {
  if (member == nullptr || !member->control) return;
  try {
    const std::string line = escape_control(text);
    member->control->fail(code, line);
    // One whose failure may be the consequence of another's waits for the hub's judgement, with its connections open: closed, they would make its
    // neighbours blame it. on_abort() ends the process.
    static_cast<void>(member->control->verdict(Clock::now() + (code == dist::kPeerCode ? member->timeout : Milliseconds(0)) + Milliseconds(2000)));
  } catch (const std::exception&) {   // no memory for words: the exit code has to do
  }
  ::_exit(code);
}

int leave_job(int code) noexcept {
  if (member == nullptr || !member->control) return code;
  member->control->leave();
  signalled.store(nullptr);
  member->control.reset();
  if (!member->hub) return code;
  // The others may still be at their last work.
  const Clock::time_point deadline = Clock::now() + member->timeout;
  pollfd told{member->hub->descriptor(), POLLIN, 0};
  while (::poll(&told, 1, dist::poll_time(deadline)) < 0 && errno == EINTR) {
  }
  const std::optional<dist::Failure> failure = member->hub->failure();
  member->hub.reset();
  if (!failure) return code;
  write_text(STDERR_FILENO, concat("detrtrain: error: ", escape_control(failure->text), "\n"));
  return failure->code;
}

bool prints_results() { return member == nullptr || member->world.rank == 0; }

bool has_launcher() { return std::getenv("DETRTRAIN_TOKEN") != nullptr; }

std::string error_json(const std::string& verb, int code, const std::string& text) {
  const nlohmann::json object = {{"command", verb}, {"version", version_text()}, {"exit", code}, {"error", text}};
  return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);   // names from data may be no UTF-8
}

}  // namespace detr::apps

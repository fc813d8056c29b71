// The launcher and its watch over the ranks, with a program that does nothing but agree on steps (job.cpp), and with the binary itself.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <regex>
#include <sstream>
#include <thread>

#include "apps/launch.h"
#include "runtime/error.h"
#include "runtime/random.h"
#include "tests/apps/process.h"

namespace detr::test {
namespace {

using Words = std::vector<std::string>;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// What a slow machine may take where the promise is two seconds.
constexpr milliseconds kSoon{5000};

Setting job_setting(std::map<std::string, std::string> variables = {}) { return {DETR_JOB_BINARY, std::move(variables), -1}; }

/// A job on this machine.
class Job {
 public:
  explicit Job(int ranks, const Words& flags = {}, const std::string& fault = "")
      : ranks_(ranks), process_(Words{"--ranks", std::to_string(ranks), "-d", "cpu", "--comm-timeout", "2"} + flags, Detrtrain::Streams::kept,
                                job_setting(fault.empty() ? std::map<std::string, std::string>{} : std::map<std::string, std::string>{{"DETRTRAIN_FAULT", fault}})) {}

  Detrtrain& process() { return process_; }
  /// The process of a rank, once it has been started.
  pid_t pid(int rank) {
    const std::regex line(concat("(^|\n)rank ", rank, " pid ([0-9]+) device cpu\n"));
    std::smatch parts;
    std::string text;
    process_.wait_until([&] { return std::regex_search(text = process_.err(), parts, line); });
    return static_cast<pid_t>(std::stol(parts[2]));
  }
  std::vector<pid_t> pids() {
    std::vector<pid_t> all;
    for (int rank = 0; rank < ranks_; ++rank) all.push_back(pid(rank));
    return all;
  }
  void wait_until_it_runs() {
    process_.wait_until([&] {
      const std::string text = process_.err();
      for (int rank = 0; rank < ranks_; ++rank) {
        if (text.find(concat("rank ", rank, " of ", ranks_, " on cpu runs\n")) == std::string::npos) return false;
      }
      return true;
    });
  }

 private:
  int ranks_;
  Detrtrain process_;
};

/// A process that is there and has not ended (one that nobody has waited for counts as ended).
bool is_alive(pid_t pid) {
  std::istringstream stat(read_text(concat("/proc/", pid, "/stat")));
  std::string id, name, state;
  stat >> id >> name >> state;
  return !state.empty() && state != "Z" && state != "X";
}

bool all_end_within(const std::vector<pid_t>& pids, milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (std::any_of(pids.begin(), pids.end(), is_alive)) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

/// Waits for the job's end: the code, one error, in the last line of stderr, that starts with `error`, in time, and nobody left.
void expect_failure(Job& job, const std::vector<pid_t>& pids, int code, const std::string& error, milliseconds limit = kSoon) {
  const auto start = Clock::now();
  const ProcessResult result = job.process().wait();
  const auto took = std::chrono::duration_cast<milliseconds>(Clock::now() - start);
  INFO("wanted: " << error << "\nafter " << took.count() << " ms, signal " << result.signal << ", stderr: " << result.err);
  CHECK(result.code == code);
  CHECK(took < limit);
  CHECK(result.errors().size() == 1);
  CHECK(result.last_line().starts_with("detrtrain: error: " + error));
  for (const pid_t pid : pids) CHECK(!is_alive(pid));
}

TEST_CASE("launch: a job that runs to its end", "[cpu]") {
  for (const int ranks : {2, 5}) {
    Job job(ranks, {"--steps", "30"});
    const ProcessResult result = job.process().wait();
    INFO(result.err);
    CHECK(result.code == 0);
    CHECK(result.out == "30 steps\n");   // of rank 0, and of nobody else
    CHECK(result.errors().empty());
    CHECK(result.err.find(concat("\nrank 0 of ", ranks, " on cpu runs\n")) != std::string::npos);
    for (int rank = 1; rank < ranks; ++rank) CHECK(result.err.find(concat("[rank ", rank, "] rank ", rank, " of ", ranks, " on cpu runs\n")) != std::string::npos);
  }
  Job quiet(2, {"--steps", "1", "-q"});
  CHECK(quiet.process().wait().err.find(" pid ") == std::string::npos);
}

TEST_CASE("launch: lines come whole, with their rank", "[cpu]") {
  Job job(4, {"--steps", "3", "--lines", "3000"});
  const ProcessResult result = job.process().wait();
  CHECK(result.code == 0);
  std::map<std::string, int> count;
  std::istringstream lines(result.err);
  for (std::string line; std::getline(lines, line);) ++count[line];
  for (int rank = 1; rank < 4; ++rank) CHECK(count[concat("[rank ", rank, "] ", std::string(99, 'x'))] == 3000);
  CHECK(count.size() == 4 + 4 + 3);   // pids, first steps, and the line of each of the three
  CHECK(result.out == "3 steps\n");
}

TEST_CASE("launch: a rank that fails, ends or crashes", "[cpu]") {
  const auto expect = [](const std::string& fault, int code, const std::string& error) {
    INFO(fault);
    Job job(3, {}, fault);
    expect_failure(job, job.pids(), code, error);
  };
  for (const char* place : {"phase=rendezvous", "phase=backward,step=40"}) {
    expect(concat("sleep:ms=100,", place, ";throw:rank=1,", place), 1, "rank 1: DETRTRAIN_FAULT: an error that was asked for");
    expect(concat("sleep:ms=100,", place, ";throw:rank=0,", place), 1, "rank 0: DETRTRAIN_FAULT: an error that was asked for");
    expect(concat("sleep:ms=100,", place, ";exit:rank=2,code=0,", place), 1, "rank 2: ended with exit code 0");
    expect(concat("sleep:ms=100,", place, ";signal:rank=2,sig=SEGV,", place), 1, "rank 2: killed by signal 11 (SIGSEGV)");
    expect(concat("sleep:ms=100,", place, ";signal:rank=0,sig=ABRT,", place), 1, "rank 0: killed by signal 6 (SIGABRT)");
    expect(concat("sleep:ms=100,", place, ";signal:rank=1,sig=FPE,", place), 1, "rank 1: killed by signal 8 (SIGFPE)");
    expect(concat("sleep:ms=100,", place, ";signal:rank=1,sig=BUS,", place), 1, "rank 1: killed by signal 7 (SIGBUS)");
    expect(concat("sleep:ms=100,", place, ";signal:rank=1,sig=KILL,", place), 6, "rank 1: killed by signal 9 (SIGKILL)");
  }
  // What a crashed rank says itself comes before.
  Job job(2, {}, "signal:rank=1,sig=SEGV,step=3,phase=backward");
  CHECK(job.process().wait().err.find("[rank 1] rank 1: crashed by signal 11; step 3, backward\n") != std::string::npos);
  Job thread(2, {"--uncaught", "4"});
  const ProcessResult result = thread.process().wait();
  CHECK(result.code == 1);
  CHECK(result.err.find("[rank 1] rank 1: nobody caught: thrown where nobody can catch it; step 4, forward\n") != std::string::npos);
}

TEST_CASE("launch: a rank that stops or hangs", "[cpu]") {
  for (const char* fault : {"hang:rank=1,step=20,phase=forward", "signal:sig=STOP,rank=0,step=20,phase=forward"}) {
    INFO(fault);
    const auto start = Clock::now();
    Job job(3, {}, fault);
    const std::vector<pid_t> pids = job.pids();
    const ProcessResult result = job.process().wait();
    INFO(result.err);
    CHECK(Clock::now() - start > milliseconds(2000));
    CHECK(Clock::now() - start < milliseconds(2000) + kSoon);
    CHECK(result.code == 6);
    CHECK(result.last_line().find(concat("rank ", std::string(fault).find("rank=1") != std::string::npos ? 1 : 0, ": ")) != std::string::npos);
    CHECK(result.err.find("warning: rank ") != std::string::npos);
    CHECK(all_end_within(pids, milliseconds(100)));
  }
}

/// Kills one rank of a job at a random moment, some of them while it starts.
void kill_at_random(int trial, RandomSequence& random) {
  const int ranks = 2 + trial % 3, doomed = static_cast<int>(random.uniform_int(ranks));
  Job job(ranks);
  const std::vector<pid_t> pids = job.pids();
  if (trial % 2 == 0) job.wait_until_it_runs();
  std::this_thread::sleep_for(std::chrono::microseconds(random.uniform_int(60000)));
  INFO("trial " << trial << ", " << ranks << " ranks");
  ::kill(pids[static_cast<std::size_t>(doomed)], SIGKILL);
  expect_failure(job, pids, 6, concat("rank ", doomed, ": killed by signal 9 (SIGKILL)"));
}

TEST_CASE("launch: ranks that are killed are named", "[cpu]") {
  RandomSequence random(RandomKey(1));
  for (int trial = 0; trial < 12; ++trial) kill_at_random(trial, random);
}

TEST_CASE("launch: many ranks that are killed are named", "[cpu][slow]") {
  RandomSequence random(RandomKey(2));
  for (int trial = 0; trial < 260; ++trial) kill_at_random(trial, random);
}

TEST_CASE("launch: two ranks that are killed at once", "[cpu]") {
  Job job(4);
  const std::vector<pid_t> pids = job.pids();
  job.wait_until_it_runs();
  ::kill(pids[3], SIGKILL);
  ::kill(pids[1], SIGKILL);
  const ProcessResult result = job.process().wait();
  INFO(result.err);
  CHECK(result.code == 6);
  const std::string line = result.last_line();
  CHECK(line.find("killed by signal 9") != std::string::npos);
  for (const char* rank : {"rank 1", "rank 3"}) CHECK(line.find(rank) != std::string::npos);
  CHECK(line.find("also lost") != std::string::npos);
}

TEST_CASE("launch: nobody outlives the launcher", "[cpu]") {
  for (const bool running : {false, true}) {
    Job job(3, {}, running ? "signal:sig=STOP,rank=1,step=10" : "");   // one that is stopped dies as well
    const std::vector<pid_t> pids = job.pids();
    if (running) job.wait_until_it_runs();
    job.process().send(SIGKILL);
    CHECK(job.process().wait().signal == SIGKILL);
    CHECK(all_end_within(pids, milliseconds(2000)));
  }
}

TEST_CASE("launch: a signal stops all ranks after the same step", "[cpu]") {
  const auto expect_stopped = [](Job& job) {
    const ProcessResult result = job.process().wait();
    INFO(result.err);
    CHECK(result.code == 75);
    CHECK(result.out.starts_with("stopped after step "));
    CHECK(result.errors().empty());
  };
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) {
    Job job(3);
    job.wait_until_it_runs();
    job.process().send(signal);
    expect_stopped(job);
  }
  {
    Job job(3);   // to a rank: however often, and before it can obey
    const std::vector<pid_t> pids = job.pids();
    for (int i = 0; i < 5; ++i) {
      for (const pid_t pid : pids) ::kill(pid, SIGTERM);
    }
    expect_stopped(job);
  }
  {
    Job job(2, {}, "sleep:phase=rendezvous,ms=300");   // while it starts
    static_cast<void>(job.pids());
    job.process().send(SIGTERM);
    expect_stopped(job);
  }
}

TEST_CASE("launch: a second signal to the launcher ends the job at once", "[cpu]") {
  for (const int signal : {SIGINT, SIGTERM}) {
    Job job(3, {"--step-ms", "100000"}, "sleep:phase=forward,ms=1");
    const std::vector<pid_t> pids = job.pids();
    job.process().send(signal);
    std::this_thread::sleep_for(milliseconds(100));
    CHECK(job.process().running());
    job.process().send(signal);
    expect_failure(job, pids, 128 + signal, "ended at once by a second signal");
  }
}

TEST_CASE("launch: the code of a stop with nothing saved is that of the signal", "[cpu]") {
  for (const int signal : {SIGINT, SIGTERM}) {
    Job job(2, {"--stop-code", "143"});   // the ranks cannot tell which it was
    job.wait_until_it_runs();
    job.process().send(signal);
    CHECK(job.process().wait().code == 128 + signal);
  }
  Job job(2, {"--stop-code", "143"});
  job.wait_until_it_runs();
  ::kill(job.pid(1), SIGINT);
  CHECK(job.process().wait().code == 143);
}

TEST_CASE("launch: a signal that is ignored stays ignored", "[cpu]") {
  struct sigaction old {};
  struct sigaction ignored {};
  ignored.sa_handler = SIG_IGN;
  ::sigaction(SIGHUP, &ignored, &old);
  Job job(2, {"--steps", "300"});
  ::sigaction(SIGHUP, &old, nullptr);
  job.wait_until_it_runs();
  job.process().send(SIGHUP);
  ::kill(job.pid(1), SIGHUP);
  const ProcessResult result = job.process().wait();
  CHECK(result.code == 0);
  CHECK(result.out == "300 steps\n");
}

TEST_CASE("launch: exit codes that differ are a failure", "[cpu]") {
  for (const auto& [code, wanted] : {std::pair(75, 1), std::pair(9, 9)}) {
    Job job(3, {"--steps", "3", "--last-code", std::to_string(code)});
    const ProcessResult result = job.process().wait();
    CHECK(result.code == wanted);
    CHECK(result.last_line() == concat("detrtrain: error: the ranks ended with different exit codes: rank 0: 0; rank 1: ", code, "; rank 2: 0"));
  }
}

TEST_CASE("launch: a stderr that nobody reads keeps no rank alive", "[cpu]") {
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  Setting setting = job_setting();
  setting.error_descriptor = ends[1];
  Detrtrain process({"--ranks", "3", "-d", "cpu", "--comm-timeout", "2", "--lines", "100000"}, Detrtrain::Streams::kept, setting);
  ::close(ends[1]);
  FILE* in = ::fdopen(ends[0], "r");
  std::vector<pid_t> pids;
  int rank = 0;
  long pid = 0;
  while (pids.size() < 3 && std::fscanf(in, "rank %d pid %ld device cpu\n", &rank, &pid) == 2) pids.push_back(static_cast<pid_t>(pid));
  REQUIRE(pids.size() == 3);
  std::this_thread::sleep_for(milliseconds(100));   // by now they wait for stderr
  ::kill(pids[2], SIGKILL);
  CHECK(all_end_within(pids, kSoon));
  while (std::fgetc(in) != EOF) {
  }
  CHECK(process.wait().code == 6);
  std::fclose(in);
}

TEST_CASE("launch: too few open files", "[cpu]") {
  Setting shell;
  shell.program = "/bin/sh";
  Detrtrain process({"-c", concat("ulimit -n 32; exec ", DETR_JOB_BINARY, " --ranks 2 -d cpu --steps 1")}, Detrtrain::Streams::kept, shell);
  const ProcessResult result = process.wait();
  CHECK(result.code == 2);
  CHECK(result.err.find("the limit of open files is 32, and 2 ranks need 72") != std::string::npos);
}

TEST_CASE("launch: a child that counts and does not answer is given up", "[cpu]") {
  CHECK(apps::count_in_child([] { return 3; }, milliseconds(20000)) == 3);
  expect_throws<DeviceError>([] { apps::count_in_child([]() -> int { throw Error("no driver"); }, milliseconds(20000)); }, "no driver");
  expect_throws<DeviceError>([] { apps::count_in_child([]() -> int { ::_exit(3); }, milliseconds(20000)); }, "the driver ended the process");
  const auto start = Clock::now();
  expect_throws<DeviceError>([] { apps::count_in_child([]() -> int { ::sleep(60); return 1; }, milliseconds(200)); }, "the driver has not answered within 0.2 s");
  CHECK(Clock::now() - start < kSoon);

  // It dies with the process that waits for it.
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  const pid_t launcher = ::fork();
  if (launcher == 0) {
    apps::count_in_child([&]() -> int {
      const pid_t self = ::getpid();
      static_cast<void>(!::write(ends[1], &self, sizeof self));
      ::sleep(60);
      return 1;
    }, milliseconds(60000));
    ::_exit(0);
  }
  pid_t counter = 0;
  REQUIRE(::read(ends[0], &counter, sizeof counter) == static_cast<ssize_t>(sizeof counter));
  ::kill(launcher, SIGKILL);
  ::waitpid(launcher, nullptr, 0);
  CHECK(all_end_within({counter}, kSoon));
  for (const int end : ends) ::close(end);
}

TEST_CASE("launch: not with the rights of another user", "[cpu]") {
  if (::getuid() != 0) SKIP("only root can make a file of another user");
  const TempDir dir;
  const std::string copy = (dir / "detrtrain").string();
  std::filesystem::copy_file(DETRTRAIN_BINARY, copy);
  REQUIRE(::chown(copy.c_str(), 65534, 65534) == 0);
  REQUIRE(::chmod(copy.c_str(), 04755) == 0);
  const ProcessResult result = Detrtrain({"info", "configs"}, Detrtrain::Streams::kept, {copy, {}, -1}).wait();
  INFO(result.err);
  if (result.code == 0) SKIP("the file system of the temporary folder knows no set-uid");
  CHECK(result.code == 2);
  CHECK(result.err == "detrtrain: error: it does not run with the rights of another user (set-uid or set-gid): chmod u-s,g-s\n");
}

}  // namespace
}  // namespace detr::test

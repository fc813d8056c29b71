// A program whose ranks agree on a step counter and do nothing else: the launcher, the control connections and the ends of a job, without training.
//   test_job --ranks N -d cpu [--steps N] [--step-ms MS] [--lines N] [--last-code CODE] [--stop-code CODE] [--uncaught STEP]
// Each rank says a line at its first step; rank 0 prints the number of steps that were made, or after which one it was stopped.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <iostream>
#include <thread>

#include "apps/launch.h"
#include "apps/rank.h"
#include "dist/control.h"
#include "runtime/error.h"
#include "runtime/faults.h"

namespace detr::apps {
namespace {

struct Flags {
  RankFlags ranks;
  CommonOptions common;
  std::int64_t steps = 0;   // 0: for ever
  int step_ms = 1;
  int last_code = 0;        // of rank 1, instead of its own
  int stop_code = kStoppedAndSaved;
  std::int64_t uncaught = -1;   // the step in which a thread of rank 1 throws
  int lines = 0;            // that each rank but 0 says at the first step
};

void say(const std::string& text) { static_cast<void>(!::write(STDERR_FILENO, text.data(), text.size())); }

/// Lines in pieces, alternately on stdout and stderr, the last one without its end.
void shout(int lines) {
  const std::string line(99, 'x');
  for (int i = 0; i < lines; ++i) {
    const int descriptor = i % 2 == 0 ? STDOUT_FILENO : STDERR_FILENO;
    for (const std::string& piece : {line.substr(0, 40), line.substr(40) + (i + 1 < lines ? "\n" : "")}) {
      static_cast<void>(!::write(descriptor, piece.data(), piece.size()));
    }
  }
}

/// Whether any rank wants to stop, the same answer on all.
bool agree_to_stop(dist::Control& control) {
  const auto deadline = dist::Clock::now() + 10 * control.timeout();
  for (const std::string& wish : control.all_gather(control.stop_wished() ? "1" : "0", "agree", deadline)) {
    if (wish == "1") return true;
  }
  return false;
}

Outcome run(const Flags& flags) {
  const World world = world_of_process(flags.ranks, flags.common);
  train::Config config;
  apply_rank_flags(flags.ranks, config);
  const train::CommConfig comm = config.resolve().comm;
  if (world.role == World::Role::launcher) return launch(world, comm, flags.common);
  if (world.role != World::Role::rank) throw ConfigError("this program needs several ranks");
  const std::shared_ptr<dist::Control> control = join_job(world, comm, flags.common, "job");
  const Faults faults = Faults::from_environment(world.rank, world.size);
  Outcome outcome;
  faults.at("rendezvous", -1);
  for (std::int64_t step = 0; flags.steps == 0 || step < flags.steps; ++step) {
    for (const char* phase : {"forward", "backward"}) {
      control->enter(phase, step);
      faults.at(phase, step);
      if (world.rank == 1 && step == flags.uncaught) std::thread([] { throw Error("thrown where nobody can catch it"); }).join();
      std::this_thread::sleep_for(std::chrono::milliseconds(flags.step_ms) / 2);
    }
    const bool stop = agree_to_stop(*control);
    if (step == 0) say(concat("rank ", world.rank, " of ", world.size, " on ", rank_options(world, flags.common).device, " runs\n"));
    if (step == 0 && world.rank > 0) shout(flags.lines);
    if (!stop) continue;
    outcome.code = flags.stop_code;
    if (world.rank == 0) std::cout << "stopped after step " << step << std::endl;
    break;
  }
  if (world.rank == 0 && outcome.code == kDone) std::cout << flags.steps << " steps" << std::endl;
  if (world.rank == 1 && flags.last_code != 0) outcome.code = flags.last_code;
  return outcome;
}

int run_main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  Flags flags;
  CLI::App app("", "test_job");
  add_rank_flags(app, flags.ranks);
  app.add_option("-d", flags.common.device);
  app.add_flag("-q", flags.common.quiet);
  app.add_option("--steps", flags.steps);
  app.add_option("--step-ms", flags.step_ms);
  app.add_option("--last-code", flags.last_code);
  app.add_option("--stop-code", flags.stop_code);
  app.add_option("--lines", flags.lines);
  app.add_option("--uncaught", flags.uncaught);
  CLI11_PARSE(app, argc, argv);
  const auto failed = [](int code, const std::string& text) {
    fail_rank(code, text);
    std::cerr << "detrtrain: error: " << text << std::endl;
    return code;
  };
  try {
    const Outcome outcome = run(flags);
    if (!outcome.error.empty()) std::cerr << "detrtrain: error: " << outcome.error << std::endl;
    return leave_job(outcome.code);
  } catch (const CommError& error) {
    return failed(kCommunication, error.what());
  } catch (const ConfigError& error) {
    return failed(kUsage, error.what());
  } catch (const DeviceError& error) {
    return failed(kDevice, error.what());
  } catch (const std::exception& error) {
    return failed(kBug, error.what());
  }
}

}  // namespace
}  // namespace detr::apps

int main(int argc, char** argv) { return detr::apps::run_main(argc, argv); }

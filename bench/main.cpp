// detr_bench: times every hot kernel at the shapes of a training step on a GPU. Google Benchmark picks the cases and counts the runs.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>

#include "bench/harness.h"
#include "bench/kernels/cases.h"
#include "runtime/error.h"

namespace detr::bench {
namespace {

struct Flags {
  std::string json;
  int gpu = 0;
  std::int64_t runs = 100;
  bool oracle = true, help = false;
};

constexpr const char* kHelp =
    "detr_bench [--json FILE] [--device N] [--runs N] [--no-oracle] [--benchmark_filter=REGEX] [--benchmark_list_tests]\n"
    "  --json FILE     one JSON object a line and case, for bench_compare\n"
    "  --device N      the GPU, default 0\n"
    "  --runs N        measurements of each case, default 100\n"
    "  --no-oracle     results are not compared with the CPU's\n"
    "Exit codes: 0 done, 2 usage, 8 device, 9 a case failed its check.\n";

/// Takes the flags that are ours out of the arguments. Throws ConfigError.
Flags parse_flags(std::vector<char*>& arguments) {
  Flags flags;
  std::vector<char*> rest = {arguments.front()};
  const auto number = [](const std::string& flag, const std::string& text) {
    std::size_t used = 0;
    int value = -1;
    try {
      value = std::stoi(text, &used);
    } catch (const std::exception&) {
      used = 0;
    }
    if (used == 0 || used != text.size() || value < 0) throw ConfigError(flag, " takes a number, got '", text, "'");
    return value;
  };
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    const std::string flag = arguments[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= arguments.size()) throw ConfigError(flag, " takes a value");
      return arguments[++i];
    };
    if (flag == "--json") flags.json = value();
    else if (flag == "--device") flags.gpu = number(flag, value());
    else if (flag == "--runs") flags.runs = std::max(1, number(flag, value()));
    else if (flag == "--no-oracle") flags.oracle = false;
    else if (flag == "--help" || flag == "-h") flags.help = true;
    else rest.push_back(arguments[i]);
  }
  arguments = rest;
  return flags;
}

/// The run: opens the GPU with the first case, keeps the records.
class Suite {
 public:
  Suite(Flags flags, std::string command) : flags_(std::move(flags)) {
    run_.commit = DETR_COMMIT;
    run_.command = std::move(command);
    if (flags_.json.empty()) return;
    json_.open(flags_.json, std::ios::trunc);
    if (!json_) throw ConfigError("--json: cannot write ", flags_.json);
  }

  void run_case(benchmark::State& state, const Case& c) {
    Record record;
    record.c = c;
    try {
      open();
      measure(state, record);
    } catch (const std::exception& error) {
      record.check = {false, -1, error.what()};
      if (device_fault_.empty() && !device_works()) device_fault_ = error.what();
    }
    if (record.cold.median <= 0) state.SkipWithError(record.check.fault.c_str());
    if (harness_ && device_fault_.empty()) harness_->free_memory();
    if (json_.is_open()) json_ << json_line(record, run_) << std::endl;
    std::puts(table_line(record).c_str());
    std::fflush(stdout);
    records_.push_back(std::move(record));
  }

  /// Measures the yardstick again and writes the JSON once more, with the drift. Returns the exit code.
  int finish() {
    if (!device_fault_.empty()) {
      std::fprintf(stderr, "detr_bench: %s\n", device_fault_.c_str());
      return 8;
    }
    if (!harness_) return 0;
    const Yardstick after = harness_->measure_yardstick(nullptr);
    run_.drift = drift(run_.before, after);
    std::printf("after: copy %.0f GB/s, product %.0f TFLOP/s; drift %.1f %%%s\n", after.copy_gb_s, after.gemm_tflop_s, 100 * run_.drift,
                run_.drift > kLargestDrift ? ": more than 3 %, this run does not count" : "");
    if (json_.is_open()) {
      json_.close();
      json_.open(flags_.json, std::ios::trunc);
      for (const Record& record : records_) json_ << json_line(record, run_) << '\n';
      json_.close();
      if (!json_) throw ConfigError("--json: cannot write ", flags_.json);
    }
    int failed = 0;
    for (const Record& record : records_) failed += record.check.ok ? 0 : 1;
    std::printf("%zu cases, %d failed\n", records_.size(), failed);
    return failed > 0 ? 9 : 0;
  }

 private:
  /// Whether the GPU takes more work: after a failed kernel every call fails, after an op that has no code for a shape none does.
  bool device_works() const {
    if (!harness_) return false;
    try {
      harness_->stream().wait();
      return true;
    } catch (const DeviceError&) {
      return false;
    }
  }

  void open() {
    if (!device_fault_.empty()) throw DeviceError("not run: ", device_fault_);
    if (harness_) return;
    harness_ = std::make_unique<Harness>(flags_.gpu, flags_.oracle);
    run_.machine = harness_->machine();
    run_.before = harness_->measure_yardstick(&run_.clocks);
    const Machine& m = run_.machine;
    const Clocks& k = run_.clocks;
    std::printf("%s, driver %s, CUDA %s, cuDNN %s, SM clock %s MHz, power cap %s W, throttled: %s, commit %s\n", m.device.c_str(), k.driver.c_str(), m.cuda.c_str(), m.cudnn.c_str(),
                k.sm_clock_mhz.c_str(), k.power_cap_w.c_str(), k.throttled.c_str(), run_.commit.c_str());
    std::printf("%s\nbefore: copy %.0f GB/s, product %.0f TFLOP/s\n%s\n", run_.command.c_str(), run_.before.copy_gb_s, run_.before.gemm_tflop_s, table_head().c_str());
  }

  void measure(benchmark::State& state, Record& record) {
    record.check = harness_->check(record.c);
    harness_->free_memory();
    const TimedCase timed(*harness_, record.c);
    std::vector<double> cold, warm;
    for ([[maybe_unused]] const auto turn : state) {
      cold.push_back(timed.cold_ms());
      state.SetIterationTime(cold.back() * 1e-3);
    }
    for (std::int64_t i = 0; i < flags_.runs; ++i) warm.push_back(timed.warm_ms());
    record.cold = percentiles(cold);
    record.warm_ms = percentiles(warm).median;
    record.runs = std::ssize(cold);
    record.copies = timed.copies();
  }

  Flags flags_;
  RunContext run_;
  std::unique_ptr<Harness> harness_;
  std::vector<Record> records_;
  std::ofstream json_;
  std::string device_fault_;
};

/// The suite prints its own lines.
class Silent final : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

int run(int argc, char** argv) {
  std::string command;
  for (int i = 0; i < argc; ++i) command += (i > 0 ? " " : "") + std::string(argv[i]);
  std::vector<char*> arguments(argv, argv + argc);
  const Flags flags = parse_flags(arguments);
  if (flags.help) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  int count = static_cast<int>(arguments.size());
  arguments.push_back(nullptr);
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 2;
  Suite suite(flags, command);
  for (const Case& c : all_cases()) {
    benchmark::RegisterBenchmark((c.op + " " + shape_text(c)).c_str(), [&suite, c](benchmark::State& state) { suite.run_case(state, c); })
        ->UseManualTime()
        ->Iterations(flags.runs)
        ->Unit(benchmark::kMillisecond);
  }
  Silent silent;
  benchmark::RunSpecifiedBenchmarks(&silent);
  return suite.finish();
}

}  // namespace
}  // namespace detr::bench

int main(int argc, char** argv) {
  try {
    return detr::bench::run(argc, argv);
  } catch (const detr::ConfigError& error) {
    std::fprintf(stderr, "detr_bench: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "detr_bench: %s\n", error.what());
    return 8;
  }
}

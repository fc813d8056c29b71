#include <fmt/format.h>

#include <iostream>

#include "apps/cli.h"
#include "autograd/self_check.h"
#include "runtime/error.h"
#include "train/golden.h"

namespace detr::apps {
namespace {

struct SelftestFlags {
  std::string golden, dtype = "auto", filter;
};

/// Tolerances relative to each tensor's largest value. The reference's position table is float32 even in its f64 runs.
double tolerance_of(DType dtype) { return dtype == DType::f64 ? 1e-6 : dtype == DType::f32 ? 2e-3 : 3e-2; }

DType dtype_for(const std::string& name, const Stream& stream) {
  const bool cpu = stream.device().is_cpu();
  if (name == "auto") return cpu ? DType::f64 : DType::f32;
  if (name == (cpu ? "bf16" : "f64")) throw ConfigError("--dtype ", name, ": ", stream.device(), " computes in ", cpu ? "f64 and f32" : "f32 and bf16");
  return name == "f64" ? DType::f64 : name == "f32" ? DType::f32 : DType::bf16;
}

void run_recorded(const SelftestFlags& flags, const Stream& stream, bool quiet_stdout, Outcome& outcome) {
  const DType dtype = dtype_for(flags.dtype, stream);
  const double tolerance = tolerance_of(dtype);
  bool all = true;
  for (const auto& file : train::golden_files(flags.golden)) {
    if (dtype == DType::bf16 && !file.filename().string().starts_with("train_")) continue;   // only losses are compared in bf16
    const train::GoldenReport report = train::run_golden(file, dtype, stream);
    const bool passed = report.passed(tolerance);
    all = all && passed;
    nlohmann::json kinds = nlohmann::json::object();
    std::string text;
    for (const train::GoldenError& e : report.errors) {
      text += fmt::format(" {} {:.1e}", e.kind, e.error);
      kinds[e.kind] = {{"error", number(e.error)}, {"tensor", e.tensor}};
    }
    outcome.json["files"].push_back({{"name", report.name}, {"passed", passed}, {"largest", number(report.largest())}, {"errors", kinds}, {"faults", report.faults}, {"seconds", report.seconds}});
    if (quiet_stdout) continue;
    print_line(fmt::format("{} {:<40} largest {:.1e} ({:.1f} s) {}", passed ? "pass" : "FAIL", report.name, report.largest(), report.seconds, text));
    if (passed) continue;
    for (const train::GoldenError& e : report.errors) {
      if (e.error > tolerance) print_line(fmt::format("     {}: {} is off by {:.3e}, allowed {:.0e}", e.kind, e.tensor, e.error, tolerance));
    }
    for (const std::string& fault : report.faults) print_line("     " + fault);
  }
  outcome.json["tolerance"] = tolerance;
  outcome.json["dtype"] = name_of(dtype);
  if (all) return;
  outcome.code = kCheckFailed;
  outcome.error = concat("recorded cases in ", flags.golden, " are not met: see FAIL above, or the json");
}

Outcome run_selftest(const SelftestFlags& flags, const CommonOptions& common) {
  const Stream stream = open_stream(common);
  Outcome outcome;
  if (!flags.golden.empty()) {
    outcome.json["files"] = nlohmann::json::array();
    run_recorded(flags, stream, common.json, outcome);
    return outcome;
  }
  outcome.json["ops"] = nlohmann::json::array();
  std::vector<SelfCheck> checks = check_ops(flags.filter);
  if (!stream.device().is_cpu()) {
    const std::vector<SelfCheck> on_device = check_ops_on(stream, flags.filter);
    checks.insert(checks.end(), on_device.begin(), on_device.end());
  }
  for (const SelfCheck& check : checks) {
    outcome.json["ops"].push_back({{"op", check.op}, {"passed", check.failure.empty()}, {"failure", check.failure}});
    if (!check.failure.empty()) outcome.code = kCheckFailed;
    if (!common.json) print_line(fmt::format("{} {}{}", check.failure.empty() ? "pass" : "FAIL", check.op, check.failure.empty() ? "" : ": " + check.failure));
  }
  if (outcome.code != kDone) outcome.error = concat(stream.device().is_cpu() ? "gradients" : "values or gradients", " of an op are wrong on this machine: see FAIL above, or the json");
  if (outcome.json["ops"].empty()) throw ConfigError("--ops ", flags.filter, ": no such op");
  return outcome;
}

}  // namespace

Verb add_selftest(CLI::App& app, const CommonOptions& common) {
  const auto flags = std::make_shared<SelftestFlags>();
  for (const char* unused : {"--config", "--update", "updates"}) app.remove_option(app.get_option(unused));   // no configuration is read here
  app.add_option("--golden", flags->golden, "folder with recorded cases (train_*.json, eval_*.json, optim_*.json)");
  app.add_option("--dtype", flags->dtype, "f64 or f32 on the CPU, f32 or bf16 on a GPU; auto: the first")->check(CLI::IsMember({"auto", "f64", "f32", "bf16"}));
  app.add_option("--ops", flags->filter, "regular expression: which ops to check where no --golden is given: gradients on the CPU; with a GPU, its ops against the CPU's");
  return [flags, &common] { return run_selftest(*flags, common); };
}

}  // namespace detr::apps

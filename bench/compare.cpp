#include "bench/compare.h"

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "bench/report.h"
#include "runtime/error.h"

namespace detr::bench {
namespace {

constexpr double kLargestSlowdown = 0.03;

struct Line {
  double ms = 0;   ///< 0: the case did not run
  bool ok = false;
  std::string device;
  double copy_gb_s = 0, drift = 0;
};

/// By op, variant, shape and dtype.
std::map<std::string, Line> read_run(const std::string& text, const char* which) {
  std::map<std::string, Line> run;
  std::istringstream lines(text);
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.empty()) continue;
    try {
      const auto json = nlohmann::ordered_json::parse(line);
      std::string key = json.at("op").get<std::string>() + " " + json.at("variant").get<std::string>();
      for (const auto& [letter, size] : json.at("shape").items()) key += fmt::format(" {}={}", letter, size.get<std::int64_t>());
      key += " " + json.at("dtype").get<std::string>();
      const auto& ms = json.at("ms");
      run[key] = {ms.is_null() ? 0 : ms.get<double>(), json.at("ok").get<bool>(), json.at("device").get<std::string>(), json.at("copy_gb_s").get<double>(), json.at("drift").get<double>()};
    } catch (const nlohmann::json::exception& error) {
      throw DataError("bench_compare: line ", number, " of the ", which, " run: ", error.what());
    }
  }
  return run;
}

}  // namespace

Comparison compare_runs(const std::string& older, const std::string& newer) {
  const auto old_run = read_run(older, "old"), new_run = read_run(newer, "new");
  Comparison result;
  for (const auto& [key, now] : new_run) {
    if (!now.ok) {
      ++result.wrong;
      result.lines.push_back(fmt::format("{:<90} FAIL in the new run", key));
    }
    const auto found = old_run.find(key);
    if (found == old_run.end()) {
      result.lines.push_back(fmt::format("{:<90} only in the new run", key));
      continue;
    }
    const Line& before = found->second;
    if (before.ms <= 0 || now.ms <= 0) continue;
    ++result.compared;
    const double change = now.ms / before.ms - 1;
    const bool slower = change > kLargestSlowdown;
    result.slower += slower ? 1 : 0;
    result.lines.push_back(fmt::format("{:<90} {:>9.4f} -> {:>9.4f} ms  {:>+6.1f} %{}", key, before.ms, now.ms, 100 * change, slower ? "  SLOWER" : ""));
  }
  for (const auto& [key, before] : old_run) {
    if (!new_run.contains(key)) result.lines.push_back(fmt::format("{:<90} only in the old run", key));
  }
  if (result.compared == 0) throw DataError("bench_compare: the two runs have no timed case in common");
  const Line &before = old_run.begin()->second, &now = new_run.begin()->second;
  if (before.device != now.device) result.lines.push_back(fmt::format("note: the devices differ: {} and {}", before.device, now.device));
  if (std::abs(now.copy_gb_s / before.copy_gb_s - 1) > kLargestDrift) result.lines.push_back(fmt::format("note: a copy ran at {:.0f} GB/s and at {:.0f} GB/s", before.copy_gb_s, now.copy_gb_s));
  for (const Line* run : {&before, &now}) {
    if (run->drift > kLargestDrift) result.lines.push_back(fmt::format("note: the machine drifted by {:.1f} % during the {} run", 100 * run->drift, run == &before ? "old" : "new"));
  }
  return result;
}

}  // namespace detr::bench

#include "bench/machine.h"

#include <cstdio>
#include <memory>
#include <vector>

namespace detr::bench {

std::string throttle_text(std::uint64_t reasons) {
  struct Reason {
    std::uint64_t bit;
    const char* name;
  };
  std::string text;
  for (const auto& [bit, name] : {Reason{0x4, "power cap"}, {0x8, "hardware slowdown"}, {0x20, "temperature (driver)"}, {0x40, "temperature (hardware)"}, {0x80, "power brake"}}) {
    if (reasons & bit) text += (text.empty() ? "" : ", ") + std::string(name);
  }
  return text.empty() ? "no" : text;
}

Clocks read_clocks(const std::string& bus_id) {
  const std::string command = "nvidia-smi --id=" + bus_id + " --query-gpu=driver_version,clocks.sm,power.limit,clocks_event_reasons.active --format=csv,noheader,nounits 2>/dev/null";
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  Clocks clocks;
  char line[256] = {};
  if (!pipe || !std::fgets(line, sizeof line, pipe.get())) return clocks;
  std::vector<std::string> fields(1);
  for (const char* c = line; *c && *c != '\n'; ++c) {
    if (*c == ',') fields.emplace_back();
    else if (*c != ' ' || !fields.back().empty()) fields.back() += *c;
  }
  if (fields.size() != 4) return clocks;   // an error in words
  clocks = {fields[0], fields[1], fields[2], "unknown"};
  try {
    clocks.throttled = throttle_text(std::stoull(fields[3], nullptr, 16));
  } catch (const std::exception&) {   // not supported: the field is a word
  }
  return clocks;
}

}  // namespace detr::bench

#include "bench/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "bench/peers.h"
#include "runtime/error.h"

namespace detr::bench {
namespace {

using Json = nlohmann::ordered_json;

double gb_s(const Record& r) { return r.c.cost.bytes / r.cold.median * 1e-6; }
double tflop_s(const Record& r) { return 2 * r.c.cost.mac / r.cold.median * 1e-9; }

}  // namespace

double drift(const Yardstick& before, const Yardstick& after) {
  return std::max(std::abs(after.copy_gb_s / before.copy_gb_s - 1), std::abs(after.gemm_tflop_s / before.gemm_tflop_s - 1));
}

std::string table_head() {
  return fmt::format("{:<30} {:<40} {:<5} {:>9} {:>9} {:>9} {:>9} {:>7} {:>8} {:>9} {:>8}  {:<30} {:>8} {:>7}  check", "op", "shape", "dtype", "p50 ms", "p10", "p90", "warm", "GB/s", "TFLOP/s",
                     "floor ms", "% floor", "best peer (kind)", "peer ms", "ratio");
}

std::string table_line(const Record& r) {
  if (r.cold.median <= 0) return fmt::format("{:<30} {:<40} {:<5} FAIL: {}", r.c.op, shape_text(r.c), detr::name_of(r.c.dtype), r.check.fault);
  const auto peer = best_peer(r.c);
  const std::string peer_columns = peer ? fmt::format("{:<30} {:>8.3f} {:>7.2f}", fmt::format("{} ({})", peer->name, peer->kind), peer->ms, peer->ms / r.cold.median)
                                   : fmt::format("{:<30} {:>8} {:>7}", "-", "-", "-");
  const std::string flops = r.c.cost.mac > 0 ? fmt::format("{:.1f}", tflop_s(r)) : "-";
  return fmt::format("{:<30} {:<40} {:<5} {:>9.4f} {:>9.4f} {:>9.4f} {:>9.4f} {:>7.0f} {:>8} {:>9.4f} {:>8.1f}  {}  {}", r.c.op, shape_text(r.c), detr::name_of(r.c.dtype), r.cold.median, r.cold.p10,
                     r.cold.p90, r.warm_ms, gb_s(r), flops, r.c.cost.floor_ms, 100 * r.c.cost.floor_ms / r.cold.median, peer_columns,
                     r.check.ok ? "ok" : "FAIL: " + r.check.fault);
}

std::string json_line(const Record& r, const RunContext& run) {
  const bool timed = r.cold.median > 0;
  const auto number = [&](double value) { return timed ? Json(value) : Json(); };
  Json shape = Json::object();
  for (const auto& [letter, size] : r.c.shape) shape[letter] = size;
  Json line;
  line["op"] = r.c.op;
  line["variant"] = r.c.variant;
  line["shape"] = shape;
  line["dtype"] = detr::name_of(r.c.dtype);
  line["ms"] = number(r.cold.median);
  line["p10"] = number(r.cold.p10);
  line["p90"] = number(r.cold.p90);
  line["warm_ms"] = number(r.warm_ms);
  line["runs"] = r.runs;
  line["copies"] = r.copies;
  line["bytes"] = r.c.cost.bytes;
  line["flops"] = 2 * r.c.cost.mac;
  line["gb_s"] = number(timed ? gb_s(r) : 0);
  line["tflop_s"] = number(timed ? tflop_s(r) : 0);
  line["floor_ms"] = r.c.cost.floor_ms;
  line["floor_share"] = number(timed ? r.c.cost.floor_ms / r.cold.median : 0);
  const auto peer = best_peer(r.c);
  line["peer"] = peer ? Json{{"name", peer->name}, {"kind", std::string(1, peer->kind)}, {"ms", peer->ms}} : Json();
  line["ratio"] = peer ? number(timed ? peer->ms / r.cold.median : 0) : Json();
  line["max_error"] = r.check.max_error >= 0 && std::isfinite(r.check.max_error) ? Json(r.check.max_error) : Json();
  line["ok"] = r.check.ok;
  line["fault"] = r.check.fault;
  line["device"] = run.machine.device;
  line["driver"] = run.clocks.driver;
  line["cuda"] = run.machine.cuda;
  line["cudnn"] = run.machine.cudnn;
  line["sm_clock_mhz"] = run.clocks.sm_clock_mhz;
  line["power_cap_w"] = run.clocks.power_cap_w;
  line["throttled"] = run.clocks.throttled;
  line["copy_gb_s"] = run.before.copy_gb_s;
  line["gemm_tflop_s"] = run.before.gemm_tflop_s;
  line["drift"] = run.drift;
  line["commit"] = run.commit;
  line["command"] = run.command;
  return line.dump();
}

}  // namespace detr::bench

#pragma once
#include <string>
#include <vector>

#include "bench/case.h"
#include "bench/check.h"
#include "bench/machine.h"
#include "runtime/timing.h"

namespace detr::bench {

/// What a machine reaches, as a yardstick for the run.
struct Yardstick {
  double copy_gb_s = 0;      ///< read and written by a copy of 4 GiB
  double gemm_tflop_s = 0;   ///< of an 8192-cubed bf16 product
};
/// Largest relative change between two yardsticks.
double drift(const Yardstick& before, const Yardstick& after);
inline constexpr double kLargestDrift = 0.03;

/// A case and its figures.
struct Record {
  Case c;
  Percentiles cold;    ///< ms, with a flushed L2 cache
  double warm_ms = 0;
  std::int64_t runs = 0, copies = 1;   ///< measurements, and calls in each
  Check check;
};

/// What all records of a run have in common.
struct RunContext {
  Machine machine;
  Clocks clocks;
  Yardstick before;
  double drift = 0;   ///< of the yardsticks after the run from those before
  std::string commit, command;
};

/// The table's head, and one line of it.
std::string table_head();
std::string table_line(const Record& record);
/// One JSON object in one line, without the end of the line.
std::string json_line(const Record& record, const RunContext& run);

}  // namespace detr::bench

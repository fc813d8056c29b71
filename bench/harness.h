#pragma once
#include <memory>

#include "bench/case.h"
#include "bench/report.h"

namespace detr::bench {

/// A GPU with what every measurement needs: random numbers, memory to flush the cache with, and the CPU to compare with.
class Harness {
 public:
  /// Throws DeviceError where there is no such GPU. `oracle`: results are compared with the CPU's.
  Harness(int gpu, bool oracle);

  const Stream& stream() const { return pool_.stream; }
  const Machine& machine() const { return machine_; }
  const RandomPool& pool() const { return pool_; }
  /// Of twice the L2 cache's size: writing it puts everything else out of the cache.
  const Tensor& flush() const { return flush_; }

  Check check(const Case& c) const { return check_case(c, pool_, oracle_.get()); }
  /// Times the copy and the product; where `clocks` is given, asks for the clocks while the product runs.
  Yardstick measure_yardstick(Clocks* clocks) const;
  /// Gives memory that no tensor uses back to the driver.
  void free_memory() const { stream().allocator().free_cache(); }

 private:
  Machine machine_;
  RandomPool pool_;
  std::unique_ptr<RandomPool> oracle_;
  Tensor flush_;
};

/// A case ready to be timed, each time by a graph with marks around the work, so that the host takes no part. Work of less than 10 us is
/// enqueued 32 times, on as many sets of inputs and outputs, between the marks.
class TimedCase {
 public:
  /// Makes inputs, runs, and warms up for at least five measurements and 0.2 s.
  TimedCase(const Harness& harness, const Case& c);

  /// Milliseconds of one call, when the cache has been flushed before: no call finds data of its own there.
  double cold_ms() const { return time(cold_); }
  /// When the same call has been made just before.
  double warm_ms() const { return time(warm_); }
  std::int64_t copies() const { return std::ssize(works_); }

 private:
  struct Span {
    Graph graph;
    Event begin, end;
  };
  void capture();
  double time(const Span& span) const;

  const Harness& harness_;
  Stream stream_;   ///< with an arena: scratch memory inside the graphs belongs to them
  std::vector<Work> works_;
  Span cold_, warm_;
};

}  // namespace detr::bench

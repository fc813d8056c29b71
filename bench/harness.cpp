#include "bench/harness.h"

#include "kernels/linear.h"
#include "kernels/pointwise.h"

namespace detr::bench {
namespace {

constexpr double kShortMs = 0.010;      // below, one call is too short for the marks around it
constexpr std::int64_t kCopies = 32;
constexpr int kWarmups = 5;
constexpr double kWarmupSeconds = 0.2;
constexpr int kYardstickRuns = 10;

/// Median milliseconds of calls that are long enough to be launched one by one.
double median_ms(const Stream& stream, const std::function<void()>& enqueue) {
  std::vector<double> times;
  for (int i = 0; i < 3; ++i) enqueue();
  for (int i = 0; i < kYardstickRuns; ++i) {
    const Event begin = stream.record();
    enqueue();
    const Event end = stream.record();
    end.wait();
    times.push_back(end.milliseconds_since(begin));
  }
  return percentiles(times).median;
}

}  // namespace

Harness::Harness(int gpu, bool oracle)
    : machine_(), pool_(Stream::cuda(gpu), DType::bf16), oracle_(oracle ? std::make_unique<RandomPool>(pool_.host, DType::f32) : nullptr) {
  machine_ = describe_gpu(gpu);
  flush_ = stream().empty({2 * machine_.l2_bytes / 4}, DType::f32);
}

Yardstick Harness::measure_yardstick(Clocks* clocks) const {
  Yardstick yardstick;
  {
    constexpr std::int64_t kCopyBytes = std::int64_t{4} << 30;
    Inputs inputs(pool_, 1);
    const Tensor from = inputs.wide_normal({kCopyBytes / 4});
    Tensor to = stream().empty_like(from);
    yardstick.copy_gb_s = 2.0 * kCopyBytes / median_ms(stream(), [&] { stream().copy(from, to); }) * 1e-6;
  }
  {
    constexpr std::int64_t kSide = 8192;
    Inputs inputs(pool_, 2);
    const Tensor x = inputs.normal({kSide, kSide}), weight = inputs.normal({kSide, kSide}, 1.0 / 64);
    Tensor y = stream().empty({kSide, kSide}, DType::bf16);
    const auto product = [&] { kernels::linear_forward(stream(), x, weight, nullptr, y); };
    yardstick.gemm_tflop_s = 2.0 * kSide * kSide * kSide / median_ms(stream(), product) * 1e-9;
    if (clocks) {
      for (int i = 0; i < 1500; ++i) product();   // about a second, longer than the answer takes
      *clocks = read_clocks(machine_.bus_id);
      stream().wait();
    }
  }
  free_memory();
  return yardstick;
}

TimedCase::TimedCase(const Harness& harness, const Case& c) : harness_(harness), stream_(harness.stream().with_arena()) {
  const auto add_work = [&] {
    Inputs inputs(harness.pool(), static_cast<std::uint64_t>(works_.size() + 1));
    works_.push_back(c.make(inputs, c.size));
    works_.back().run(stream_);   // before a capture: libraries are set up, tables made, scratch memory there
    stream_.wait();
  };
  const auto warm_up = [&] {
    std::vector<double> times;
    for (const double begin = now_s(); times.size() < kWarmups || now_s() - begin < kWarmupSeconds;) times.push_back(cold_ms());
    return percentiles(times).median;
  };
  add_work();
  capture();
  if (warm_up() >= kShortMs) return;
  while (copies() < kCopies) add_work();
  capture();
  warm_up();
}

void TimedCase::capture() {
  Tensor flush = harness_.flush();
  cold_.graph = stream_.capture([&] {
    kernels::fill(stream_, 1.5, flush);
    cold_.begin = stream_.record();
    for (const Work& work : works_) work.run(stream_);
    cold_.end = stream_.record();
  });
  warm_.graph = stream_.capture([&] {
    works_.front().run(stream_);
    warm_.begin = stream_.record();
    for (std::int64_t i = 0; i < copies(); ++i) works_.front().run(stream_);
    warm_.end = stream_.record();
  });
}

double TimedCase::time(const Span& span) const {
  span.graph.launch(stream_);
  stream_.wait();
  return span.end.milliseconds_since(span.begin) / static_cast<double>(copies());
}

}  // namespace detr::bench

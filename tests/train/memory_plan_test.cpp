#include "train/memory_plan.h"

#include <chrono>
#include <cstdlib>
#include <fstream>

#include <unistd.h>

#include "tests/train/rig.h"

using namespace detr;
using namespace detr::test;
using train::MemoryPlan;
using train::MemoryRequest;
using train::StepKey;

namespace {

constexpr double kGib = 1 << 30;

/// Host memory in the segments of a GPU.
class SegmentedMemory final : public MemorySource {
 public:
  Device device() const override { return Device::cpu(); }
  std::size_t segment_bytes() const override { return kCudaSegmentBytes; }
  void* take(std::size_t bytes) override { return std::aligned_alloc(64, bytes); }
  void give(void* memory, std::size_t) override { std::free(memory); }
};

/// Batches of `pictures` squares with up to 32 boxes and 200 denoising slots.
MemoryRequest request_for(const models::ModelConfig& config, std::int64_t pictures, std::int64_t side, DType compute) {
  MemoryRequest request;
  request.make_model = [config] { return std::make_unique<models::RtDetr>(config); };
  request.compute = compute;
  request.keys = {{{pictures, side, side, 3}, side, side, 32, 200}};
  return request;
}

MemoryRequest r50(std::int64_t pictures) { return request_for(models::variant_config("r50"), pictures, 640, DType::bf16); }

/// Bytes in use of the step's own memory after each part of it.
struct Trace {
  Trace(const Stream& stream, const models::ModelConfig& config)
      : model(config), store(model.parameters(), stream, DType::f32), optimizer(store, stream, Rig::quick()), step(model, store, optimizer, stream, {.graphs = false}) {
    step.after_part = [this](const std::string& part) {
      parts.push_back(part);
      bytes.push_back(step.stream().allocator().bytes_in_use());
    };
  }
  models::RtDetr model;
  train::ParameterStore store;
  train::Optimizer optimizer;
  train::Step step;
  std::vector<std::string> parts;
  std::vector<std::size_t> bytes;
};

std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

}  // namespace

TEST_CASE("memory plan: a planned step makes and drops what a real one does", "[cpu]") {
  const models::ModelConfig config = tiny_config();
  const data::Batch batch = make_batch(two_pictures(), config.decoder);
  Trace real(Stream::cpu(1, std::make_shared<SegmentedMemory>()), config), planned(Stream::planning(Device::cuda(0)), config);
  real.store.initialise(0);
  REQUIRE(real.step.run(batch, 1).applied);
  planned.step.plan(train::key_of(batch));
  CHECK(real.parts.size() > 200);
  CHECK(real.parts == planned.parts);
  CHECK(real.bytes == planned.bytes);
  // The real one has its kernels' scratch besides.
  CHECK(planned.step.peak_bytes() >= *std::max_element(planned.bytes.begin(), planned.bytes.end()));
  CHECK(planned.step.peak_bytes() <= real.step.peak_bytes());
  CHECK(planned.step.stream().allocator().bytes_in_use() == real.step.stream().allocator().bytes_in_use());

  expect_throws<InvalidArgument>([&] { real.step.plan(train::key_of(batch)); }, "plan() is for a planning stream");
  expect_throws<InvalidArgument>([&] { planned.step.run(batch, 1); }, "a planning stream runs no steps");
}

TEST_CASE("memory plan: grows with the batch in a straight line", "[cpu]") {
  std::vector<MemoryPlan> plans;
  for (const std::int64_t pictures : {4, 8, 12}) plans.push_back(train::plan_memory(r50(pictures)));
  const auto growth = [&](std::size_t i) { return static_cast<double>(plans[i + 1].activations - plans[i].activations); };
  expect_close(growth(1), growth(0), 0.01);
  expect_close(static_cast<double>(plans[1].activations), 2 * static_cast<double>(plans[0].activations), 0.05);
  CHECK(plans[0].state == plans[1].state);
  CHECK(plans[0].inputs < plans[1].inputs);
  for (const MemoryPlan& plan : plans) {
    CHECK(plan.unused >= 0);
    CHECK(plan.unused <= 2 * static_cast<std::int64_t>(kCudaSegmentBytes));   // between weights, gradients and moments
    CHECK(plan.reserve == plan.activations + plan.allowance - train::kScratchBytes);
    CHECK(plan.total() == plan.state + plan.inputs + plan.activations + plan.unused + plan.allowance);
  }
}

TEST_CASE("memory plan: R50 at the recipe's size", "[cpu]") {
  static_cast<void>(train::plan_memory(r50(64)));   // what the process itself grows by is not counted below
  const std::int64_t resident = resident_bytes();
  const auto start = std::chrono::steady_clock::now();
  const MemoryPlan plan = train::plan_memory(r50(64));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  CAPTURE(train::describe(plan, 0), seconds);
  expect_close(static_cast<double>(plan.activations), 20.4 * kGib, 0.15);   // as measured on an H200, scratch included
  CHECK(static_cast<double>(plan.state) > 42e6 * 22);   // 22 bytes for a parameter
  CHECK(static_cast<double>(plan.state) < 44e6 * 23);
  CHECK(plan.inputs >= 64 * 640 * 640 * 3);
  CHECK(seconds < 1);
  CHECK(resident_bytes() - resident < 64 << 20);
}

TEST_CASE("memory plan: all keys of a run count", "[cpu]") {
  data::LoaderOptions options;
  options.transforms = data::training_transforms(64, 96);
  options.batch_size = 6;
  options.denoising.num_denoising = 8;
  CHECK(train::keys_of(options, 5) == std::vector<StepKey>{{{6, 64, 96, 3}, 64, 96, 32, 16}});
  options.scales = {96, 64, 96};
  options.scales_stop_epoch = 0;
  CHECK(train::keys_of(options, 5).size() == 1);
  options.scales_stop_epoch = 3;
  options.ranks = 2;
  CHECK(train::keys_of(options, 20) == std::vector<StepKey>{{{3, 64, 96, 3}, 64, 64, 32, 16}, {{3, 64, 96, 3}, 64, 64, 32, 64},
                                                            {{3, 64, 96, 3}, 64, 96, 32, 16}, {{3, 64, 96, 3}, 64, 96, 32, 64},
                                                            {{3, 64, 96, 3}, 96, 96, 32, 16}, {{3, 64, 96, 3}, 96, 96, 32, 64}});
  options.denoising.num_denoising = 0;
  const std::vector<StepKey> many = train::keys_of(options, 33);
  REQUIRE(many.size() == 6);
  CHECK(many.back() == StepKey{{3, 64, 96, 3}, 96, 96, 128, 0});

  MemoryRequest request = request_for(tiny_config(), 3, 64, DType::f32);
  request.keys = {many.front()};
  const MemoryPlan one = train::plan_memory(request);
  request.keys = many;
  const MemoryPlan all = train::plan_memory(request);
  CHECK(all.largest.height == 96);
  CHECK(all.largest.width == 96);
  CHECK(all.inputs > one.inputs);
  CHECK(all.inputs >= 3 * 64 * 96 * 3);
  CHECK(all.inputs < 6 * one.inputs);   // the keys share their pictures
  CHECK(all.activations > one.activations);
  request.evaluation = {40, 64, 64, 3};   // more at a time than a step has
  CHECK(train::plan_memory(request).activations > all.activations);
  request.keys.clear();
  expect_throws<InvalidArgument>([&] { train::plan_memory(request); }, "no step to plan for");
}

TEST_CASE("memory plan: many sizes leave no gaps in what is reserved", "[cpu]") {
  MemoryRequest request = r50(16);
  request.keys.clear();
  for (const std::int64_t side : {480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800}) request.keys.push_back({{16, 640, 640, 3}, side, side, 32, 200});
  const MemoryPlan plan = train::plan_memory(request);
  CHECK(plan.largest.height == 800);
  CHECK(plan.unused <= 2 * static_cast<std::int64_t>(kCudaSegmentBytes));
  // Bit by bit, the smaller sizes' segments are left over.
  const Stream stream = Stream::planning(Device::cuda(0));
  models::RtDetr model(models::variant_config("r50"));
  train::ParameterStore store(model.parameters(), stream, DType::f32, DType::bf16);
  train::Optimizer optimizer(store, stream, Rig::quick());
  train::Step step(model, store, optimizer, stream);
  for (const StepKey& key : request.keys) step.plan(key);
  const Allocator& arena = step.stream().allocator();
  CHECK(static_cast<std::int64_t>(arena.peak_bytes()) == plan.activations);
  CHECK(static_cast<std::int64_t>(arena.bytes_in_use() + arena.bytes_cached()) > plan.reserve);

  train::Step reserved(model, store, optimizer, stream);
  reserved.reserve(plan.reserve);
  CHECK(reserved.peak_bytes() >= static_cast<std::size_t>(plan.reserve));
  reserved.stream().allocator().free_cache();   // nothing of it goes: a graph may use these addresses
  CHECK(reserved.stream().allocator().bytes_cached() > static_cast<std::size_t>(plan.reserve) - 1024);
}

TEST_CASE("memory plan: what does not fit is refused with the numbers", "[cpu]") {
  const MemoryRequest request = r50(64);
  const MemoryPlan plan = train::plan_memory(request);
  train::expect_fit(request, plan, plan.total());
  const auto free_bytes = static_cast<std::int64_t>(12 * kGib);
  const std::int64_t batch = train::largest_batch(request, free_bytes);
  CHECK(batch > 16);
  CHECK(train::plan_memory(r50(batch)).total() <= free_bytes);
  CHECK(train::plan_memory(r50(batch + 1)).total() > free_bytes);
  CHECK(train::largest_batch(request, plan.total()) == 64);
  expect_throws<OutOfMemory>([&] { train::expect_fit(request, plan, free_bytes); }, "train does not fit on cuda:0: needs 2");
  expect_throws<OutOfMemory>([&] { train::expect_fit(request, plan, free_bytes); }, concat(" GiB at 640 x 640 with 32 box slots, 12.00 free; --batch-size ", batch, " fits"));
  expect_throws<OutOfMemory>([&] { train::expect_fit(request, plan, 1 << 30); }, "1.00 free; --batch-size 1 does not fit either");
}

TEST_CASE("memory plan: a run is none the wiser", "[cpu]") {
  const data::Batch batch = make_batch(two_pictures(), tiny_config().decoder);
  Rig plain, planned;
  plain.step.run(batch, 1);
  train::plan_memory(request_for(tiny_config(), 2, 64, DType::bf16));
  planned.step.run(batch, 1);
  train::plan_memory(request_for(tiny_config(), 2, 64, DType::bf16));
  CHECK(plain.hash() == planned.hash());
}

// Streams on which nothing runs, and where a stream's memory comes from.
#include "runtime/stream.h"

#include <cstdlib>

#include "runtime/gpus.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;

namespace {

/// Host memory that counts.
class CountedMemory final : public MemorySource {
 public:
  Device device() const override { return Device::cpu(); }
  void* take(std::size_t bytes) override {
    taken += bytes;
    return std::aligned_alloc(64, bytes);
  }
  void give(void* memory, std::size_t bytes) override {
    taken -= bytes;
    std::free(memory);
  }
  std::size_t taken = 0;
};

}  // namespace

TEST_CASE("stream: a planning stream has addresses and no memory", "[cpu]") {
  const Stream stream = Stream::planning(Device::cuda(3));
  CHECK(stream.is_planning());
  CHECK(stream.device() == Device::cuda(3));
  CHECK_FALSE(Stream::cpu(1).is_planning());

  const std::int64_t tebi = std::int64_t{1} << 40;
  const Tensor large = stream.zeros({tebi}, DType::u8), small = stream.empty({3}, DType::f32);   // more than any machine has
  CHECK(large.device() == Device::cuda(3));
  CHECK(large.raw() != nullptr);
  CHECK(small.raw() != large.raw());
  CHECK(stream.allocator().bytes_in_use() == static_cast<std::size_t>(tebi) + 512);
  CHECK(stream.allocator().bytes_cached() == kCudaSegmentBytes - 512);   // in segments, like the device's own memory

  Tensor copied = stream.to_device(host_tensor<float>({3}, std::vector<float>{1, 2, 3}));
  CHECK(copied.device() == Device::cuda(3));
  stream.copy(small, copied);
  stream.wait();
  stream.record().wait();
  expect_throws<InvalidArgument>([&] { stream.copy(large, copied); }, "copy: ");
  expect_throws<InvalidArgument>([&] { static_cast<void>(stream.to_host(copied)); }, "on a planning stream nothing has been computed: f32(3)");
  expect_throws<InvalidArgument>([&] { static_cast<void>(stream.capture([] {})); }, "a planning stream has no graphs");

  const Stream arena = stream.with_arena();
  CHECK(arena.is_planning());
  const Tensor dropped = arena.empty({5}, DType::f64);
  CHECK(arena.allocator().bytes_in_use() == 512);
  const Tensor kept = arena.lasting().empty({5}, DType::f64);
  CHECK(arena.allocator().bytes_in_use() == 512);
}

TEST_CASE("stream: a planning stream of the CPU takes what the CPU takes", "[cpu]") {
  const Stream planning = Stream::planning(Device::cpu()), real = Stream::cpu(1);
  for (const Stream* stream : {&planning, &real}) {
    Tensor a = stream->empty({100}, DType::u8);
    const Tensor b = stream->empty({3, 1 << 20}, DType::u8);
    a = stream->empty({120}, DType::u8);
  }
  CHECK(planning.allocator().bytes_in_use() == real.allocator().bytes_in_use());
  CHECK(planning.allocator().bytes_cached() == real.allocator().bytes_cached());
  CHECK(planning.allocator().peak_bytes() == real.allocator().peak_bytes());
}

TEST_CASE("stream: an arena is on the memory of its stream", "[cpu]") {
  const auto memory = std::make_shared<CountedMemory>();
  {
    const Stream stream = Stream::cpu(1, memory), arena = stream.with_arena();
    const Tensor a = arena.zeros({64}, DType::u8);
    CHECK(memory->taken == 64);
    CHECK(stream.allocator().bytes_in_use() == 0);
    const Tensor b = arena.lasting().zeros({64}, DType::u8);
    CHECK(memory->taken == 128);
    CHECK(stream.allocator().bytes_in_use() == 64);
    CHECK(arena.lasting().to_host(b).raw() == b.raw());
  }
  CHECK(memory->taken == 0);
}

TEST_CASE("gpus: the CPU has no memory of a GPU", "[cpu]") {
  expect_throws<InvalidArgument>([] { static_cast<void>(memory_info(Device::cpu())); }, "memory_info: wanted a GPU, got cpu");
}

TEST_CASE("gpus: memory", "[gpu]") {
  const std::vector<Gpu> gpus = list_gpus();
  if (gpus.empty()) SKIP("no CUDA device");
  const GpuMemory before = memory_info(Device::cuda(0));
  CHECK(before.free_bytes > 0);
  CHECK(before.free_bytes <= before.total_bytes);
  CHECK(before.total_bytes <= gpus[0].memory_bytes);
  const Stream stream = Stream::cuda(0);
  const Tensor block = stream.empty({std::int64_t{1} << 29}, DType::u8);
  CHECK(memory_info(Device::cuda(0)).free_bytes <= before.total_bytes - block.bytes());
}

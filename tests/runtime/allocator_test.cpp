#include "runtime/allocator.h"

#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/support.h"

using namespace detr;
using namespace detr::test;

namespace {

/// Has so many bytes; counts what happens.
class FakeMemory final : public MemorySource {
 public:
  explicit FakeMemory(std::size_t bytes) : limit_(bytes) {}
  ~FakeMemory() override { CHECK(taken == 0); }
  Device device() const override { return {Device::Kind::cuda, 3}; }
  void* take(std::size_t bytes) override {
    ++takes;
    if (taken + bytes > limit_) {
      ++refusals;
      return nullptr;
    }
    taken += bytes;
    return std::aligned_alloc(64, bytes);
  }
  void give(void* memory, std::size_t bytes) override {
    ++gives;
    taken -= bytes;
    std::free(memory);
  }

  std::size_t taken = 0;
  int takes = 0, gives = 0, refusals = 0;

 private:
  std::size_t limit_;
};

}  // namespace

TEST_CASE("allocator: freed blocks are used again", "[cpu]") {
  const auto memory = std::make_shared<FakeMemory>(1 << 20);
  const auto allocator = Allocator::make(memory);
  CHECK(allocator->device() == Device{Device::Kind::cuda, 3});
  CHECK(allocator->allocate(0) == nullptr);
  auto a = allocator->allocate(100);
  const std::byte* place = a.get();
  CHECK(allocator->bytes_in_use() == 128);   // multiples of 64
  CHECK(allocator->bytes_cached() == 0);
  a.reset();
  CHECK(allocator->bytes_in_use() == 0);
  CHECK(allocator->bytes_cached() == 128);
  a = allocator->allocate(120);
  CHECK(a.get() == place);
  CHECK(memory->takes == 1);
  auto b = allocator->allocate(120);
  CHECK(b.get() != place);
  CHECK(allocator->peak_bytes() == 256);
  a.reset();
  b.reset();
  CHECK(allocator->peak_bytes() == 256);

  // A block more than an eighth too large is not wasted on a small request.
  a = allocator->allocate(64);
  CHECK(memory->takes == 3);
  allocator->free_cache();
  CHECK(allocator->bytes_cached() == 0);
  CHECK(memory->gives == 2);
  CHECK(memory->taken == 64);
}

TEST_CASE("allocator: a refusal frees the cache and tries once more", "[cpu]") {
  const auto memory = std::make_shared<FakeMemory>(1024);
  const auto allocator = Allocator::make(memory);
  const auto kept = allocator->allocate(256);
  static_cast<void>(allocator->allocate(512));   // goes to the cache at once
  CHECK(allocator->bytes_cached() == 512);
  const auto large = allocator->allocate(768);
  CHECK(large);
  CHECK(memory->refusals == 1);
  CHECK(memory->gives == 1);
  CHECK(allocator->bytes_cached() == 0);

  expect_throws<OutOfMemory>([&] { static_cast<void>(allocator->allocate(1)); }, "out of memory on cuda:3: 64 bytes asked, 1024 in use, 0 cached");
  CHECK(memory->refusals == 3);
  CHECK(allocator->bytes_in_use() == 1024);   // nothing was counted
  CHECK(allocator->peak_bytes() == 1024);
}

TEST_CASE("allocator: blocks keep it alive", "[cpu]") {
  const auto memory = std::make_shared<FakeMemory>(1024);
  auto allocator = Allocator::make(memory);
  auto block = allocator->allocate(64);
  allocator.reset();
  CHECK(memory->taken == 64);
  block.reset();
  CHECK(memory->taken == 0);
}

TEST_CASE("allocator: threads", "[cpu]") {
  const auto memory = std::make_shared<FakeMemory>(1 << 24);
  const auto allocator = Allocator::make(memory);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&allocator, t] {
      for (std::size_t i = 1; i < 500; ++i) allocator->allocate(i * 37 % 4096 + 1).get()[0] = static_cast<std::byte>(t);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(allocator->bytes_in_use() == 0);
  CHECK(allocator->bytes_cached() == memory->taken);
}

TEST_CASE("allocator: host memory is aligned", "[cpu]") {
  const auto allocator = Allocator::make(host_memory());
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{65}, (std::size_t{1} << 20) + 1}) {
    const auto block = allocator->allocate(bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(block.get()) % 64 == 0);
    block.get()[bytes - 1] = std::byte{1};
  }
}

namespace {

/// Comes in segments of 4096 bytes.
class SegmentMemory final : public MemorySource {
 public:
  ~SegmentMemory() override { CHECK(taken == 0); }
  Device device() const override { return Device::cuda(0); }
  std::size_t segment_bytes() const override { return 4096; }
  void* take(std::size_t bytes) override {
    taken += bytes;
    ++takes;
    return std::aligned_alloc(64, bytes);
  }
  void give(void* memory, std::size_t bytes) override {
    taken -= bytes;
    std::free(memory);
  }

  std::size_t taken = 0;
  int takes = 0;
};

}  // namespace

TEST_CASE("allocator: segments are cut and joined", "[cpu]") {
  const auto memory = std::make_shared<SegmentMemory>();
  const auto allocator = Allocator::make(memory);
  auto a = allocator->allocate(1000), b = allocator->allocate(1000), c = allocator->allocate(1000);
  CHECK(memory->takes == 1);
  CHECK(b.get() == a.get() + 1024);
  CHECK(c.get() == b.get() + 1024);
  CHECK(allocator->bytes_in_use() == 3 * 1024);
  CHECK(allocator->bytes_cached() == 1024);
  std::byte* start = a.get();
  a.reset();
  c.reset();   // joined with the free end
  CHECK(allocator->bytes_cached() == 3 * 1024);
  auto d = allocator->allocate(2048);
  CHECK(d.get() == start + 2048);
  allocator->free_cache();   // b and d hold the segment
  CHECK(memory->taken == 4096);
  b.reset();                 // joined with what was a
  auto e = allocator->allocate(2000);
  CHECK(e.get() == start);
  auto f = allocator->allocate(10000);   // larger than a segment
  CHECK(memory->takes == 2);
  CHECK(memory->taken == 4096 + 10240);
  d.reset();
  e.reset();
  f.reset();
  CHECK(allocator->bytes_in_use() == 0);
  CHECK(allocator->bytes_cached() == 4096 + 10240);
  allocator->free_cache();
  CHECK(memory->taken == 0);
  CHECK(allocator->bytes_cached() == 0);
}

TEST_CASE("allocator: random cutting and joining keeps blocks apart", "[cpu]") {
  const auto memory = std::make_shared<SegmentMemory>();
  const auto allocator = Allocator::make(memory);
  std::vector<std::pair<std::shared_ptr<std::byte>, std::size_t>> blocks;
  std::uint64_t state = 1;
  const auto draw = [&](std::uint64_t bound) { return (state = state * 6364136223846793005ULL + 1442695040888963407ULL, (state >> 33) % bound); };
  for (int i = 0; i < 3000; ++i) {
    if (blocks.size() > 20 || (!blocks.empty() && draw(2) == 0)) {
      const std::size_t k = draw(blocks.size());
      const auto fill = static_cast<unsigned char>(blocks[k].second % 251);
      bool intact = true;
      for (std::size_t j = 0; j < blocks[k].second; ++j) intact = intact && std::to_integer<unsigned char>(blocks[k].first.get()[j]) == fill;
      REQUIRE(intact);
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(k));
    } else {
      const std::size_t bytes = 1 + draw(3000);
      blocks.emplace_back(allocator->allocate(bytes), bytes);
      std::memset(blocks.back().first.get(), static_cast<int>(bytes % 251), bytes);
    }
  }
  blocks.clear();
  CHECK(allocator->bytes_in_use() == 0);
  allocator->free_cache();
  CHECK(allocator->bytes_cached() == 0);
}

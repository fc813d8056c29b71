#include "runtime/allocator.h"

#include <cstdlib>
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

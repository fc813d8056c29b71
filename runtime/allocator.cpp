#include "runtime/allocator.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "runtime/error.h"

namespace detr {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kLarge = std::size_t{1} << 20;
constexpr std::size_t kCutUnit = 512;

class HostMemory final : public MemorySource {
 public:
  Device device() const override { return Device::cpu(); }
  void* take(std::size_t bytes) override { return std::aligned_alloc(kAlignment, bytes); }
  void give(void* memory, std::size_t) override { std::free(memory); }
};

class PlannedMemory final : public MemorySource {
 public:
  explicit PlannedMemory(Device device) : device_(device) {}
  Device device() const override { return device_; }
  std::size_t segment_bytes() const override { return device_.is_cpu() ? 0 : kCudaSegmentBytes; }
  void* take(std::size_t bytes) override { return reinterpret_cast<void*>(next_.fetch_add((bytes + kAlignment - 1) / kAlignment * kAlignment)); }
  void give(void*, std::size_t) override {}

 private:
  Device device_;
  std::atomic<std::uintptr_t> next_ = std::uintptr_t{1} << 54;   // beyond what a process is given, so no address is anybody's
};

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

std::shared_ptr<MemorySource> host_memory() { return std::make_shared<HostMemory>(); }

std::shared_ptr<MemorySource> planned_memory(Device device) { return std::make_shared<PlannedMemory>(device); }

std::shared_ptr<Allocator> Allocator::make(std::shared_ptr<MemorySource> source) {
  return std::shared_ptr<Allocator>(new Allocator(std::move(source)));
}

Allocator::~Allocator() {
  kept_ = false;
  free_cache_locked();
}

std::shared_ptr<std::byte> Allocator::allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const bool cuts = source_->segment_bytes() > 0;
  const std::size_t size = round_up(bytes, cuts ? kCutUnit : bytes >= kLarge ? kLarge / 8 : kAlignment);
  std::byte* memory = nullptr;
  {
    const std::lock_guard lock(mutex_);
    auto block = take_free(size);
    if (block == blocks_.end()) block = take_segment(size);
    if (cuts) cut(block, size);
    block->second.free = false;
    in_use_ += block->second.bytes;
    peak_ = std::max(peak_, in_use_);
    memory = block->first;
  }
  return {memory, [self = shared_from_this()](std::byte* place) { self->give_back(place); }};
}

/// The smallest free block of at least `size` bytes, no longer listed as free; end() if there is none. One that cannot be cut may
/// waste at most an eighth, so that blocks of a repeated step find their place again.
Allocator::Blocks::iterator Allocator::take_free(std::size_t size) {
  const auto found = free_.lower_bound({size, nullptr});
  if (found == free_.end() || (source_->segment_bytes() == 0 && found->first > size + size / 8)) return blocks_.end();
  const auto block = blocks_.find(found->second);
  cached_ -= found->first;
  free_.erase(found);
  return block;
}

/// New memory of at least `size` bytes as one block that is not listed as free.
Allocator::Blocks::iterator Allocator::take_segment(std::size_t size) {
  // Where a whole segment is not to be had, what is asked for may still be; then again without the cache.
  for (const bool last_try : {false, true}) {
    if (last_try) free_cache_locked();
    for (const std::size_t bytes : {std::max(size, source_->segment_bytes()), size}) {
      if (void* memory = source_->take(bytes)) return blocks_.insert({static_cast<std::byte*>(memory), {bytes, true, false}}).first;
      if (bytes == size) break;
    }
  }
  throw OutOfMemory("out of memory on ", device(), ": ", size, " bytes asked, ", in_use_, " in use, ", cached_, " cached");
}

void Allocator::cut(Blocks::iterator block, std::size_t size) {
  const std::size_t rest = block->second.bytes - size;
  if (rest == 0) return;
  block->second.bytes = size;
  std::byte* place = block->first + size;
  blocks_.insert({place, {rest, false, true}});
  free_.insert({rest, place});
  cached_ += rest;
}

/// Adds the next block to this one if it is free and of the same segment; `block` itself is not listed as free.
void Allocator::join_next(Blocks::iterator block) {
  const auto next = std::next(block);
  if (next == blocks_.end() || !next->second.free || next->second.starts_segment) return;
  free_.erase({next->second.bytes, next->first});
  cached_ -= next->second.bytes;
  block->second.bytes += next->second.bytes;
  blocks_.erase(next);
}

void Allocator::give_back(std::byte* memory) {
  const std::lock_guard lock(mutex_);
  auto block = blocks_.find(memory);
  in_use_ -= block->second.bytes;
  if (source_->segment_bytes() > 0) {
    join_next(block);
    if (!block->second.starts_segment && std::prev(block)->second.free) {
      const auto before = std::prev(block);
      free_.erase({before->second.bytes, before->first});
      cached_ -= before->second.bytes;
      before->second.bytes += block->second.bytes;
      blocks_.erase(block);
      block = before;
    }
  }
  block->second.free = true;
  free_.insert({block->second.bytes, block->first});
  cached_ += block->second.bytes;
}

void Allocator::free_cache() {
  const std::lock_guard lock(mutex_);
  free_cache_locked();
}

void Allocator::keep_cache() {
  const std::lock_guard lock(mutex_);
  kept_ = true;
}

void Allocator::free_cache_locked() {
  if (kept_) return;
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    const auto next = std::next(block);
    const bool whole = block->second.starts_segment && (next == blocks_.end() || next->second.starts_segment);
    if (whole && block->second.free) {
      free_.erase({block->second.bytes, block->first});
      cached_ -= block->second.bytes;
      source_->give(block->first, block->second.bytes);
      blocks_.erase(block);
    }
    block = next;
  }
}

std::size_t Allocator::bytes_in_use() const {
  const std::lock_guard lock(mutex_);
  return in_use_;
}

std::size_t Allocator::bytes_cached() const {
  const std::lock_guard lock(mutex_);
  return cached_;
}

std::size_t Allocator::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_;
}

}  // namespace detr

#include "runtime/allocator.h"

#include <algorithm>
#include <cstdlib>

#include "runtime/error.h"

namespace detr {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kLarge = std::size_t{1} << 20;

class HostMemory final : public MemorySource {
 public:
  Device device() const override { return Device::cpu(); }
  void* take(std::size_t bytes) override { return std::aligned_alloc(kAlignment, bytes); }
  void give(void* memory, std::size_t) override { std::free(memory); }
};

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

std::shared_ptr<MemorySource> host_memory() { return std::make_shared<HostMemory>(); }

std::shared_ptr<Allocator> Allocator::make(std::shared_ptr<MemorySource> source) {
  return std::shared_ptr<Allocator>(new Allocator(std::move(source)));
}

Allocator::~Allocator() { free_cache_locked(); }

std::shared_ptr<std::byte> Allocator::allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const std::size_t size = round_up(bytes, bytes >= kLarge ? kLarge / 8 : kAlignment);
  std::byte* memory = nullptr;
  std::size_t taken = size;
  {
    const std::lock_guard lock(mutex_);
    // A cached block serves if it wastes at most an eighth, so that blocks of a repeated step find their place again.
    const auto found = cache_.lower_bound(size);
    if (found != cache_.end() && found->first <= size + size / 8) {
      taken = found->first;
      memory = found->second;
      cached_ -= taken;
      cache_.erase(found);
    } else {
      memory = static_cast<std::byte*>(source_->take(size));
      if (!memory) {
        free_cache_locked();
        memory = static_cast<std::byte*>(source_->take(size));
      }
      if (!memory) throw OutOfMemory("out of memory on ", device(), ": ", size, " bytes asked, ", in_use_, " in use, ", cached_, " cached");
    }
    in_use_ += taken;
    peak_ = std::max(peak_, in_use_);
  }
  return {memory, [self = shared_from_this(), taken](std::byte* block) { self->give_back(block, taken); }};
}

void Allocator::give_back(std::byte* memory, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  in_use_ -= bytes;
  cached_ += bytes;
  cache_.emplace(bytes, memory);
}

void Allocator::free_cache() {
  const std::lock_guard lock(mutex_);
  free_cache_locked();
}

void Allocator::free_cache_locked() {
  for (const auto& [bytes, memory] : cache_) source_->give(memory, bytes);
  cache_.clear();
  cached_ = 0;
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

#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "runtime/device.h"

namespace detr {

/// Raw memory of one device. The tests have a fake one that runs out on demand.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  virtual Device device() const = 0;
  /// Null when there is none left. bytes > 0; the result is aligned to 64 bytes.
  virtual void* take(std::size_t bytes) = 0;
  virtual void give(void* memory, std::size_t bytes) = 0;
};

/// Host memory.
std::shared_ptr<MemorySource> host_memory();

/// Caches freed blocks by size and hands them out again. A request that the source refuses frees the cache and tries once
/// more, then throws OutOfMemory with bytes asked, in use and cached. Thread-safe. Blocks keep the allocator alive.
class Allocator : public std::enable_shared_from_this<Allocator> {
 public:
  static std::shared_ptr<Allocator> make(std::shared_ptr<MemorySource> source);
  ~Allocator();

  /// A block of at least `bytes`; null for 0 bytes. Contents are undefined.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  void free_cache();

  Device device() const { return source_->device(); }
  std::size_t bytes_in_use() const;
  std::size_t bytes_cached() const;
  /// Highest bytes_in_use() so far.
  std::size_t peak_bytes() const;

 private:
  explicit Allocator(std::shared_ptr<MemorySource> source) : source_(std::move(source)) {}
  void give_back(std::byte* memory, std::size_t bytes);
  void free_cache_locked();

  std::shared_ptr<MemorySource> source_;
  mutable std::mutex mutex_;
  std::multimap<std::size_t, std::byte*> cache_;
  std::size_t in_use_ = 0, cached_ = 0, peak_ = 0;
};

}  // namespace detr

#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

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
  /// 0: each block is taken by itself. Else memory is taken in segments of at least so many bytes, which are cut into blocks.
  virtual std::size_t segment_bytes() const { return 0; }
};

/// What a GPU's memory is taken in.
inline constexpr std::size_t kCudaSegmentBytes = std::size_t{256} << 20;

/// Host memory.
std::shared_ptr<MemorySource> host_memory();

/// Addresses without memory, that fault where they are used, in a device's segments: what an allocator on it takes is what the
/// same requests would take on the device. Never refuses.
std::shared_ptr<MemorySource> planned_memory(Device device);

/// Caches freed blocks and hands them out again, the smallest that fits; where memory comes in segments, blocks are cut and freed
/// neighbours joined. A request that the source refuses frees the cache and tries once more, then throws OutOfMemory with bytes
/// asked, in use and cached. Thread-safe. Blocks keep the allocator alive.
class Allocator : public std::enable_shared_from_this<Allocator> {
 public:
  static std::shared_ptr<Allocator> make(std::shared_ptr<MemorySource> source);
  ~Allocator();

  /// A block of at least `bytes`; null for 0 bytes. Contents are undefined.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);
  /// Gives memory back to the source, as far as nothing of a segment is in use.
  void free_cache();
  /// From here on nothing is given back while the allocator lives: a captured graph may write to any of its addresses.
  void keep_cache();

  Device device() const { return source_->device(); }
  const std::shared_ptr<MemorySource>& source() const { return source_; }
  std::size_t bytes_in_use() const;
  std::size_t bytes_cached() const;
  /// Highest bytes_in_use() so far.
  std::size_t peak_bytes() const;

 private:
  struct Block {
    std::size_t bytes = 0;
    bool starts_segment = false, free = false;
  };
  using Blocks = std::map<std::byte*, Block>;

  explicit Allocator(std::shared_ptr<MemorySource> source) : source_(std::move(source)) {}
  Blocks::iterator take_free(std::size_t size);
  Blocks::iterator take_segment(std::size_t size);
  void cut(Blocks::iterator block, std::size_t size);
  void join_next(Blocks::iterator block);
  void give_back(std::byte* memory);
  void free_cache_locked();

  std::shared_ptr<MemorySource> source_;
  mutable std::mutex mutex_;
  Blocks blocks_;                                          // all, by address
  std::set<std::pair<std::size_t, std::byte*>> free_;      // the free ones, by size
  std::size_t in_use_ = 0, cached_ = 0, peak_ = 0;
  bool kept_ = false;
};

}  // namespace detr

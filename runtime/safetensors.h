#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "runtime/files.h"
#include "runtime/tensor.h"

namespace detr {

/// A tensor to be written, on the CPU, in the order of its shape.
struct NamedTensor {
  std::string name;
  Tensor tensor;
};

/// Called after each tensor that a file gives or takes: whoever waits for it can tell a slow disk from one that hangs.
using Moved = std::function<void()>;

/// Writes a safetensors file by replace_file: at every instant the old file or the complete new one exists; an old one is kept under
/// `previous` where that is not empty. Tensors lie by falling element size, then name; the header is padded with spaces to 8 bytes
/// and written after the data, so that a torn file has none. The metadata gets a hash of each tensor ("hash.<name>") and one of the
/// rest of the metadata ("hash"). With `moved` the data is synced on its way, and not all at the end. Throws StorageError with path and
/// reason; then the old file is intact.
void write_safetensors(const std::filesystem::path& file, std::span<const NamedTensor> tensors, const std::map<std::string, std::string>& metadata,
                       const std::filesystem::path& previous = {}, const Moved& moved = {});

/// A safetensors file opened for reading: its header is checked completely before anything is allocated.
class SafetensorsFile {
 public:
  /// Throws StorageError with path and reason: not there, header larger than the file or 16 MiB, bad JSON, duplicate names, over 100,000
  /// tensors, a name of over 512 bytes, unknown dtype, offsets that overlap, leave a hole or do not end at the file's end, sizes that
  /// overflow, hashes of some tensors or of the metadata without the rest of them.
  explicit SafetensorsFile(const std::filesystem::path& file, Moved moved = {});

  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return entries_.contains(name); }
  const Shape& shape(const std::string& name) const;
  /// Reads one tensor. F32, F64, I64, U8 and BOOL as they are (BOOL as u8), BF16 and F16 widened to f32, I32 to i64.
  /// Throws StorageError for an unknown name, a short read, or a hash in the metadata that does not fit the bytes.
  Tensor read(const std::string& name) const;
  /// Reads and compares all hashes that the metadata holds. Throws StorageError naming the first tensor that is damaged.
  void verify() const;

 private:
  void expect_hashes() const;

  struct Entry {
    std::string dtype;
    Shape shape;
    std::int64_t begin = 0, end = 0;
  };

  std::filesystem::path file_;
  Moved moved_;
  FileHandle handle_;   // kept open: where the file is replaced meanwhile, the old one is read to the end
  std::int64_t data_start_ = 0;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> metadata_;
};

/// 64-bit hash of bytes in order, for files: FNV-1a over 8-byte words in four interleaved lanes. Not cryptographic.
std::uint64_t hash_bytes(std::span<const std::byte> bytes, std::uint64_t seed = 0);

}  // namespace detr

#pragma once
#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

namespace detr {

/// An open file descriptor, closed with the object.
class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int descriptor) : descriptor_(descriptor) {}
  FileHandle(FileHandle&& other) noexcept : descriptor_(other.release()) {}
  FileHandle& operator=(FileHandle&& other) noexcept;
  ~FileHandle();

  int get() const { return descriptor_; }
  int release();

 private:
  int descriptor_ = -1;
};

/// Puts a file in place so that at every instant the old one or the complete new one exists: `write` fills a temporary file in the
/// same folder (made with O_CREAT | O_EXCL | O_NOFOLLOW, `bytes` reserved first), which is then synced, closed and renamed, and the
/// folder synced. Where `previous` is not empty, a file that stood at `file` is kept under that name. Throws StorageError with path
/// and reason (no space, a failed sync, ...); then the temporary file is gone and the old one intact.
void replace_file(const std::filesystem::path& file, std::size_t bytes, const std::filesystem::path& previous,
                  const std::function<void(int descriptor)>& write);

/// The same for a text or a block of bytes held in memory.
void replace_file(const std::filesystem::path& file, std::string_view content);

/// Makes a folder, with those above it, where it is not there. Throws StorageError.
void make_folder(const std::filesystem::path& folder);

/// Removes temporary files that replace_file left in a folder when its process was killed: those whose process is gone.
void remove_stale_temporaries(const std::filesystem::path& folder);

/// write(2) and pread(2) until all is done; EINTR and short transfers are retried. Throw StorageError naming `file`.
void write_all(int descriptor, std::span<const std::byte> bytes, const std::filesystem::path& file);
void read_all(int descriptor, std::span<std::byte> bytes, std::size_t offset, const std::filesystem::path& file);

}  // namespace detr

#pragma once
#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

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
/// same folder (made with O_CREAT | O_EXCL | O_NOFOLLOW for this user alone, `bytes` reserved first), which is then synced, closed
/// and renamed, and the folder synced; the file then has the mode that the umask gives. Where `previous` is not empty, a file that
/// stood at `file` is kept under that name. Throws StorageError with path and reason (no space, a failed sync, ...), or what `write`
/// throws; then the temporary file is gone and the old one intact. A link is followed (with `previous`: replaced, and kept there); a device or pipe is written into as it is.
void replace_file(const std::filesystem::path& file, std::size_t bytes, const std::filesystem::path& previous,
                  const std::function<void(int descriptor)>& write);

/// The same for a text or a block of bytes held in memory. `check`, where given, reads the complete file under its temporary name, and
/// throws where it must not be put in place.
void replace_file(const std::filesystem::path& file, std::string_view content, const std::function<void(const std::filesystem::path& written)>& check = {});

/// The same without syncing, for files that come by the thousand and are easily made again: after a power failure one may be empty.
void replace_file_unsynced(const std::filesystem::path& file, std::string_view content);

/// Makes a folder, with those above it, where it is not there. Throws StorageError.
void make_folder(const std::filesystem::path& folder);

/// Removes temporary files that replace_file left in a folder when its process was killed: those of this host whose process is gone.
void remove_stale_temporaries(const std::filesystem::path& folder);

/// write(2) and pread(2) until all is done; EINTR and short transfers are retried. Throw StorageError naming `file`.
void write_all(int descriptor, std::span<const std::byte> bytes, const std::filesystem::path& file);
void read_all(int descriptor, std::span<std::byte> bytes, std::size_t offset, const std::filesystem::path& file);

}  // namespace detr

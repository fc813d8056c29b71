#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/files.h"

namespace detr::data {

/// An image file open for reading. Every error is a DataError that names the file.
class ImageFile {
 public:
  /// Throws DataError if the file is missing, a folder or no regular file, not readable, empty, or beyond 1 GiB. Never waits for a pipe.
  explicit ImageFile(const std::filesystem::path& path);
  /// The same for a file that is open, of any kind; `path` is for messages. An invalid handle: errno says why it could not be opened.
  ImageFile(const std::filesystem::path& path, FileHandle handle);

  const std::string& name() const { return name_; }   ///< the path, fit for a message of one line
  std::int64_t size() const { return size_; }   ///< in bytes, at least 1
  /// Bytes [offset, offset + count), fewer where the file ends before. Throws DataError if reading fails.
  std::vector<std::uint8_t> read(std::int64_t offset, std::int64_t count) const;

 private:
  std::string name_;
  FileHandle handle_;
  std::int64_t size_ = 0;
};

}  // namespace detr::data

#pragma once
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace detr::data {

/// An image file open for reading. Every error is a DataError that names the file.
class ImageFile {
 public:
  /// Throws DataError if the file is missing, a folder or no regular file, not readable, empty, or beyond 1 GiB.
  explicit ImageFile(const std::filesystem::path& path);

  const std::string& name() const { return name_; }   ///< the path, fit for a message of one line
  std::int64_t size() const { return size_; }   ///< in bytes, at least 1
  /// Bytes [offset, offset + count), fewer where the file ends before. Throws DataError if reading fails.
  std::vector<std::uint8_t> read(std::int64_t offset, std::int64_t count);

 private:
  std::string name_;
  std::ifstream stream_;
  std::int64_t size_ = 0;
};

}  // namespace detr::data

#include "data/image_file.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "data/text.h"
#include "runtime/error.h"

namespace detr::data {
namespace {

constexpr std::int64_t kMaxFileBytes = std::int64_t{1} << 30;

/// Folder and file each by themselves, since a long text is cut at its end and the file's name counts most.
std::string printable_path(const std::filesystem::path& path) {
  const std::string file = printable(path.filename());
  return path.has_parent_path() && path.has_filename() ? printable(path.parent_path()) + "/" + file : printable(path);
}

}  // namespace

ImageFile::ImageFile(const std::filesystem::path& path) : name_(printable_path(path)) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) throw DataError(name_, ": no such image file");
  if (error) throw DataError(name_, ": the image cannot be read: ", error.message());
  if (std::filesystem::is_directory(status)) throw DataError(name_, ": is a folder, not an image");
  // Opening a pipe would wait for ever.
  if (!std::filesystem::is_regular_file(status)) throw DataError(name_, ": is not a regular file, so not an image");

  errno = 0;
  stream_.open(path, std::ios::binary);
  if (!stream_) {
    throw DataError(name_, ": the image cannot be read: ", std::generic_category().message(errno ? errno : EIO));
  }
  size_ = static_cast<std::int64_t>(std::filesystem::file_size(path, error));
  if (error) throw DataError(name_, ": the image cannot be read: ", error.message());
  if (size_ == 0) throw DataError(name_, ": the image file is empty");
  if (size_ > kMaxFileBytes) throw DataError(name_, ": too large for an image: ", size_, " bytes");
}

std::vector<std::uint8_t> ImageFile::read(std::int64_t offset, std::int64_t count) {
  count = std::clamp<std::int64_t>(size_ - offset, 0, count);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count));
  stream_.clear();
  stream_.seekg(offset);
  stream_.read(reinterpret_cast<char*>(bytes.data()), count);
  if (stream_.bad()) throw DataError(name_, ": the image cannot be read: input error");
  bytes.resize(static_cast<std::size_t>(stream_.gcount()));   // fewer where the file has shrunk meanwhile
  return bytes;
}

}  // namespace detr::data

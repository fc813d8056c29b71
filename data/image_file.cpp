#include "data/image_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "data/text.h"
#include "runtime/error.h"

namespace detr::data {
namespace {

constexpr std::int64_t kMaxFileBytes = std::int64_t{1} << 30;
constexpr int kOpenFlags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;   // opening a pipe would wait for ever

/// Folder and file each by themselves, since a long text is cut at its end and the file's name counts most.
std::string printable_path(const std::filesystem::path& path) {
  const std::string file = printable(path.filename());
  return path.has_parent_path() && path.has_filename() ? printable(path.parent_path()) + "/" + file : printable(path);
}

}  // namespace

ImageFile::ImageFile(const std::filesystem::path& path) : ImageFile(path, FileHandle(::open(path.c_str(), kOpenFlags))) {}

ImageFile::ImageFile(const std::filesystem::path& path, FileHandle handle) : handle_(std::move(handle)) {
  const int reason = errno;
  name_ = printable_path(path);
  const auto refuse = [&](const auto&... parts) { throw DataError(name_, parts...); };
  if (handle_.get() < 0) {
    if (reason == ENOENT || reason == ENOTDIR) refuse(": no such image file");
    if (reason == ENXIO) refuse(": is not a regular file, so not an image");   // a socket
    refuse(": the image cannot be read: ", std::generic_category().message(reason));
  }
  // Asked of the open file: under its name another one may stand by now.
  struct stat info {};
  if (::fstat(handle_.get(), &info) != 0) refuse(": the image cannot be read: ", std::generic_category().message(errno));
  if (S_ISDIR(info.st_mode)) refuse(": is a folder, not an image");
  if (!S_ISREG(info.st_mode)) refuse(": is not a regular file, so not an image");
  size_ = info.st_size;
  if (size_ == 0) refuse(": the image file is empty");
  if (size_ > kMaxFileBytes) refuse(": too large for an image: ", size_, " bytes");
}

std::vector<std::uint8_t> ImageFile::read(std::int64_t offset, std::int64_t count) const {
  count = std::clamp<std::int64_t>(size_ - offset, 0, count);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count));
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::pread(handle_.get(), bytes.data() + done, bytes.size() - done, offset + static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw DataError(name_, ": the image cannot be read: ", std::generic_category().message(errno));
    if (n == 0) break;   // the file has shrunk meanwhile
    done += static_cast<std::size_t>(n);
  }
  bytes.resize(done);
  return bytes;
}

}  // namespace detr::data

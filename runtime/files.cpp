#include "runtime/files.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <regex>

#include "runtime/error.h"
#include "runtime/text.h"

namespace detr {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail(const fs::path& file, const char* what, int error) {
  throw StorageError(file.string(), ": ", what, ": ", std::strerror(error), error == ENOSPC ? "; free some space" : "");
}

/// Removes a temporary file unless it was renamed.
class Temporary {
 public:
  explicit Temporary(fs::path path) : path_(std::move(path)) {}
  ~Temporary() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  const fs::path& path() const { return path_; }
  void keep() { path_.clear(); }

 private:
  fs::path path_;
};

fs::path folder_of(const fs::path& file) { return file.has_parent_path() ? file.parent_path() : fs::path("."); }

void sync_folder(const fs::path& folder) {
  const FileHandle handle(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (handle.get() < 0) fail(folder, "cannot be opened", errno);
  // Some file systems cannot sync a folder and say so; the rename stands all the same.
  if (::fsync(handle.get()) != 0 && errno != EINVAL && errno != ENOTSUP) fail(folder, "cannot be synced", errno);
}

void close_checked(FileHandle handle, const fs::path& file) {
  if (::close(handle.release()) != 0) fail(file, "cannot be closed", errno);
}

/// This host's name as part of a file's: processes of other hosts may write into the same folder.
const std::string& host_part() {
  static const std::string part = [] {
    std::array<char, 256> name{};
    std::string text = ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
    std::replace_if(text.begin(), text.end(), [](unsigned char c) { return !std::isalnum(c); }, '-');
    return "host-" + text.substr(0, 64);
  }();
  return part;
}

/// A hidden name in the file's folder that no other process and thread takes.
fs::path temporary_name(const fs::path& file, const char* ending) {
  static std::atomic<unsigned> counter{0};
  const std::string name = file.filename().string();
  const std::string stem = name.size() <= 100 ? name : "long-name";   // a file's name may be as long as the file system takes
  return folder_of(file) / concat(".", stem, ".", host_part(), ".", ::getpid(), ".", counter++, ending);
}

/// The mode that open(2) would give a new file. Read from the kernel's table: umask(2) can only be asked by changing it.
mode_t usual_mode() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("Umask:")) return 0666 & ~static_cast<mode_t>(std::strtoul(line.c_str() + 6, nullptr, 8));
  }
  return 0600;
}

enum class Sync { yes, no };

/// Where a link leads, if it leads anywhere: the file is replaced there.
fs::path end_of_link(const fs::path& file) {
  std::error_code error;
  if (!fs::is_symlink(fs::symlink_status(file, error)) || !fs::exists(file, error)) return file;
  const fs::path target = fs::canonical(file, error);
  if (error) throw StorageError(file.string(), ": cannot be followed: ", error.message());
  return target;
}

/// `check` may be empty.
void replace(const fs::path& name, std::size_t bytes, const fs::path& previous, Sync sync, const std::function<void(int)>& write, const std::function<void(const fs::path&)>& check) {
  std::error_code ignored;
  if (fs::is_other(name, ignored)) {   // a device or a pipe takes what comes, and stays
    FileHandle device(::open(name.c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC));
    if (device.get() < 0) fail(name, "cannot be opened", errno);
    write(device.get());
    return close_checked(std::move(device), name);
  }
  const fs::path file = previous.empty() ? end_of_link(name) : name;   // else a file on another file system could not be kept under `previous`
  Temporary temporary(temporary_name(file, ".tmp"));
  FileHandle handle(::open(temporary.path().c_str(), O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (handle.get() < 0) {
    const int error = errno;
    temporary.keep();   // it is not ours
    fail(file, "cannot be created", error);
  }
  if (bytes > 0) {
    // Not every file system can reserve; then a full disk shows while writing.
    const int error = ::posix_fallocate(handle.get(), 0, static_cast<off_t>(bytes));
    if (error == ENOSPC || error == EFBIG || error == EDQUOT) fail(file, "cannot reserve its size", error);
  }
  write(handle.get());
  static_cast<void>(::fchmod(handle.get(), usual_mode()));   // a file system without modes refuses, and needs none
  if (sync == Sync::yes && ::fsync(handle.get()) != 0) fail(file, "cannot be synced", errno);
  close_checked(std::move(handle), file);
  if (check) check(temporary.path());
  if (!previous.empty()) {
    // A second name for the old file, so that it outlives the rename below.
    Temporary link(temporary_name(file, ".old.tmp"));
    if (::link(file.c_str(), link.path().c_str()) == 0) {
      if (::rename(link.path().c_str(), previous.c_str()) != 0) fail(previous, "cannot be renamed", errno);
    } else if (errno != ENOENT) {
      if (errno != EPERM && errno != ENOTSUP) fail(previous, "cannot be linked", errno);
      if (::rename(file.c_str(), previous.c_str()) != 0) fail(previous, "cannot be renamed", errno);   // no hard links here
    }
  }
  if (::rename(temporary.path().c_str(), file.c_str()) != 0) fail(file, "cannot be renamed into place", errno);
  temporary.keep();
  if (sync == Sync::yes) sync_folder(folder_of(file));
}

std::function<void(int)> writer_of(const fs::path& file, std::string_view content) {
  return [&file, content](int descriptor) { write_all(descriptor, std::as_bytes(std::span(content.data(), content.size())), file); };
}

}  // namespace

FileHandle& FileHandle::operator=(FileHandle&& other) noexcept {
  if (this != &other) {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = other.release();
  }
  return *this;
}

FileHandle::~FileHandle() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

int FileHandle::release() {
  const int descriptor = descriptor_;
  descriptor_ = -1;
  return descriptor;
}

void write_all(int descriptor, std::span<const std::byte> bytes, const fs::path& file) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(descriptor, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(file, "cannot be written", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

void read_all(int descriptor, std::span<std::byte> bytes, std::size_t offset, const fs::path& file) {
  while (!bytes.empty()) {
    const ssize_t n = ::pread(descriptor, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(file, "cannot be read", errno);
    if (n == 0) throw StorageError(file.string(), ": ends at byte ", offset, ", more was expected");
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += static_cast<std::size_t>(n);
  }
}

void replace_file(const fs::path& file, std::size_t bytes, const fs::path& previous, const std::function<void(int)>& write) { replace(file, bytes, previous, Sync::yes, write, {}); }

void replace_file(const fs::path& file, std::string_view content, const std::function<void(const fs::path&)>& check) {
  replace(file, content.size(), {}, Sync::yes, writer_of(file, content), check);
}

void replace_file_unsynced(const fs::path& file, std::string_view content) { replace(file, 0, {}, Sync::no, writer_of(file, content), {}); }

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw StorageError(escape_control(folder.string()), ": cannot be made: ", error.message());
}

void remove_stale_temporaries(const fs::path& folder) {
  static const std::regex pattern("\\..+\\.(host-[^.]*)\\.([0-9]+)\\.[0-9]+(\\.old)?\\.tmp");
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    std::smatch parts;
    if (!std::regex_match(name, parts, pattern) || parts[1] != host_part() || parts[2].length() > 9) continue;
    if (::kill(static_cast<pid_t>(std::stol(parts[2])), 0) != 0 && errno == ESRCH) fs::remove(entry.path(), error);
  }
}

}  // namespace detr

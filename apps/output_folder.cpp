#include "apps/output_folder.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>

#include "apps/cli.h"
#include "runtime/error.h"

namespace detr::apps {
namespace {

namespace fs = std::filesystem;

/// A folder with nothing but a lock in it counts as empty.
bool has_content(const fs::path& folder) {
  return std::any_of(fs::directory_iterator(folder), fs::directory_iterator(), [](const fs::directory_entry& entry) { return entry.path().filename() != ".lock"; });
}

/// Makes the folder with the next free number: of runs that start at once, one gets each.
fs::path make_next(const std::string& name) {
  make_folder("runs");
  for (int i = 1;; ++i) {
    std::string digits = std::to_string(i);
    digits.insert(0, digits.size() < 3 ? 3 - digits.size() : 0, '0');
    const fs::path folder = fs::path("runs") / (name + "-" + digits);
    std::error_code error;
    if (fs::create_directory(folder, error)) return folder;
    if (error && !fs::exists(folder)) throw StorageError(folder.string(), ": cannot be made: ", error.message());
  }
}

}  // namespace

FileHandle lock_folder(const fs::path& folder) {
  FileHandle lock(::open((folder / ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644));
  if (lock.get() < 0) throw StorageError(folder.string(), ": cannot be written to");
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) throw StorageError(folder.string(), ": is in use by a running job; wait for its end or take another --output-dir");
  remove_stale_temporaries(folder);
  return lock;
}

OutputFolder::OutputFolder(const FolderRequest& request, const train::RunConfig& config, FileHandle lock) : lock_(std::move(lock)) {
  const fs::path& resume = request.resume;
  bool numbered = false;
  if (!request.output_dir.empty()) path_ = request.output_dir;
  else if (!resume.empty()) path_ = resume.has_parent_path() ? resume.parent_path() : ".";
  else if (!config.output_dir.empty()) path_ = config.output_dir;
  else path_ = make_next(request.name), numbered = true;
  made_ = numbered || !fs::exists(path_);
  make_folder(path_);
  // -r auto in a folder without a checkpoint is a run that was stopped before its first save: it begins again there.
  const bool same = request.resume_auto || (!resume.empty() && fs::equivalent(resume.parent_path().empty() ? fs::path(".") : resume.parent_path(), path_));
  fresh_ = !has_content(path_);
  if (!fresh_ && !request.overwrite && !same) throw ConfigError("--output-dir ", path_.string(), " is not empty: -r auto goes on with the run in it, --overwrite starts anew");
  if (lock_.get() < 0) lock_ = lock_folder(path_);
  if (request.overwrite && resume.empty()) {
    std::error_code error;
    for (const char* old : {"last.safetensors", "last.safetensors.previous", "best.safetensors", "log.txt", "metrics.csv", "steps.csv", "train.log", "report.html"}) fs::remove(path_ / old, error);
    fs::remove_all(path_ / "fault", error);
  }
}

void OutputFolder::discard() noexcept {
  if (started_ || !fresh_) return;
  std::error_code ignored;
  for (const char* ours : {"config.json", "train.log", ".lock"}) fs::remove(path_ / ours, ignored);
  fs::remove_all(path_ / "fault", ignored);
  if (made_) fs::remove(path_, ignored);
}

}  // namespace detr::apps

#pragma once
#include <atomic>
#include <filesystem>
#include <string>

#include "runtime/files.h"
#include "train/config.h"

namespace detr::apps {

/// A lock on a folder that dies with the process; temporaries of dead writers are removed. Throws StorageError where another run holds it.
FileHandle lock_folder(const std::filesystem::path& folder);

/// How an output folder is asked for.
struct FolderRequest {
  std::filesystem::path output_dir;   ///< --output-dir; empty: the folder of `resume`, else the configuration's, else runs/<name>-NNN
  std::filesystem::path resume;       ///< the checkpoint that the run goes on from, or empty
  std::string name;                   ///< of the configuration
  bool resume_auto = false, overwrite = false;
};

/// Folder of a run, made if need be and locked (`lock`, where it was locked before).
/// Throws ConfigError where it is not empty and neither -r nor --overwrite is given, StorageError where it cannot be made or is in use.
class OutputFolder {
 public:
  OutputFolder(const FolderRequest& request, const train::RunConfig& config, FileHandle lock);
  ~OutputFolder() { discard(); }
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// From now on what is in the folder stays.
  void start() { started_ = true; }
  /// A start that failed leaves nothing behind, so that the corrected command finds an empty folder. For any thread; after start() it does nothing.
  void discard() noexcept;

 private:
  std::filesystem::path path_;
  FileHandle lock_;
  bool made_ = false, fresh_ = false;
  std::atomic<bool> started_{false};
};

}  // namespace detr::apps

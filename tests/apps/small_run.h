#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tests/apps/process.h"

namespace detr::test {

/// A small synthetic data set and the flags of runs on it that take well under a second.
class SmallData {
 public:
  explicit SmallData(const std::vector<std::string>& synth_flags = {});
  const TempDir& dir() const { return dir_; }
  std::string data() const { return (dir_ / "data").string(); }
  /// A path in the temporary folder.
  std::string path(const std::string& name) const { return (dir_ / name).string(); }
  /// `train` with everything but the data set: 96 pixels, batches of 2.
  std::vector<std::string> train_on(const std::string& folder, const std::string& output, const std::vector<std::string>& more = {}) const;
  std::vector<std::string> train(const std::string& output, const std::vector<std::string>& more = {}) const { return train_on(data(), output, more); }

 private:
  TempDir dir_;
};

nlohmann::json read_json(const std::filesystem::path& file);
std::vector<std::string> lines_of(const std::string& text);
/// The training losses of log.txt, one an epoch.
std::vector<double> losses_of(const std::filesystem::path& run);
/// Fails the test unless two safetensors files hold the same tensors, bit for bit.
void expect_same_tensors(const std::filesystem::path& a, const std::filesystem::path& b);

/// A copy of a COCO folder with other category ids (old -> new, in the same order), or otherwise changed annotation files. Image
/// folders are links.
void rewrite_data(const std::filesystem::path& from, const std::filesystem::path& to, const std::function<void(nlohmann::json&)>& change);

}  // namespace detr::test

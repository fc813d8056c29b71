#include "data/discover.h"

#include <fcntl.h>

#include <algorithm>
#include <optional>
#include <system_error>
#include <utility>

#include "data/text.h"
#include "runtime/error.h"

namespace detr::data {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kMaxNamed = 3;

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored) && !fs::is_directory(path, ignored);
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

/// The names that folders of a split may have.
std::vector<std::string> split_names(const std::string& split) {
  return split == "val" ? std::vector<std::string>{"val", "valid"} : std::vector<std::string>{split};
}

/// Whether the name stays inside its folder as far as the text goes: relative, and no `..` that leads above.
bool stays_inside(const std::string& file_name) {
  const fs::path path(file_name);
  if (path.is_absolute() || file_name.find('\0') != std::string::npos) return false;
  const fs::path normal = path.lexically_normal();
  return !normal.empty() && *normal.begin() != "..";
}

/// Files `annotations/instances_<split>*.json`, sorted.
std::vector<fs::path> matches(const fs::path& folder, const std::string& split) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator it(folder / "annotations", error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with("instances_" + split) && name.ends_with(".json") && is_file(it->path())) found.push_back(it->path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

/// All annotation files that a split could mean; one of them is an answer, several are a question.
std::vector<fs::path> candidates(const DataPlace& place, const std::string& split) {
  if (!place.annotations.empty()) return {place.annotations};
  if (place.folder.empty()) return {};
  const fs::path exact = place.folder / "annotations" / ("instances_" + split + ".json");
  if (is_file(exact)) return {exact};
  std::vector<fs::path> found = matches(place.folder, split);
  if (!found.empty()) return found;
  for (const std::string& name : split_names(split)) {
    const fs::path file = place.folder / name / "_annotations.coco.json";
    if (is_file(file)) found.push_back(file);
  }
  return found;
}

std::string join(const std::vector<fs::path>& paths) {
  std::string text;
  for (const fs::path& path : paths) text += (text.empty() ? "" : ", ") + printable(path);
  return text;
}

/// Folder that image folders are relative to: DIR, else the annotation file's folder (its parent where it is `annotations`).
fs::path base_folder(const DataPlace& place, const CocoData& data) {
  if (!place.folder.empty()) return place.folder;
  const fs::path folder = data.file.parent_path();
  return folder.filename() == "annotations" ? folder.parent_path() : folder;
}

std::vector<fs::path> image_folders(const fs::path& base, const std::string& split) {
  std::vector<fs::path> folders;
  const std::vector<std::string> names = split_names(split);
  for (const std::string& name : names) folders.push_back(base / "images" / name);
  for (const std::string& name : names) folders.push_back(base / "images" / (name + "2017"));
  for (const std::string& name : names) folders.push_back(base / (name + "2017"));
  for (const std::string& name : names) folders.push_back(base / name);
  folders.push_back(base / "images");
  folders.push_back(base.empty() ? fs::path(".") : base);
  return folders;
}

bool holds(const fs::path& folder, const ImageRecord& image) {
  return stays_inside(image.file_name) && is_file(folder / image.file_name);
}

/// How many file names exist in the folder, and the first that do not.
struct Coverage {
  fs::path folder;
  std::int64_t found = 0;
  std::vector<std::string> missing;   ///< the first `kMaxNamed`
};

Coverage cover(const fs::path& folder, const CocoData& data) {
  Coverage coverage{folder, 0, {}};
  if (!is_folder(folder)) return coverage;
  for (const ImageRecord& image : data.images) {
    if (holds(folder, image)) {
      ++coverage.found;
    } else if (coverage.missing.size() < kMaxNamed) {
      coverage.missing.push_back(image.file_name);
    }
  }
  return coverage;
}

/// A folder directly below `base` that has all the files, for a hint.
std::optional<fs::path> other_folder(const fs::path& base, const CocoData& data) {
  std::vector<fs::path> folders;
  std::error_code error;
  for (fs::directory_iterator it(base.empty() ? fs::path(".") : base, error), end; !error && it != end; it.increment(error)) {
    if (is_folder(it->path())) folders.push_back(it->path());
  }
  std::sort(folders.begin(), folders.end());
  const auto found = std::find_if(folders.begin(), folders.end(), [&](const fs::path& folder) {
    return std::all_of(data.images.begin(), data.images.end(), [&](const ImageRecord& image) { return holds(folder, image); });
  });
  return found == folders.end() ? std::nullopt : std::optional(*found);
}

/// An image inside its folder, links followed.
struct Followed {
  fs::path path;         ///< folder and name as they were given
  fs::path root, below;  ///< the folder, and the image relative to it, as they were found: without links
};

Followed follow(const fs::path& folder, const std::string& file_name) {
  const auto refuse = [&](const char* what) -> DataError {
    return DataError("image \"", printable(file_name), "\": ", what, " (", printable(folder),
                     "); make file_name relative to the folder");
  };
  if (file_name.empty()) throw refuse("the name is empty");
  if (fs::path(file_name).is_absolute()) throw refuse("the path is absolute");
  if (!stays_inside(file_name)) throw refuse("the path leads out of the image folder");
  Followed image;
  image.path = folder / file_name;
  std::error_code error;
  image.root = fs::weakly_canonical(folder, error);
  if (error) throw DataError(printable(folder), ": cannot be followed: ", error.message(), "; name another folder with --images");
  const fs::path real = fs::weakly_canonical(image.path, error);
  if (error) throw DataError("image \"", printable(file_name), "\": cannot be followed: ", error.message(), "; check its links");
  auto [in_root, in_real] = std::mismatch(image.root.begin(), image.root.end(), real.begin(), real.end());
  if (in_root != image.root.end()) throw refuse("a link leads out of the image folder");
  for (; in_real != real.end(); ++in_real) image.below /= *in_real;
  return image;
}

/// Part by part, and through no link. Where it fails the handle is invalid and errno says why.
FileHandle open_beneath(const Followed& image) {
  const bool is_root = image.below.empty();
  const fs::path last = is_root ? fs::path(".") : image.below.filename();
  FileHandle folder(::open(image.root.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  for (const fs::path& part : image.below.parent_path()) {
    if (folder.get() < 0) return folder;
    folder = FileHandle(::openat(folder.get(), part.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  }
  if (folder.get() < 0) return folder;
  return FileHandle(::openat(folder.get(), last.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW | O_CLOEXEC));
}

}  // namespace

fs::path override_for(const std::vector<std::string>& values, const std::string& split, const std::string& plain_split) {
  fs::path named, plain;
  for (const std::string& value : values) {
    if (value.starts_with(split + "=")) {
      named = value.substr(split.size() + 1);
    } else if (!value.starts_with("train=") && !value.starts_with("val=") && !value.starts_with("test=")) {
      plain = value;
    }
  }
  return !named.empty() || split != plain_split ? named : plain;
}

bool has_split(const DataPlace& place, const std::string& split) { return !candidates(place, split).empty(); }

fs::path find_annotations(const DataPlace& place, const std::string& split) {
  if (place.annotations.empty() && place.folder.empty())
    throw DataError("no data for ", split, "; give --data DIR or --ann FILE and --images DIR");
  if (place.annotations.empty() && !is_folder(place.folder))
    throw DataError(printable(place.folder), is_file(place.folder)
                                                 ? ": is a file, not a folder; use --ann for it"
                                                 : ": no such folder; --data takes the folder of the data set");
  const std::vector<fs::path> found = candidates(place, split);
  if (found.size() == 1) return found.front();
  if (found.size() > 1)
    throw DataError(found.size(), " annotation files for ", split, ": ", join(found), "; choose one with --ann ", split, "=FILE");
  throw DataError("no annotation file for ", split, " in ", printable(place.folder), ": neither annotations/instances_", split,
                  "*.json nor ", split == "val" ? "valid" : split, "/_annotations.coco.json; name it with --ann ", split, "=FILE",
                  split == "val" ? ", or train without evaluation: --eval-every 0" : "");
}

fs::path find_images(const DataPlace& place, const std::string& split, const CocoData& data, bool accept_best) {
  if (!place.images.empty()) {
    if (!is_folder(place.images))
      throw DataError(printable(place.images), ": no such folder; --images takes the folder of the pictures");
    return place.images;
  }
  const fs::path base = base_folder(place, data);
  const auto total = static_cast<std::int64_t>(data.images.size());
  Coverage best;
  for (const fs::path& folder : image_folders(base, split)) {
    Coverage coverage = cover(folder, data);
    if (coverage.found == total && is_folder(folder)) return folder;
    if (coverage.found > best.found) best = std::move(coverage);
  }
  if (accept_best && best.found > 0) return best.folder;
  const std::optional<fs::path> other = other_folder(base, data);
  const std::string hint = other ? "; they exist under " + printable(*other) + ": --images " + split + "=" + printable(*other)
                                 : "; put them there or name their folder: --images " + split + "=DIR";
  if (best.found == 0) {
    const std::string name = data.images.empty() ? "" : " (" + printable(data.images.front().file_name) + ", ...)";
    throw DataError(printable(data.file), ": none of ", total, " images", name, " is in images/", split, ", images/", split,
                    "2017, ", split, "2017, ", split, ", images or . of ", printable(base), hint);
  }
  std::string names;
  for (const std::string& name : best.missing) names += (names.empty() ? "" : ", ") + printable(name);
  const std::int64_t missing = total - best.found;
  const bool more = missing > static_cast<std::int64_t>(best.missing.size());
  throw DataError(printable(data.file), ": ", missing, " of ", total, missing == 1 ? " images is" : " images are",
                  " missing under ", printable(best.folder), " (", names, more ? ", ..." : "", "), ", best.found, " found", hint);
}

DataSplit open_split(const DataPlace& place, const std::string& split, Findings& findings, bool accept_best) {
  DataSplit out{split, {}, read_coco(find_annotations(place, split), findings)};
  out.images = find_images(place, split, out.data, accept_best);
  return out;
}

fs::path image_path(const fs::path& folder, const std::string& file_name) { return follow(folder, file_name).path; }

ImageFile open_image(const fs::path& folder, const std::string& file_name) {
  const Followed image = follow(folder, file_name);
  FileHandle handle = open_beneath(image);
  return ImageFile(image.path, std::move(handle));
}

}  // namespace detr::data

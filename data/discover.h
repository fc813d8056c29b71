#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "data/coco.h"
#include "data/image_file.h"

namespace detr::data {

/// Where the pieces of a data set are looked for. `folder` is `--data DIR`; `annotations` and `images` (`--ann`, `--images`)
/// override what would be found there. Any of them may be empty.
struct DataPlace {
  std::filesystem::path folder, annotations, images;
};

/// One split, found and read.
struct DataSplit {
  std::string name;                 ///< "train", "val" or "test"
  std::filesystem::path images;     ///< the folder that file names are relative to
  CocoData data;
};

/// The value of `--ann` or `--images` for a split: the last of `values` that starts with "<split>=" (the rest of it), else,
/// where the split is `plain_split`, the last one without "train=", "val=" or "test="; empty where there is none.
std::filesystem::path override_for(const std::vector<std::string>& values, const std::string& split,
                                   const std::string& plain_split);

/// The annotation file of a split: `annotations/instances_<split>.json`, else the only match of
/// `annotations/instances_<split>*.json`, else `<split>/_annotations.coco.json` (the folder `valid` counts as val).
/// Throws DataError where there is none, naming what was looked for, or several, naming them.
std::filesystem::path find_annotations(const DataPlace& place, const std::string& split);

/// Whether `find_annotations` would find something (also where it finds too much).
bool has_split(const DataPlace& place, const std::string& split);

/// The first of the folders `images/<split>`, `images/<split>2017`, `<split>2017`, `<split>`, `images`, `.` in which all file
/// names of the data set exist. `place.images`, where given, is taken as it is, as long as it is a folder. Where no folder has
/// all files, one that has some is taken if `accept_best` is set, and DataError is thrown otherwise: it names the best folder,
/// how many files it has and lacks, and the first of these.
std::filesystem::path find_images(const DataPlace& place, const std::string& split, const CocoData& data,
                                  bool accept_best = false);

/// `find_annotations`, `read_coco` and `find_images`.
DataSplit open_split(const DataPlace& place, const std::string& split, Findings& findings, bool accept_best = false);

/// The path of an image inside `folder`. Throws DataError where the name is absolute or leads out of the folder, by `..` or
/// by a symbolic link; whether the file exists is not checked.
std::filesystem::path image_path(const std::filesystem::path& folder, const std::string& file_name);
/// That image, open. A link that is changed between the check and the opening is not followed. Throws DataError as image_path and
/// ImageFile do.
ImageFile open_image(const std::filesystem::path& folder, const std::string& file_name);

}  // namespace detr::data

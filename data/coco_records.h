#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "data/coco.h"

namespace detr::data {

/// Records of an annotation file before they are related to one another: every field has its type, no id has been looked up.
/// `extra` is the text of keys that we do not read, as `,"key":value`; kept in ReadMode::repair alone.
struct RawImage {
  std::int64_t id = 0;
  std::string file_name;
  std::int64_t width = 0, height = 0;   ///< both 0 unless both are usable
  std::string extra;
};
struct RawCategory {
  std::int64_t id = 0;
  std::string name, extra;
};
struct RawAnnotation {
  std::int64_t id = 0, image_id = 0, category_id = 0;
  std::array<double, 4> box_xywh{};     ///< finite
  double area = 0;
  bool crowd = false;
  bool has_id = true;                   ///< else `id` is its place in the list, from 1
};
struct RawCoco {
  std::vector<RawImage> images;
  std::vector<RawCategory> categories;
  std::vector<RawAnnotation> annotations;
  std::vector<std::string> annotation_extra;   ///< one for each annotation, in ReadMode::repair
  std::string extra;
  bool has_categories = false;                          ///< the key is there
  std::int64_t listed_images = 0, listed_categories = 0;   ///< entries in the file, good or not
};

/// strict: what is not as the format says is an error and the record is left out. repair: ids and numbers written as text or
/// as 3.0 are converted, of a key that occurs twice the last counts, an annotation whose box is unusable is left out; each of
/// these is a warning, and what cannot be repaired stays an error.
enum class ReadMode { strict, repair };

/// Reads the three lists. Throws DataError where the text is not JSON or not a COCO file at all.
RawCoco read_records(const std::filesystem::path& file, ReadMode mode, Findings& findings);

}  // namespace detr::data

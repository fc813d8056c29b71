#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "data/coco_eval.h"

namespace detr::data {

/// Reads a COCO results file: a list of {"image_id", "category_id", "bbox": [x, y, w, h], "score"}; other keys are skipped.
/// Ids are 64-bit integers (a whole number written as a float is taken, up to 2^53). Throws DataError naming the file and
/// the record (from 0) or, where the text is not JSON, line and column: a missing or wrong value, a number that is not finite.
std::vector<Detection> read_detections(const std::filesystem::path& file);

/// Writes a COCO results file that read_detections reads back to the same bits. With `file_names` (by image id), records of
/// the images in it get "file_name". The file appears complete or not at all. Throws DataError for a number that is not finite,
/// StorageError where writing fails.
void write_detections(const std::filesystem::path& file, std::span<const Detection> detections,
                      const std::map<std::int64_t, std::string>* file_names = nullptr);

}  // namespace detr::data

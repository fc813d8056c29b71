#pragma once
#include <filesystem>

#include "data/coco.h"
#include "data/image.h"
#include "runtime/thread_pool.h"

namespace detr::data {

/// Writes a repaired copy of an annotation file to `out`, which is another file, and reads it back. Ids and numbers written
/// as text or as 3.0 are converted; annotations are left out where the box is unusable, without area or outside the picture,
/// or where image or category is unknown; boxes over the edge are clipped; missing `area` and `iscrowd` are added; an annotation
/// id that is missing or occurs twice is replaced by a free one; a repeated category or image with the same content is left
/// out. Keys that we do not read are carried over (NaN and Infinity in them become null). With an image folder the sizes
/// become those of the pictures as shown, and images whose file cannot be used are left out with their annotations.
///
/// Every change is a finding. Throws DataError, with nothing written, where something stays that a reader must refuse (two
/// images of one id, a box list at another scale than the pictures, no categories); StorageError where `out` cannot be written.
void write_fixed(const std::filesystem::path& annotations, const std::filesystem::path& images, Exif exif,
                 const std::filesystem::path& out, ThreadPool& pool, Findings& findings);

}  // namespace detr::data

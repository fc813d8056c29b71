#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "data/coco.h"
#include "data/image.h"
#include "runtime/thread_pool.h"

namespace detr::data {

/// What a data set holds. Counts are of non-crowd boxes unless they say otherwise.
struct DataStats {
  std::int64_t images = 0;
  std::int64_t background = 0;        ///< images without a trainable box
  std::int64_t boxes = 0;             ///< all annotations, crowd included
  std::int64_t crowd = 0;
  std::int64_t trainable = 0;
  std::int64_t small = 0, medium = 0, large = 0;   ///< by `area`, as COCO: below 32 x 32, below 96 x 96, the rest
  std::int64_t most_per_image = 0;    ///< trainable boxes of the image with most of them
  std::int64_t p99_per_image = 0;     ///< 99 % of the images have no more (nearest rank)
  std::vector<std::int64_t> per_class;   ///< trainable boxes, in the order of CocoData::categories
};

DataStats data_stats(const CocoData& data);

struct CheckOptions {
  struct Split {
    std::string name;                          ///< "train", "val", "test"
    std::filesystem::path annotations, images;
  };
  std::vector<Split> splits;
  std::int64_t decode = -1;     ///< pictures of each split to decode in full: -1 all, 0 none (headers are always read)
  bool duplicates = false;      ///< look for pictures of equal bytes
  Exif exif = Exif::automatic;
  DecodeLimits limits;
  std::size_t max_report = 10;  ///< items of each kind
};

struct CheckReport {
  struct Split {
    std::string name;
    bool readable = false;      ///< the annotation file could be read; else the rest is empty
    std::vector<Category> categories;
    DataStats stats;
    std::int64_t exif_turned = 0, exif_as_stored = 0, exif_ambiguous = 0;
  };
  Findings findings;            ///< items begin with the split's name
  std::vector<Split> splits;
};

/// Everything that is wrong with a data set, found without training on it: `inspect_coco`, the pictures (`pictures.h`), boxes
/// against the real sizes, and what splits have in common: other categories than the first split (categories-differ, an error),
/// one file in two splits (file-in-two-splits), equal bytes in two splits (picture-in-two-splits, a warning) or in one
/// (picture-twice, a note). A class without a box is a note (category-unused). Same report for any number of threads.
/// Never throws for the data; a file that cannot be read at all is the error annotations-unusable.
CheckReport check_data_set(const CheckOptions& options, ThreadPool& pool);

}  // namespace detr::data

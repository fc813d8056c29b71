#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace detr::data {

struct SynthOptions {
  std::filesystem::path out;           ///< new or empty folder
  std::int64_t images = 100;           ///< of both splits, >= 2
  double val_share = 0.2;              ///< of the images, in (0, 1); at least one image each
  std::int64_t classes = 3;            ///< 1 to synth_max_classes()
  std::int64_t height = 256, width = 256;   ///< pixels, 32 to 8192
  bool vary_size = false;              ///< each picture's sides within 25 % of the above
  std::int64_t max_boxes = 6;          ///< in one picture, 1 to 300; a picture with boxes has at least one
  double empty_share = 0;              ///< of the images without any box, in [0, 1)
  double crowd_share = 0;              ///< of the images with boxes that also hold one crowd region, in [0, 1]
  std::string fault;                   ///< empty, or one of synth_faults(): the train json gets that fault
  std::uint64_t seed = 0;
  int threads = 1;                     ///< never changes a byte
};

/// What was written, both splits together.
struct SynthCounts {
  std::int64_t train = 0, val = 0;     ///< images
  std::int64_t boxes = 0, crowds = 0, empty = 0;
};

/// Writes a small data set that a tiny detector learns within minutes on a CPU: annotations/instances_{train,val}.json and
/// images/{train,val}. The class of a box is its shape (circle, square, ...), for more than ten classes with its pattern
/// (striped, ...); colour, size, place and the textured ground say nothing about it. Boxes are tight in whole pixels, `area`
/// is the shape's, boxes overlap by about a fifth at most. Category and image ids are sparse, categories are listed in falling id,
/// one picture in four is a PNG. The same options and seed give the same bytes.
/// Throws ConfigError for numbers out of range, an unknown fault and a folder that is not empty, StorageError where writing
/// fails.
SynthCounts make_synthetic(const SynthOptions& options);

/// The faults that `make_synthetic` can write, such as "category-unknown" or "json-truncated".
std::vector<std::string> synth_faults();

/// Distinct classes there are.
std::int64_t synth_max_classes();

}  // namespace detr::data

#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "data/coco.h"
#include "data/image.h"
#include "runtime/thread_pool.h"

namespace detr::data {

/// What the file of one image record turned out to be.
struct Picture {
  std::string fault;        ///< kind of finding, or empty: image-path, image-missing, image-folder, image-empty, image-invalid,
                            ///< image-too-large, image-damaged
  std::string reason;       ///< of the fault
  ImageHeader header;       ///< where the header could be read
  bool turned = false;      ///< shown turned, as its EXIF orientation says
  std::int64_t width = 0, height = 0;   ///< as shown; 0 where there is a fault
  std::string warning;      ///< what the decoder complained about
};

struct PictureOptions {
  Exif exif = Exif::automatic;
  DecodeLimits limits;
  /// How many pictures to decode in full, spread evenly over the data set; -1: all. The headers of all are read.
  std::int64_t decode = 0;
};

/// Looks at the file of every image of the data set, in the order of the images. Never throws for a file.
std::vector<Picture> look_at_pictures(const CocoData& data, const std::filesystem::path& folder, const PictureOptions& options,
                                      ThreadPool& pool);

/// Adds the faults of the pictures, as errors.
void report_faults(const CocoData& data, const std::vector<Picture>& pictures, Findings& findings);

/// Adds what the pictures without a fault show: sizes that are not the json's (image-size-scaled, an error: another scale of
/// the same shape, so that the boxes are probably of that scale; image-size-swapped and image-size-wrong, warnings), what the
/// decoder complained about (image-decode-warning), and notes on EXIF: exif-turned, exif-as-stored, and exif-ambiguous where
/// the size cannot tell. To be called before the sizes are set.
void report_pictures(const CocoData& data, const std::vector<Picture>& pictures, Findings& findings);

/// "image 5 (a.jpg)", for a message.
std::string image_name(const ImageRecord& image);

/// Gives every image without a fault its size as shown (`set_image_size`).
void set_real_sizes(CocoData& data, const std::vector<Picture>& pictures, Findings& findings);

}  // namespace detr::data

#include "data/pictures.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <system_error>

#include "data/discover.h"
#include "data/text.h"
#include "runtime/error.h"

namespace detr::data {
namespace fs = std::filesystem;
namespace {

using Severity = Finding::Severity;

struct Fault {
  std::string kind, reason;   ///< both empty: none
};

/// What the file system alone shows.
Fault file_fault(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) return {"image-missing", "no such file"};
  if (error) return {"image-invalid", "cannot be read: " + error.message()};
  if (fs::is_directory(status)) return {"image-folder", "is a folder"};
  if (!fs::is_regular_file(status)) return {"image-invalid", "is not a regular file"};
  if (fs::file_size(path, error) == 0) return {"image-empty", "the file is empty"};
  return {};
}

Picture look(const fs::path& folder, const ImageRecord& image, const PictureOptions& options, bool decode) {
  Picture picture;
  const auto fault = [&](const std::string& kind, const std::string& reason) {
    picture.fault = kind;
    picture.reason = reason;
    return picture;
  };
  fs::path path;
  try {
    path = image_path(folder, image.file_name);
  } catch (const DataError& error) {
    return fault("image-path", error.what());
  }
  if (const Fault seen = file_fault(path); !seen.kind.empty()) return fault(seen.kind, seen.reason);
  std::optional<ImageFile> file;
  try {
    file.emplace(open_image(folder, image.file_name));
    picture.header = read_image_header(*file);
  } catch (const DataError& error) {
    return fault("image-invalid", printable(std::string(error.what())));
  }
  const ImageHeader& header = picture.header;
  const DecodeLimits& limits = options.limits;
  if (header.stored_width > limits.max_side || header.stored_height > limits.max_side ||
      header.stored_width * header.stored_height > limits.max_pixels)
    return fault("image-too-large", concat(header.stored_width, " x ", header.stored_height, " pixels; the limits are ",
                                           limits.max_side, " a side (data.max_side) and ", limits.max_pixels,
                                           " in all (data.max_pixels)"));
  if (decode) {
    try {
      picture.warning = printable(decode_image(*file, options.exif, image.width, image.height, limits).warning);
    } catch (const DataError& error) {
      return fault("image-damaged", printable(std::string(error.what())));
    }
  }
  picture.turned = exif_turns(header, options.exif, image.width, image.height);
  picture.width = picture.turned ? header.shown_width() : header.stored_width;
  picture.height = picture.turned ? header.shown_height() : header.stored_height;
  return picture;
}

/// Whether two sizes have the same shape to within a pixel of rounding, but are not nearly the same size.
bool scaled(std::int64_t width, std::int64_t height, std::int64_t real_width, std::int64_t real_height) {
  const double w = static_cast<double>(width), h = static_cast<double>(height);
  const double rw = static_cast<double>(real_width), rh = static_cast<double>(real_height);
  const bool same_shape = std::abs(h * rw / w - rh) <= 1 || std::abs(rh * w / rw - h) <= 1;
  return same_shape && std::abs(w / rw - 1) > 0.02 && std::abs(h / rh - 1) > 0.02;
}

void report_size(const ImageRecord& image, const Picture& picture, const std::string& where, Findings& findings) {
  if (image.width == 0 || (image.width == picture.width && image.height == picture.height)) return;
  const std::string what = concat(where, ": the json says ", image.width, " x ", image.height, ", the picture is ", picture.width,
                                  " x ", picture.height);
  if (image.width == picture.height && image.height == picture.width)
    return findings.add("image-size-swapped", Severity::warning, what + "; the picture's size counts");
  if (scaled(image.width, image.height, picture.width, picture.height))
    return findings.add("image-size-scaled", Severity::error, what + ": the same shape at another scale");
  findings.add("image-size-wrong", Severity::warning, what + "; the picture's size counts");
}

void report_exif(const ImageRecord& image, const Picture& picture, const std::string& where, Findings& findings) {
  const ImageHeader& header = picture.header;
  if (header.orientation == 1) return;
  const std::string what =
      concat(where, ": EXIF orientation ", header.orientation, picture.turned ? ", shown turned" : ", shown as stored");
  findings.add(picture.turned ? "exif-turned" : "exif-as-stored", Severity::note, what);
  const bool same_size = header.shown_width() == header.stored_width && header.shown_height() == header.stored_height;
  if (same_size || image.width == 0)
    findings.add("exif-ambiguous", Severity::note, what + "; the json's size cannot tell whether that is right");
}

}  // namespace

std::vector<Picture> look_at_pictures(const CocoData& data, const fs::path& folder, const PictureOptions& options,
                                      ThreadPool& pool) {
  const auto total = static_cast<std::int64_t>(data.images.size());
  const std::int64_t wanted = options.decode < 0 ? total : std::min(options.decode, total);
  std::vector<Picture> pictures(data.images.size());
  pool.parallel_for(total, [&](std::int64_t i) {
    // Of `wanted` pictures spread over `total`, this is one where the running count goes up.
    const bool decode = (i + 1) * wanted / total > i * wanted / total;
    const auto at = static_cast<std::size_t>(i);
    pictures[at] = look(folder, data.images[at], options, decode);
  });
  return pictures;
}

std::string image_name(const ImageRecord& image) { return concat("image ", image.id, " (", printable(image.file_name), ")"); }

void report_faults(const CocoData& data, const std::vector<Picture>& pictures, Findings& findings) {
  for (std::size_t i = 0; i < pictures.size(); ++i) {
    if (!pictures[i].fault.empty())
      findings.add(pictures[i].fault, Severity::error, image_name(data.images[i]) + ": " + pictures[i].reason);
  }
}

void report_pictures(const CocoData& data, const std::vector<Picture>& pictures, Findings& findings) {
  for (std::size_t i = 0; i < pictures.size(); ++i) {
    const ImageRecord& image = data.images[i];
    const Picture& picture = pictures[i];
    if (!picture.fault.empty()) continue;
    const std::string where = image_name(image);
    if (!picture.warning.empty()) findings.add("image-decode-warning", Severity::warning, where + ": " + picture.warning);
    report_size(image, picture, where, findings);
    report_exif(image, picture, where, findings);
  }
}

void set_real_sizes(CocoData& data, const std::vector<Picture>& pictures, Findings& findings) {
  for (std::size_t i = 0; i < pictures.size(); ++i) {
    if (pictures[i].fault.empty())
      set_image_size(data, static_cast<std::int64_t>(i), pictures[i].width, pictures[i].height, findings);
  }
}

}  // namespace detr::data

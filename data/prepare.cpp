#include "data/prepare.h"

#include <vector>

#include "data/coco_boxes.h"
#include "data/pictures.h"
#include "data/text.h"
#include "runtime/error.h"

namespace detr::data {
namespace {

using Severity = Finding::Severity;

std::string joined(const Finding& finding) {
  std::string text;
  for (const std::string& item : finding.items) text += (text.empty() ? "" : " | ") + item;
  return finding.count > static_cast<std::int64_t>(finding.items.size()) ? text + " | ..." : text;
}

}  // namespace

void prepare_for_training(CocoData& data, const std::filesystem::path& folder, const PrepareOptions& options, ThreadPool& pool,
                          Findings& findings) {
  const std::vector<Picture> pictures = look_at_pictures(data, folder, {options.exif, options.limits, 0}, pool);
  Findings seen(findings.max_items()), faults(findings.max_items());
  report_pictures(data, pictures, seen);
  std::vector<std::int64_t> usable;
  const std::string policy = options.unusable == Unusable::keep ? "images-unreadable" : "images-left-out";
  for (std::size_t i = 0; i < pictures.size(); ++i) {
    if (pictures[i].fault.empty()) {
      usable.push_back(static_cast<std::int64_t>(i));
    } else {
      faults.add(policy, Severity::warning, image_name(data.images[i]) + ": " + pictures[i].reason);
    }
  }
  const std::size_t total = pictures.size();
  const Finding* const bad = faults.find(policy);
  if (bad && options.unusable == Unusable::refuse)
    throw DataError(printable(data.file), ": ", bad->count, " of ", total, " images cannot be used under ", printable(folder),
                    ": ", joined(*bad), "; restore them, correct --images, or leave them out with --bad-images skip");
  if (usable.empty() && options.unusable == Unusable::drop)
    throw DataError(printable(data.file), ": none of ", total, " images can be used under ", printable(folder),
                    bad ? ": " + joined(*bad) : "", "; restore them or correct --images");
  if (const Finding* const other = seen.find("image-size-scaled"))
    throw DataError(printable(data.file), ": ", other->count, " of ", total, " images have another scale in the json: ",
                    joined(*other), "; use the pictures that the boxes were drawn on, or scale the boxes and correct the sizes");

  set_real_sizes(data, pictures, seen);
  if (bad && options.unusable == Unusable::drop) data = select_images(data, usable);
  report_corner_boxes(data, seen);
  findings.merge(faults);
  findings.merge(seen);
}

}  // namespace detr::data

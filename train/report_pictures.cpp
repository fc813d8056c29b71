#include "train/report_pictures.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "data/draw.h"
#include "runtime/error.h"
#include "train/html_text.h"

namespace detr::train {
namespace {

constexpr std::int64_t kLongestSide = 480;
constexpr std::size_t kMaxDrawn = 100;

/// How many predictions are drawn beside so many true boxes: early in a run all queries score alike and would hide the picture.
std::size_t most_drawn(std::size_t truths) { return std::min(kMaxDrawn, 2 * truths + 5); }

/// Images in the order in which they are tried: `count` spread evenly over those with boxes, the rest of these, then the others.
std::vector<std::size_t> candidates(const data::CocoData& coco, std::size_t count) {
  std::vector<std::size_t> with, without, order;
  for (std::size_t i = 0; i < coco.images.size(); ++i) {
    const auto first = coco.annotations.begin() + coco.images[i].first;
    const bool boxes = std::any_of(first, first + coco.images[i].count, [](const data::Annotation& a) { return a.trainable; });
    (boxes ? with : without).push_back(i);
  }
  std::vector<bool> taken(with.size(), false);
  for (std::size_t k = 0; k < std::min(count, with.size()); ++k) {
    const std::size_t at = k * with.size() / std::min(count, with.size());
    taken[at] = true;
    order.push_back(with[at]);
  }
  for (std::size_t k = 0; k < with.size(); ++k) {
    if (!taken[k]) order.push_back(with[k]);
  }
  order.insert(order.end(), without.begin(), without.end());
  return order;
}

/// A large picture shrunk so that its longer side is `longest`; a small one enlarged by a whole factor, so that labels do not hide it.
data::Image fitted(const data::Image& image, std::int64_t longest) {
  double scale = static_cast<double>(longest) / static_cast<double>(std::max(image.width, image.height));
  if (scale > 1) scale = std::floor(scale);
  if (scale == 1) return image;
  const auto side = [&](std::int64_t length) { return std::max<std::int64_t>(1, std::llround(static_cast<double>(length) * scale)); };
  return data::resize_bilinear(image, side(image.width), side(image.height));
}

std::vector<std::uint8_t> small_jpeg(const data::Image& image) {
  for (const int quality : {85, 70, 50, 30}) {
    std::vector<std::uint8_t> bytes = data::encode_jpeg(image, quality);
    if (bytes.size() <= kMaxPictureBytes) return bytes;
  }
  return data::encode_jpeg(fitted(image, kLongestSide / 2), 30);
}

data::DrawnBox drawn(const std::array<double, 4>& xywh, double scale_x, double scale_y, std::int64_t label, std::string text) {
  return {{xywh[0] * scale_x, xywh[1] * scale_y, (xywh[0] + xywh[2]) * scale_x, (xywh[1] + xywh[3]) * scale_y}, label, std::move(text), false};
}

}  // namespace

std::vector<ReportPicture> draw_report_pictures(const data::CocoData& coco, const std::filesystem::path& folder, std::span<const data::Detection> detections, const PictureChoice& choice) {
  std::map<std::int64_t, std::vector<const data::Detection*>> by_image;
  for (const data::Detection& d : detections) {
    if (d.score >= choice.score) by_image[d.image_id].push_back(&d);
  }
  std::map<std::int64_t, std::size_t> label_of;
  for (std::size_t k = 0; k < coco.categories.size(); ++k) label_of[coco.categories[k].id] = k;

  std::vector<ReportPicture> pictures;
  for (const std::size_t i : candidates(coco, choice.count)) {
    if (pictures.size() >= choice.count) break;
    const data::ImageRecord& record = coco.images[i];
    data::Image decoded;
    try {
      decoded = data::decode_image(folder / record.file_name, choice.exif, record.width, record.height, choice.limits).image;
    } catch (const DataError&) {
      continue;   // the loader has warned of it
    }
    data::Image truth = fitted(decoded, kLongestSide), prediction = truth;
    const double scale_x = static_cast<double>(truth.width) / static_cast<double>(decoded.width), scale_y = static_cast<double>(truth.height) / static_cast<double>(decoded.height);

    std::vector<data::DrawnBox> true_boxes, found_boxes;
    for (std::int64_t a = record.first; a < record.first + record.count; ++a) {
      const data::Annotation& annotation = coco.annotations[static_cast<std::size_t>(a)];
      if (annotation.crowd) continue;
      true_boxes.push_back(drawn(annotation.box_xywh, scale_x, scale_y, annotation.label, coco.categories[static_cast<std::size_t>(annotation.label)].name));
      true_boxes.back().dashed = true;
    }
    std::vector<const data::Detection*>& found = by_image[record.id];
    std::erase_if(found, [&](const data::Detection* d) { return !label_of.contains(d->category_id); });
    std::stable_sort(found.begin(), found.end(), [](const auto* a, const auto* b) { return a->score < b->score; });
    const std::size_t drawn_boxes = std::min(found.size(), most_drawn(true_boxes.size()));
    found.erase(found.begin(), found.end() - static_cast<std::ptrdiff_t>(drawn_boxes));
    for (const data::Detection* d : found) {
      const std::size_t label = label_of[d->category_id];
      found_boxes.push_back(drawn(d->box_xywh, scale_x, scale_y, static_cast<std::int64_t>(label), coco.categories[label].name + " " + fixed_text(d->score, 2)));
    }
    data::draw_boxes(truth, true_boxes);
    data::draw_boxes(prediction, found_boxes);
    pictures.push_back({record.file_name, truth.width, truth.height, true_boxes.size(), found_boxes.size(), small_jpeg(truth), small_jpeg(prediction)});
  }
  return pictures;
}

}  // namespace detr::train

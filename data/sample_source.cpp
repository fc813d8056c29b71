#include "data/sample_source.h"

#include <algorithm>
#include <chrono>

#include "data/discover.h"

namespace detr::data {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool has_area(const std::array<double, 4>& box) { return box[2] > box[0] && box[3] > box[1]; }

}  // namespace

SampleSource::SampleSource(std::shared_ptr<const CocoData> coco, std::filesystem::path folder, Options options)
    : coco_(std::move(coco)), folder_(std::move(folder)), options_(std::move(options)) {}

std::shared_ptr<const Image> SampleSource::picture(std::int64_t image) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = cache_.find(image); found != cache_.end()) return found->second;
  }
  const ImageRecord& record = coco_->images[static_cast<std::size_t>(image)];
  auto result = std::make_shared<const Image>(
      decode_image(open_image(folder_, record.file_name), options_.exif, record.width, record.height, options_.limits).image);
  const std::lock_guard lock(mutex_);
  if (cached_bytes_ + result->rgb.size() <= options_.cache_bytes && cache_.emplace(image, result).second) cached_bytes_ += result->rgb.size();
  return result;
}

LoadedSample SampleSource::load(std::int64_t image, std::int64_t epoch, RandomKey key) {
  const std::int64_t begin = now_ns();
  const std::shared_ptr<const Image> original = picture(image);
  const std::int64_t decoded = now_ns();

  const ImageRecord& record = coco_->images[static_cast<std::size_t>(image)];
  LoadedSample loaded;
  loaded.image_id = record.id;
  loaded.orig_width = original->width;
  loaded.orig_height = original->height;

  Sample sample;
  const auto w = static_cast<double>(original->width), h = static_cast<double>(original->height);
  for (std::int64_t i = record.first; i < record.first + record.count; ++i) {
    const Annotation& annotation = coco_->annotations[static_cast<std::size_t>(i)];
    if (!annotation.trainable) continue;
    const auto& b = annotation.box_xyxy;
    const std::array<double, 4> clipped{std::clamp(b[0], 0.0, w), std::clamp(b[1], 0.0, h), std::clamp(b[2], 0.0, w), std::clamp(b[3], 0.0, h)};
    if (!has_area(clipped)) continue;
    sample.boxes.push_back(clipped);
    sample.labels.push_back(annotation.label);
  }
  sample.picture = *original;
  sample = apply_transforms(std::move(sample), options_.transforms, options_.policy, epoch, key, options_.log_draws ? &loaded.draws : nullptr);

  for (std::size_t i = 0; i < sample.boxes.size(); ++i) {
    if (!has_area(sample.boxes[i])) continue;
    loaded.targets.boxes.push_back(normalised_cxcywh(sample.boxes[i], sample.width(), sample.height()));
    loaded.targets.labels.push_back(sample.labels[i]);
  }
  loaded.picture = std::move(sample.picture);
  decode_ns_ += decoded - begin;
  transform_ns_ += now_ns() - decoded;
  return loaded;
}

}  // namespace detr::data

#include "data/coco_boxes.h"

#include <algorithm>
#include <limits>

#include "data/text.h"
#include "runtime/error.h"

namespace detr::data {
namespace {

using Severity = Finding::Severity;

constexpr double kRoundingPx = 1;

double limit(std::int64_t side) { return side > 0 ? static_cast<double>(side) : std::numeric_limits<double>::infinity(); }

std::string box_text(const Annotation& annotation) {
  std::string text = "[";
  for (const double value : annotation.box_xywh) text += (text.size() > 1 ? ", " : "") + number_text(value);
  return text + "]";
}

}  // namespace

BoxFit box_fit(const Annotation& annotation, std::int64_t width, std::int64_t height) {
  const auto [x, y, w, h] = annotation.box_xywh;
  if (!(x + w > x) || !(y + h > y)) return BoxFit::empty;
  if (width <= 0 || height <= 0) return BoxFit::whole;
  if (x >= limit(width) || y >= limit(height) || x + w <= 0 || y + h <= 0) return BoxFit::outside;
  const double over = std::max({-x, -y, x + w - limit(width), y + h - limit(height)});
  return over <= 0 ? BoxFit::whole : over <= kRoundingPx ? BoxFit::rounded : BoxFit::clipped;
}

void clip_box(Annotation& annotation, std::int64_t width, std::int64_t height) {
  const auto [x, y, w, h] = annotation.box_xywh;
  const bool known = width > 0 && height > 0;
  const double low = known ? 0 : -std::numeric_limits<double>::infinity();
  const double right = known ? limit(width) : limit(0), bottom = known ? limit(height) : limit(0);
  annotation.box_xyxy = {std::clamp(x, low, right), std::clamp(y, low, bottom), std::clamp(x + w, low, right),
                         std::clamp(y + h, low, bottom)};
  const auto [x0, y0, x1, y1] = annotation.box_xyxy;
  annotation.trainable = !annotation.crowd && x1 > x0 && y1 > y0;
}

void report_fit(const ImageRecord& image, const Annotation& annotation, BoxFit fit, Findings& findings) {
  if (fit == BoxFit::whole || (annotation.crowd && fit != BoxFit::empty)) return;
  const std::string where = concat("annotation ", annotation.id, " (image ", image.id, "): box ", box_text(annotation));
  const std::string picture = concat("the picture of ", image.width, " x ", image.height);
  const auto [x, y, w, h] = annotation.box_xywh;
  switch (fit) {
    case BoxFit::rounded:
      return findings.add("box-over-edge", Severity::note, where + " is over the edge of " + picture + "; clipped");
    case BoxFit::clipped: return findings.add("box-clipped", Severity::warning, where + " leaves " + picture + "; clipped");
    case BoxFit::outside: return findings.add("box-outside", Severity::warning, where + " is outside " + picture + "; dropped");
    case BoxFit::whole:
    case BoxFit::empty: break;
  }
  if (w < 0 || h < 0) return findings.add("box-negative-size", Severity::warning, where + " has a negative side; dropped");
  findings.add("box-zero-area", Severity::warning, where + " has no area; dropped");
}

void report_corner_boxes(const CocoData& data, Findings& findings) {
  std::int64_t boxes = 0, leaving = 0, fitting = 0;
  const Annotation* first = nullptr;
  const ImageRecord* first_image = nullptr;
  for (const ImageRecord& image : data.images) {
    if (image.width <= 0 || image.height <= 0) continue;
    const double width = limit(image.width) + kRoundingPx, height = limit(image.height) + kRoundingPx;
    for (std::int64_t i = image.first; i < image.first + image.count; ++i) {
      const Annotation& annotation = data.annotations[static_cast<std::size_t>(i)];
      if (annotation.crowd) continue;
      const auto [x, y, x1, y1] = annotation.box_xywh;
      ++boxes;
      if (x + x1 > width || y + y1 > height) {
        ++leaving;
        if (!first) {
          first = &annotation;
          first_image = &image;
        }
      }
      if (x >= -kRoundingPx && y >= -kRoundingPx && x1 > x && y1 > y && x1 <= width && y1 <= height) ++fitting;
    }
  }
  if (leaving < 3 || leaving * 5 < boxes || fitting * 100 < boxes * 95) return;
  findings.add("corner-boxes", Severity::warning,
               concat(100 * leaving / boxes, " % of ", boxes, " boxes leave their pictures as x, y, width, height and ",
                      100 * fitting / boxes, " % fit as x0, y0, x1, y1 (annotation ", first->id, " (image ", first_image->id,
                      "): ", box_text(*first), "); if they are corners, write bbox as [x0, y0, x1 - x0, y1 - y0]"));
}

}  // namespace detr::data

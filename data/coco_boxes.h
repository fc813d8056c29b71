#pragma once
#include <cstdint>

#include "data/coco.h"

namespace detr::data {

/// How a box lies in its picture, best first. A box over the edge by up to a pixel is a rounding matter.
enum class BoxFit { whole, rounded, clipped, outside, empty };

/// The fit of an annotation's `box_xywh` in a picture of that size in pixels (0: unknown, so only `whole` or `empty`).
BoxFit box_fit(const Annotation& annotation, std::int64_t width, std::int64_t height);

/// Sets `box_xyxy` and `trainable` from `box_xywh`: x clamped to [0, width], y to [0, height], trainable where both sides are
/// left and it is no crowd. With an unknown size (0) nothing is clamped.
void clip_box(Annotation& annotation, std::int64_t width, std::int64_t height);

/// Adds the finding for a fit: box-zero-area and box-negative-size for any box; box-outside, box-clipped (warnings) and
/// box-over-edge (a note) for boxes that are no crowd. A whole box adds none.
void report_fit(const ImageRecord& image, const Annotation& annotation, BoxFit fit, Findings& findings);

/// Adds the warning corner-boxes where boxes seem to be x0, y0, x1, y1: at least 3 boxes and a fifth of all leave their
/// pictures as x, y, w, h, and nearly all of them (95 %) would fit as corners. Needs the real sizes of the pictures.
void report_corner_boxes(const CocoData& data, Findings& findings);

}  // namespace detr::data

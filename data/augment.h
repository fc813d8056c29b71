#pragma once
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "data/image.h"
#include "runtime/random.h"

namespace detr::data {

/// A picture on its way to the network, with its boxes. The canvas is `picture` with a margin of one colour on each side,
/// which is kept as four numbers: zooming a photo out by 4 takes no memory, and a later crop or resize reads as if the
/// margin were pixels.
struct Sample {
  Image picture;
  std::int64_t left = 0, top = 0, right = 0, bottom = 0;   ///< margins in pixels, >= 0
  std::array<std::uint8_t, 3> fill{};                      ///< their colour
  std::vector<std::array<double, 4>> boxes;                ///< x0, y0, x1, y1 in pixels of the canvas
  std::vector<std::int64_t> labels;                        ///< one for each box

  std::int64_t width() const { return left + picture.width + right; }
  std::int64_t height() const { return top + picture.height + bottom; }
};

// ---- What the transforms do, with every choice given. Coordinates and sizes are pixels of the canvas. ----

/// The canvas as one picture, without margins.
Sample flatten(Sample sample);
/// A margin on each side, >= 0, of one colour; boxes move along.
Sample pad(Sample sample, std::int64_t left, std::int64_t top, std::int64_t right, std::int64_t bottom, std::array<std::uint8_t, 3> fill);
/// The part [left, left + width) x [top, top + height), which must lie within the canvas. Boxes are shifted and clamped. One
/// whose centre is not strictly inside becomes (0, 0, 0, 0), for `sanitize` to drop.
Sample crop(Sample sample, std::int64_t left, std::int64_t top, std::int64_t width, std::int64_t height);
/// Mirrors x: x0' = W - x1, x1' = W - x0.
Sample horizontal_flip(Sample sample);
/// Resizes to width x height, whatever the aspect ratio; see resize_bilinear.
Sample resize(Sample sample, std::int64_t width, std::int64_t height);
/// Drops boxes (and their labels) that are less than min_size wide or high or leave the canvas.
Sample sanitize(Sample sample, double min_size);

/// A box as the network wants it: (cx, cy, w, h) in fractions of a canvas of this size.
std::array<double, 4> normalised_cxcywh(const std::array<double, 4>& box_xyxy, std::int64_t width, std::int64_t height);

// ---- The transforms of a configuration, with the reference's names and defaults. Each draws from its key alone. ----

/// Brightness, contrast, saturation, hue and the order of the channels, each with probability p. The contrast comes before
/// the saturation or after the hue, by a fair coin.
struct RandomPhotometricDistort {
  std::array<double, 2> brightness{0.875, 1.125}, contrast{0.5, 1.5}, saturation{0.5, 1.5};
  std::array<double, 2> hue{-0.05, 0.05};   ///< fraction of the hue circle
  double p = 0.5;
};
/// With probability p, a canvas r times as large, r uniform in side_range, with the picture anywhere on it.
struct RandomZoomOut {
  std::array<std::uint8_t, 3> fill{};
  std::array<double, 2> side_range{1, 4};
  double p = 0.5;
};
/// With probability p, a crop that keeps the centre of at least one box and overlaps one of these boxes by a drawn IoU: an
/// option is drawn, 1 or more leaves the picture as it is, else `trials` crops are tried before the next option. Without
/// boxes no crop is acceptable and the picture stays. After 1000 options in vain it stays too, where the reference hangs.
/// Liu et al. 2016, "SSD: Single Shot MultiBox Detector", section 2.2.
struct RandomIoUCrop {
  double min_scale = 0.3, max_scale = 1, min_aspect_ratio = 0.5, max_aspect_ratio = 2;
  std::vector<double> sampler_options{0, 0.1, 0.3, 0.5, 0.7, 0.9, 1};
  std::int64_t trials = 40;
  double p = 1;
};
struct SanitizeBoundingBoxes {
  double min_size = 1;
};
struct RandomHorizontalFlip {
  double p = 0.5;
};
struct Resize {
  std::int64_t height = 640, width = 640;
};
/// A margin at the right and at the bottom up to this size; what is larger is cut there.
struct PadToSize {
  std::int64_t height = 640, width = 640;
  std::array<std::uint8_t, 3> fill{};
};

using TransformOp = std::variant<RandomPhotometricDistort, RandomZoomOut, RandomIoUCrop, SanitizeBoundingBoxes, RandomHorizontalFlip,
                                 Resize, PadToSize>;

/// `type` of the configuration for an op, such as "RandomZoomOut".
std::string type_of(const TransformOp& op);
/// An op with the reference's defaults by its `type`. Throws ConfigError with the known names.
TransformOp make_transform(std::string_view type);

/// Applies one op. Appends what was drawn to `draws` unless it is null.
Sample apply(const TransformOp& op, Sample sample, RandomKey key, std::string* draws = nullptr);

/// From `epoch` (0-based) on, the ops whose type is in `ops` are left out.
struct TransformPolicy {
  std::int64_t epoch = std::numeric_limits<std::int64_t>::max();
  std::vector<std::string> ops;
};

/// Applies the ops in order. Op i draws from key.fold(i), so leaving one out changes no other. The result has no margins.
Sample apply_transforms(Sample sample, std::span<const TransformOp> ops, const TransformPolicy& policy, std::int64_t epoch, RandomKey key,
                        std::string* draws = nullptr);

/// Height and width of every picture that leaves these ops. Throws ConfigError where they do not fix it.
std::array<std::int64_t, 2> output_size(std::span<const TransformOp> ops);

/// The recipe's list for training and for evaluation, at this size.
std::vector<TransformOp> training_transforms(std::int64_t height, std::int64_t width);
std::vector<TransformOp> evaluation_transforms(std::int64_t height, std::int64_t width);

/// Throws ConfigError unless the op's numbers make sense: probabilities in [0, 1], ranges in order, sizes >= 1.
void check_transform(const TransformOp& op);

}  // namespace detr::data

#include "data/augment.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "data/colour.h"
#include "runtime/error.h"

namespace detr::data {
namespace {

void fill_pixels(std::uint8_t* out, std::int64_t pixels, std::array<std::uint8_t, 3> colour) {
  const bool grey = colour[0] == colour[1] && colour[1] == colour[2];
  if (grey) std::fill_n(out, pixels * 3, colour[0]);   // the recipe's black, and fast
  else for (std::int64_t i = 0; i < pixels; ++i) std::memcpy(out + i * 3, colour.data(), 3);
}

/// Rows [begin, end) of the picture with the left and right margins.
Image rows_with_margins(const Sample& sample, std::int64_t begin, std::int64_t end) {
  Image out(sample.width(), end - begin);
  for (std::int64_t y = begin; y < end; ++y) {
    std::uint8_t* row = out.at(0, y - begin);
    fill_pixels(row, sample.left, sample.fill);
    if (sample.picture.width > 0) std::memcpy(row + sample.left * 3, sample.picture.at(0, y), static_cast<std::size_t>(sample.picture.width * 3));
    fill_pixels(row + (sample.left + sample.picture.width) * 3, sample.right, sample.fill);
  }
  return out;
}

/// Puts margins above and below.
Image stack(const Sample& sample, const Image& middle) {
  Image out(middle.width, sample.height());
  fill_pixels(out.rgb.data(), middle.width * sample.top, sample.fill);
  std::copy(middle.rgb.begin(), middle.rgb.end(), out.rgb.begin() + sample.top * middle.width * 3);
  fill_pixels(out.rgb.data() + (sample.top + middle.height) * middle.width * 3, middle.width * sample.bottom, sample.fill);
  return out;
}

void replace_picture(Sample& sample, Image picture) {
  sample.picture = std::move(picture);
  sample.left = sample.top = sample.right = sample.bottom = 0;
}

/// The filter is separable and rounds to bytes between its passes, so the horizontal pass may run on strips of rows and skip
/// the rows of pure margin: the bytes of resizing the whole canvas, which may be 16 photos large, in little memory.
Image resize_canvas(const Sample& sample, std::int64_t width, std::int64_t height) {
  constexpr std::int64_t kStripRows = 64;
  Image narrow(width, sample.picture.height);
  for (std::int64_t begin = 0; begin < sample.picture.height; begin += kStripRows) {
    const std::int64_t end = std::min(begin + kStripRows, sample.picture.height);
    const Image strip = resize_bilinear(rows_with_margins(sample, begin, end), width, end - begin);
    std::copy(strip.rgb.begin(), strip.rgb.end(), narrow.rgb.begin() + begin * width * 3);
  }
  return resize_bilinear(stack(sample, narrow), width, height);
}

double iou(const std::array<double, 4>& a, const std::array<double, 4>& b) {
  const double w = std::max(0.0, std::min(a[2], b[2]) - std::max(a[0], b[0]));
  const double h = std::max(0.0, std::min(a[3], b[3]) - std::max(a[1], b[1]));
  const double all = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - w * h;
  return all > 0 ? w * h / all : 0;
}

bool centre_inside(const std::array<double, 4>& box, double left, double top, double right, double bottom) {
  const double cx = 0.5 * (box[0] + box[2]), cy = 0.5 * (box[1] + box[3]);
  return left < cx && cx < right && top < cy && cy < bottom;
}

std::int64_t part_of(std::int64_t size, double share) { return static_cast<std::int64_t>(static_cast<double>(size) * share); }

template <class... Parts>
void note(std::string* draws, const Parts&... parts) {
  if (draws) *draws += concat(draws->empty() ? "" : "; ", parts...);
}

Sample apply_op(const RandomPhotometricDistort& op, Sample sample, RandomKey key, std::string* draws) {
  RandomSequence random(key);
  // Everything is drawn, wanted or not, so that each draw has its place.
  const auto draw = [&](const std::array<double, 2>& range) {
    const bool wanted = random.uniform() < op.p;
    return std::pair(wanted, random.uniform(range[0], range[1]));
  };
  const auto [use_brightness, brightness] = draw(op.brightness);
  const auto [use_contrast, contrast] = draw(op.contrast);
  const auto [use_saturation, saturation] = draw(op.saturation);
  const auto [use_hue, hue] = draw(op.hue);
  const bool contrast_first = random.uniform() < 0.5, permute = random.uniform() < op.p;
  std::array<std::size_t, 3> order{0, 1, 2};
  for (std::int64_t i = 2; i > 0; --i) std::swap(order[static_cast<std::size_t>(i)], order[static_cast<std::size_t>(random.uniform_int(i + 1))]);

  // Margins change colour too: they are pixels of the canvas, and the contrast is taken about its mean.
  if (sample.left || sample.top || sample.right || sample.bottom) sample = flatten(std::move(sample));
  if (use_brightness) adjust_brightness(sample.picture, brightness);
  if (use_contrast && contrast_first) adjust_contrast(sample.picture, contrast);
  if (use_saturation) adjust_saturation(sample.picture, saturation);
  if (use_hue) adjust_hue(sample.picture, hue);
  if (use_contrast && !contrast_first) adjust_contrast(sample.picture, contrast);
  if (permute) {
    for (std::size_t i = 0; i + 2 < sample.picture.rgb.size(); i += 3) {
      std::uint8_t* pixel = &sample.picture.rgb[i];
      const std::array<std::uint8_t, 3> old{pixel[0], pixel[1], pixel[2]};
      for (std::size_t c = 0; c < 3; ++c) pixel[c] = old[order[c]];
    }
  }
  if (use_brightness) note(draws, "brightness ", brightness);
  if (use_contrast) note(draws, "contrast ", contrast, contrast_first ? " first" : " last");
  if (use_saturation) note(draws, "saturation ", saturation);
  if (use_hue) note(draws, "hue ", hue);
  if (permute) note(draws, "channels ", order[0], order[1], order[2]);
  return sample;
}

Sample apply_op(const RandomZoomOut& op, Sample sample, RandomKey key, std::string* draws) {
  RandomSequence random(key);
  if (random.uniform() >= op.p) return sample;
  const double r = random.uniform(op.side_range[0], op.side_range[1]);
  const std::int64_t spare_x = part_of(sample.width(), r) - sample.width(), spare_y = part_of(sample.height(), r) - sample.height();
  const std::int64_t left = part_of(spare_x, random.uniform()), top = part_of(spare_y, random.uniform());
  note(draws, "zoom-out ", r, " left ", left, " top ", top);
  return pad(std::move(sample), left, top, spare_x - left, spare_y - top, op.fill);
}

Sample apply_op(const RandomIoUCrop& op, Sample sample, RandomKey key, std::string* draws) {
  constexpr int kOptions = 1000;
  RandomSequence random(key);
  if (random.uniform() >= op.p || sample.boxes.empty()) return sample;
  const std::int64_t w = sample.width(), h = sample.height();
  for (int i = 0; i < kOptions; ++i) {
    const double wanted = op.sampler_options[static_cast<std::size_t>(random.uniform_int(static_cast<std::int64_t>(op.sampler_options.size())))];
    if (wanted >= 1) return sample;
    for (std::int64_t trial = 0; trial < op.trials; ++trial) {
      const std::int64_t crop_w = part_of(w, random.uniform(op.min_scale, op.max_scale));
      const std::int64_t crop_h = part_of(h, random.uniform(op.min_scale, op.max_scale));
      const std::int64_t left = part_of(w - crop_w, random.uniform()), top = part_of(h - crop_h, random.uniform());
      if (crop_w == 0 || crop_h == 0) continue;
      const double aspect = static_cast<double>(crop_w) / static_cast<double>(crop_h);
      if (aspect < op.min_aspect_ratio || aspect > op.max_aspect_ratio) continue;
      const std::array<double, 4> window{static_cast<double>(left), static_cast<double>(top), static_cast<double>(left + crop_w),
                                         static_cast<double>(top + crop_h)};
      double best = -1;   // of the boxes whose centre stays
      for (const auto& box : sample.boxes)
        if (centre_inside(box, window[0], window[1], window[2], window[3])) best = std::max(best, iou(box, window));
      if (best < 0 || best < wanted) continue;
      note(draws, "crop IoU ", wanted, " left ", left, " top ", top, " size ", crop_w, "x", crop_h);
      return crop(std::move(sample), left, top, crop_w, crop_h);
    }
  }
  return sample;
}

Sample apply_op(const SanitizeBoundingBoxes& op, Sample sample, RandomKey, std::string*) { return sanitize(std::move(sample), op.min_size); }

Sample apply_op(const RandomHorizontalFlip& op, Sample sample, RandomKey key, std::string* draws) {
  if (uniform(key, 0) >= op.p) return sample;
  note(draws, "flip");
  return horizontal_flip(std::move(sample));
}

Sample apply_op(const Resize& op, Sample sample, RandomKey, std::string*) { return resize(std::move(sample), op.width, op.height); }

Sample apply_op(const PadToSize& op, Sample sample, RandomKey, std::string*) {
  if (sample.width() > op.width || sample.height() > op.height) {
    const std::int64_t width = std::min(sample.width(), op.width), height = std::min(sample.height(), op.height);
    sample = crop(std::move(sample), 0, 0, width, height);
  }
  const std::int64_t right = op.width - sample.width(), bottom = op.height - sample.height();
  return pad(std::move(sample), 0, 0, right, bottom, op.fill);
}

constexpr std::array<const char*, std::variant_size_v<TransformOp>> kTypes{
    "RandomPhotometricDistort", "RandomZoomOut", "RandomIoUCrop", "SanitizeBoundingBoxes", "RandomHorizontalFlip", "Resize", "PadToSize"};

void expect(bool holds, const char* op, const char* rule) {
  if (!holds) throw ConfigError("transforms: ", op, ": ", rule);
}
bool is_share(double p) { return p >= 0 && p <= 1; }
bool in_order(const std::array<double, 2>& range, double low, double high) {
  return range[0] >= low && range[0] <= range[1] && range[1] <= high;
}

void check_op(const RandomPhotometricDistort& op) {
  constexpr double kMost = 1e3;
  expect(is_share(op.p), kTypes[0], "p must be in [0, 1]");
  expect(in_order(op.brightness, 0, kMost) && in_order(op.contrast, 0, kMost) && in_order(op.saturation, 0, kMost), kTypes[0],
         "brightness, contrast and saturation must be ranges [low, high] within [0, 1000]");
  expect(in_order(op.hue, -0.5, 0.5), kTypes[0], "hue must be a range [low, high] within [-0.5, 0.5]");
}
void check_op(const RandomZoomOut& op) {
  expect(is_share(op.p), kTypes[1], "p must be in [0, 1]");
  expect(in_order(op.side_range, 1, 100), kTypes[1], "side_range must be a range [low, high] within [1, 100]");
}
void check_op(const RandomIoUCrop& op) {
  expect(is_share(op.p), kTypes[2], "p must be in [0, 1]");
  expect(op.min_scale > 0 && op.min_scale <= op.max_scale && op.max_scale <= 1, kTypes[2], "0 < min_scale <= max_scale <= 1 must hold");
  expect(op.min_aspect_ratio > 0 && op.min_aspect_ratio <= op.max_aspect_ratio, kTypes[2], "0 < min_aspect_ratio <= max_aspect_ratio must hold");
  expect(!op.sampler_options.empty(), kTypes[2], "sampler_options must not be empty");
  expect(op.trials >= 1, kTypes[2], "trials must be at least 1");
}
void check_op(const SanitizeBoundingBoxes& op) { expect(op.min_size >= 1, kTypes[3], "min_size must be at least 1"); }
void check_op(const RandomHorizontalFlip& op) { expect(is_share(op.p), kTypes[4], "p must be in [0, 1]"); }
void check_op(const Resize& op) { expect(op.height >= 1 && op.width >= 1, kTypes[5], "size must be at least 1 x 1"); }
void check_op(const PadToSize& op) { expect(op.height >= 1 && op.width >= 1, kTypes[6], "size must be at least 1 x 1"); }

}  // namespace

Sample flatten(Sample sample) {
  Image canvas = stack(sample, rows_with_margins(sample, 0, sample.picture.height));
  replace_picture(sample, std::move(canvas));
  return sample;
}

Sample pad(Sample sample, std::int64_t left, std::int64_t top, std::int64_t right, std::int64_t bottom, std::array<std::uint8_t, 3> fill) {
  DETR_CHECK(left >= 0 && top >= 0 && right >= 0 && bottom >= 0, "pad: margins must be >= 0, got ", left, " ", top, " ", right, " ", bottom);
  const bool has_margin = sample.left || sample.top || sample.right || sample.bottom;
  if (has_margin && fill != sample.fill) sample = flatten(std::move(sample));
  sample.fill = fill;
  sample.left += left;
  sample.top += top;
  sample.right += right;
  sample.bottom += bottom;
  for (auto& box : sample.boxes) {
    for (std::size_t i = 0; i < 4; ++i) box[i] += static_cast<double>(i % 2 ? top : left);
  }
  return sample;
}

Sample crop(Sample sample, std::int64_t left, std::int64_t top, std::int64_t width, std::int64_t height) {
  DETR_CHECK(left >= 0 && top >= 0 && width >= 1 && height >= 1 && left + width <= sample.width() && top + height <= sample.height(),
             "crop: ", width, "x", height, " at (", left, ", ", top, ") leaves the canvas of ", sample.width(), "x", sample.height());
  // What of the picture is left, in its own pixels; nothing where the window shows margin alone.
  const auto clip = [](std::int64_t value, std::int64_t size) { return std::clamp<std::int64_t>(value, 0, size); };
  const std::int64_t x0 = clip(left - sample.left, sample.picture.width), x1 = clip(left + width - sample.left, sample.picture.width);
  const std::int64_t y0 = clip(top - sample.top, sample.picture.height), y1 = clip(top + height - sample.top, sample.picture.height);
  Image part(x1 - x0, y1 - y0);
  for (std::int64_t y = y0; y < y1 && x1 > x0; ++y)
    std::memcpy(part.at(0, y - y0), sample.picture.at(x0, y), static_cast<std::size_t>((x1 - x0) * 3));
  sample.left = std::clamp<std::int64_t>(sample.left - left, 0, width - part.width);
  sample.top = std::clamp<std::int64_t>(sample.top - top, 0, height - part.height);
  sample.right = width - part.width - sample.left;
  sample.bottom = height - part.height - sample.top;
  sample.picture = std::move(part);

  const auto l = static_cast<double>(left), t = static_cast<double>(top), w = static_cast<double>(width), h = static_cast<double>(height);
  for (auto& box : sample.boxes) {
    if (!centre_inside(box, l, t, l + w, t + h)) {
      box = {};
      continue;
    }
    box = {std::clamp(box[0] - l, 0.0, w), std::clamp(box[1] - t, 0.0, h), std::clamp(box[2] - l, 0.0, w), std::clamp(box[3] - t, 0.0, h)};
  }
  return sample;
}

Sample horizontal_flip(Sample sample) {
  const std::int64_t w = sample.picture.width;
  for (std::int64_t y = 0; y < sample.picture.height; ++y) {
    for (std::int64_t x = 0; x < w / 2; ++x) std::swap_ranges(sample.picture.at(x, y), sample.picture.at(x, y) + 3, sample.picture.at(w - 1 - x, y));
  }
  std::swap(sample.left, sample.right);
  const auto width = static_cast<double>(sample.width());
  for (auto& box : sample.boxes) box = {width - box[2], box[1], width - box[0], box[3]};
  return sample;
}

Sample resize(Sample sample, std::int64_t width, std::int64_t height) {
  DETR_CHECK(width >= 1 && height >= 1, "resize: size must be at least 1x1, got ", width, "x", height);
  DETR_CHECK(sample.width() >= 1 && sample.height() >= 1, "resize: the canvas is empty");
  // Product first: an edge at the border of the canvas lands exactly on the new border, so `sanitize` keeps its box.
  const auto scale = [](double value, std::int64_t to, std::int64_t from) { return value * static_cast<double>(to) / static_cast<double>(from); };
  for (auto& box : sample.boxes) {
    for (std::size_t i = 0; i < 4; ++i) box[i] = i % 2 ? scale(box[i], height, sample.height()) : scale(box[i], width, sample.width());
  }
  const bool has_margin = sample.left || sample.top || sample.right || sample.bottom;
  if (has_margin) replace_picture(sample, resize_canvas(sample, width, height));
  else if (sample.picture.width != width || sample.picture.height != height) sample.picture = resize_bilinear(sample.picture, width, height);
  return sample;
}

Sample sanitize(Sample sample, double min_size) {
  const auto w = static_cast<double>(sample.width()), h = static_cast<double>(sample.height());
  std::size_t kept = 0;
  for (std::size_t i = 0; i < sample.boxes.size(); ++i) {
    const auto& b = sample.boxes[i];
    const bool large = b[2] - b[0] >= min_size && b[3] - b[1] >= min_size;
    const bool inside = b[0] >= 0 && b[1] >= 0 && b[2] <= w && b[3] <= h;
    if (!large || !inside) continue;
    sample.boxes[kept] = b;
    sample.labels[kept++] = sample.labels[i];
  }
  sample.boxes.resize(kept);
  sample.labels.resize(kept);
  return sample;
}

std::array<double, 4> normalised_cxcywh(const std::array<double, 4>& box_xyxy, std::int64_t width, std::int64_t height) {
  const auto w = static_cast<double>(width), h = static_cast<double>(height);
  const auto& [x0, y0, x1, y1] = box_xyxy;
  return {(x0 + x1) / 2 / w, (y0 + y1) / 2 / h, (x1 - x0) / w, (y1 - y0) / h};
}

std::string type_of(const TransformOp& op) { return kTypes[op.index()]; }

TransformOp make_transform(std::string_view type) {
  const TransformOp defaults[] = {RandomPhotometricDistort{}, RandomZoomOut{},        RandomIoUCrop{}, SanitizeBoundingBoxes{},
                                  RandomHorizontalFlip{},     Resize{},               PadToSize{}};
  for (const TransformOp& op : defaults)
    if (type == type_of(op)) return op;
  std::string known;
  for (const char* name : kTypes) known += concat(" ", name);
  throw ConfigError("transforms: no such type '", type, "'; known:", known);
}

Sample apply(const TransformOp& op, Sample sample, RandomKey key, std::string* draws) {
  DETR_CHECK(sample.boxes.size() == sample.labels.size(), "transform: ", sample.boxes.size(), " boxes with ", sample.labels.size(), " labels");
  return std::visit([&](const auto& o) { return apply_op(o, std::move(sample), key, draws); }, op);
}

Sample apply_transforms(Sample sample, std::span<const TransformOp> ops, const TransformPolicy& policy, std::int64_t epoch, RandomKey key,
                        std::string* draws) {
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const bool left_out = epoch >= policy.epoch && std::ranges::find(policy.ops, type_of(ops[i])) != policy.ops.end();
    if (!left_out) sample = apply(ops[i], std::move(sample), key.fold(i), draws);
  }
  if (sample.left || sample.top || sample.right || sample.bottom) sample = flatten(std::move(sample));
  return sample;
}

std::array<std::int64_t, 2> output_size(std::span<const TransformOp> ops) {
  std::array<std::int64_t, 2> size{};
  for (const TransformOp& op : ops) {
    if (const auto* to = std::get_if<Resize>(&op)) size = {to->height, to->width};
    else if (const auto* to_pad = std::get_if<PadToSize>(&op)) size = {to_pad->height, to_pad->width};
    else if (std::holds_alternative<RandomZoomOut>(op) || std::holds_alternative<RandomIoUCrop>(op)) size = {};
  }
  if (size[0] == 0) throw ConfigError("transforms: the list must end in one size for all pictures; add Resize after the last RandomZoomOut and RandomIoUCrop");
  return size;
}

std::vector<TransformOp> training_transforms(std::int64_t height, std::int64_t width) {
  RandomIoUCrop crop_op;
  crop_op.p = 0.8;
  return {RandomPhotometricDistort{}, RandomZoomOut{},       crop_op,                SanitizeBoundingBoxes{},
          RandomHorizontalFlip{},     Resize{height, width}, SanitizeBoundingBoxes{}};
}

std::vector<TransformOp> evaluation_transforms(std::int64_t height, std::int64_t width) { return {Resize{height, width}}; }

void check_transform(const TransformOp& op) {
  std::visit([](const auto& o) { check_op(o); }, op);
}

}  // namespace detr::data

#include "data/denoising.h"

#include <algorithm>

#include "runtime/error.h"

namespace detr::data {
namespace {

using Box = std::array<double, 4>;

void store(const Tensor& boxes, std::int64_t row, const Box& box) {
  for (std::int64_t i = 0; i < 4; ++i) {
    const double value = box[static_cast<std::size_t>(i)];
    if (boxes.dtype() == DType::f64) boxes.data<double>()[row * 4 + i] = value;
    else boxes.data<float>()[row * 4 + i] = static_cast<float>(value);
  }
}

Box load(const Tensor& boxes, std::int64_t row) {
  Box box{};
  for (std::int64_t i = 0; i < 4; ++i)
    box[static_cast<std::size_t>(i)] = boxes.dtype() == DType::f64 ? boxes.data<double>()[row * 4 + i] : double{boxes.data<float>()[row * 4 + i]};
  return box;
}

/// sigmoid(inverse_sigmoid(x)) for x in [0, 1], where the inverse is ln(max(x, eps) / max(1 - x, eps)).
double through_logit(double x) {
  constexpr double kEps = 1e-5;
  const double a = std::max(x, kEps), b = std::max(1 - x, kEps);
  return a / (a + b);
}

Box add_noise(const Box& box, double scale, std::int64_t side, const DenoisingDraw& draw) {
  const auto& [cx, cy, w, h] = box;
  Box corners{cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2};
  for (std::size_t i = 0; i < 4; ++i) {
    const double half = (i % 2 ? h : w) / 2;
    corners[i] = std::clamp(corners[i] + draw.sign[i] * (draw.part[i] + static_cast<double>(side)) * half * scale, 0.0, 1.0);
  }
  const auto& [x0, y0, x1, y1] = corners;   // may have crossed: a negative size
  return {(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0};
}

}  // namespace

std::int64_t box_capacity(std::int64_t boxes) {
  DETR_CHECK(boxes >= 0, "box_capacity: boxes must be >= 0, got ", boxes);
  std::int64_t capacity = 32;
  while (capacity < boxes) capacity *= 4;
  return capacity;
}

std::int64_t denoising_capacity(std::int64_t num_denoising, std::int64_t largest) {
  DETR_CHECK(num_denoising >= 0 && largest >= 0, "denoising_capacity: num_denoising and largest must be >= 0, got ", num_denoising, " and ", largest);
  if (num_denoising == 0) return 0;
  return 2 * (largest <= num_denoising ? num_denoising : box_capacity(largest));
}

Targets make_targets(const std::vector<ImageTargets>& images, std::int64_t gcap, DType dtype) {
  DETR_CHECK(dtype == DType::f32 || dtype == DType::f64, "make_targets: dtype must be f32 or f64, got ", dtype);
  const auto n = static_cast<std::int64_t>(images.size());
  Targets targets{host_zeros({n, gcap}, DType::i64), host_zeros({n, gcap, 4}, dtype), host_zeros({n}, DType::i64)};
  for (std::int64_t i = 0; i < n; ++i) {
    const ImageTargets& image = images[static_cast<std::size_t>(i)];
    const auto count = static_cast<std::int64_t>(image.labels.size());
    DETR_CHECK(image.boxes.size() == image.labels.size(), "make_targets: image ", i, " has ", image.boxes.size(), " boxes with ", count, " labels");
    DETR_CHECK(count <= gcap, "make_targets: image ", i, " has ", count, " boxes for ", gcap, " slots");
    std::ranges::copy(image.labels, targets.labels.data<std::int64_t>() + i * gcap);
    for (std::int64_t j = 0; j < count; ++j) store(targets.boxes, i * gcap + j, image.boxes[static_cast<std::size_t>(j)]);
    targets.counts.data<std::int64_t>()[i] = count;
    targets.total += count;
    targets.largest = std::max(targets.largest, count);
  }
  return targets;
}

DenoisingDraws keyed_draws(std::vector<RandomKey> image_keys, std::int64_t num_classes) {
  return [keys = std::move(image_keys), num_classes](const DenoisingSlot& slot) {
    const auto fold = [](RandomKey key, std::int64_t coordinate) { return key.fold(static_cast<std::uint64_t>(coordinate)); };
    RandomSequence random(fold(fold(fold(keys.at(static_cast<std::size_t>(slot.image)), slot.group), slot.side), slot.box));
    DenoisingDraw draw;
    draw.label_mask = random.uniform();
    draw.new_label = random.uniform_int(num_classes);
    for (double& sign : draw.sign) sign = random.uniform_int(2) ? 1 : -1;
    for (double& part : draw.part) part = random.uniform();
    return draw;
  };
}

Denoising make_denoising(const Targets& targets, const DenoisingOptions& options, const DenoisingDraws& draws, std::int64_t qcap,
                         std::int64_t largest) {
  const std::int64_t n = targets.counts.numel(), gcap = targets.labels.dim(-1);
  if (largest < 0) largest = targets.largest;
  DETR_CHECK(largest >= targets.largest, "make_denoising: largest is ", largest, ", but an image has ", targets.largest, " boxes");
  DETR_CHECK(options.num_denoising >= 0, "make_denoising: num_denoising must be >= 0, got ", options.num_denoising);
  DETR_CHECK(options.num_classes >= 1, "make_denoising: num_classes must be >= 1, got ", options.num_classes);
  DETR_CHECK(options.box_noise_scale >= 0, "make_denoising: box_noise_scale must be >= 0, got ", options.box_noise_scale);
  const bool off = options.num_denoising == 0, nothing = largest == 0;
  const std::int64_t m = std::max<std::int64_t>(largest, 1);
  const std::int64_t groups = off ? 0 : nothing ? 1 : std::max<std::int64_t>(1, options.num_denoising / m);
  const std::int64_t slots = groups * 2 * m;
  if (off) qcap = 0;
  DETR_CHECK(qcap >= slots, "make_denoising: ", groups, " groups of ", 2 * m, " slots need qcap >= ", slots, ", got ", qcap);

  Denoising result;
  result.groups = groups;
  result.classes = host_zeros({n, qcap}, DType::i64);
  result.boxes = host_zeros({n, qcap, 4}, targets.boxes.dtype());
  result.group = host_zeros({qcap}, DType::i64);
  result.match = host_zeros({n, qcap}, DType::i64);
  std::ranges::fill(result.classes.span<std::int64_t>(), options.num_classes);
  std::ranges::fill(result.match.span<std::int64_t>(), -1);
  for (std::int64_t p = 0; p < qcap; ++p) result.group.data<std::int64_t>()[p] = p < slots ? p / (2 * m) : -2;

  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t count = targets.counts.data<std::int64_t>()[i];
    for (std::int64_t p = 0; p < qcap; ++p) {
      const DenoisingSlot slot{i, p / (2 * m), p / m % 2, p % m, p};
      const bool real = p < slots && slot.box < count, dummy = p < slots && nothing;
      Box box{};
      if (real || dummy) {
        const DenoisingDraw draw = draws(slot);
        const std::int64_t row = i * gcap + slot.box;
        if (real) {
          const bool flip = draw.label_mask < options.label_noise_ratio * 0.5;
          result.classes.data<std::int64_t>()[i * qcap + p] = flip ? draw.new_label : targets.labels.data<std::int64_t>()[row];
          if (slot.side == 0) result.match.data<std::int64_t>()[i * qcap + p] = slot.box;
        }
        box = add_noise(real ? load(targets.boxes, row) : Box{0.5, 0.5, 0.1, 0.1}, options.box_noise_scale, slot.side, draw);
      }
      for (double& value : box) value = through_logit(std::clamp(value, 0.0, 1.0));
      store(result.boxes, i * qcap + p, box);
    }
  }
  return result;
}

}  // namespace detr::data

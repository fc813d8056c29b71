#include "train/golden_inputs.h"

#include <cmath>

#include "models/reference_layout.h"

namespace detr::train::golden {

Generator::Generator(std::string_view name) : hash_(0xcbf29ce484222325ULL) {
  for (const char c : name) hash_ = (hash_ ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
}

double Generator::operator()(std::int64_t i) const {
  std::uint64_t z = hash_ + (static_cast<std::uint64_t>(i) + 1) * 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  z ^= z >> 31;
  return static_cast<double>(z >> 40) * 0x1p-24;
}

bool is_generated(const Parameter& parameter) { return !parameter.name().ends_with("num_points_scale"); }

std::vector<double> parameter_values(const Parameter& parameter) {
  const std::string& name = parameter.name();
  const Shape& shape = parameter.shape();
  const bool class_embed = name.ends_with("denoising_class_embed.weight");
  double lo = -0.1, hi = 0.1;
  if (class_embed) {
    lo = -1, hi = 1;
  } else if (shape.rank() >= 2) {
    hi = std::sqrt(3.0 / (static_cast<double>(shape.numel()) / static_cast<double>(shape[0])));
    lo = -hi;
  } else if (name.ends_with("running_var")) {
    lo = 0.5, hi = 1.5;
  } else if (name.ends_with("sampling_offsets.bias")) {
    lo = -2, hi = 2;
  } else if (name.ends_with("bias") && name.find("score_head") != std::string::npos) {
    lo = -3, hi = -2;
  } else if (name.ends_with("weight")) {
    lo = 0.8, hi = 1.2;
  }
  const Generator u(name);
  std::vector<double> values(static_cast<std::size_t>(shape.numel()));
  for (std::int64_t i = 0; i < shape.numel(); ++i) values[static_cast<std::size_t>(i)] = lo + (hi - lo) * u(models::reference_index(shape, i));
  if (class_embed) {
    for (std::size_t i = values.size() - static_cast<std::size_t>(shape[1]); i < values.size(); ++i) values[i] = 0;
  }
  return values;
}

Tensor pictures(const std::string& name, std::int64_t n, std::int64_t h, std::int64_t w) {
  const Generator u(name);
  Tensor images = host_zeros({n, h, w, 3}, DType::f64);
  for (std::int64_t i = 0; i < images.numel(); ++i) images.data<double>()[i] = u(models::reference_index(images.shape(), i));
  return images;
}

std::vector<data::ImageTargets> targets(const std::string& prefix, const std::vector<std::int64_t>& counts, std::int64_t num_classes) {
  std::vector<data::ImageTargets> result;
  for (std::size_t b = 0; b < counts.size(); ++b) {
    const std::string name = prefix + ".target" + std::to_string(b);
    const Generator wh(name + ".wh"), c(name + ".c"), label(name + ".label");
    data::ImageTargets& image = result.emplace_back();
    for (std::int64_t j = 0; j < counts[b]; ++j) {
      std::array<double, 4> box{};
      for (std::int64_t k = 0; k < 2; ++k) {
        const double size = 0.05 + (0.5 - 0.05) * wh(2 * j + k);
        box[static_cast<std::size_t>(k)] = c(2 * j + k) * (1 - size) + size / 2;
        box[static_cast<std::size_t>(k + 2)] = size;
      }
      image.boxes.push_back(box);
      image.labels.push_back(static_cast<std::int64_t>(label(j) * static_cast<double>(num_classes)));
    }
  }
  return result;
}

data::DenoisingDraws denoising_draws(std::int64_t slots, std::int64_t num_classes) {
  return [slots, num_classes, mask = Generator("dn.label_mask"), label = Generator("dn.new_label"), sign = Generator("dn.box_sign"),
          part = Generator("dn.box_part")](const data::DenoisingSlot& slot) {
    const std::int64_t i = slot.image * slots + slot.index;
    data::DenoisingDraw draw;
    draw.label_mask = mask(i);
    draw.new_label = static_cast<std::int64_t>(label(i) * static_cast<double>(num_classes));
    for (std::int64_t k = 0; k < 4; ++k) {
      draw.sign[static_cast<std::size_t>(k)] = std::floor(sign(i * 4 + k) * 2) * 2 - 1;
      draw.part[static_cast<std::size_t>(k)] = part(i * 4 + k);
    }
    return draw;
  };
}

}  // namespace detr::train::golden

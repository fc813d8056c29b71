#include "bench/scene.h"

#include <algorithm>

namespace detr::bench {

Scene make_scene(std::int64_t n, std::int64_t fullest, std::uint64_t seed) {
  constexpr double kMeanBoxes = 7.3;
  const data::DenoisingOptions options;
  RandomSequence draw{RandomKey(seed).fold(2)};
  std::vector<data::ImageTargets> images(static_cast<std::size_t>(n));
  std::vector<RandomKey> keys;
  std::int64_t largest = 0;
  double due = 0;   // the part of a box that rounding has left over so far
  for (std::int64_t i = 0; i < n; ++i) {
    due += 2 * kMeanBoxes * draw.uniform();
    auto count = static_cast<std::int64_t>(due);
    due -= static_cast<double>(count);
    if (i == 0 && fullest > 0) count = fullest;
    data::ImageTargets& image = images[static_cast<std::size_t>(i)];
    for (std::int64_t g = 0; g < count; ++g) {
      const double w = draw.uniform(0.05, 0.5), h = draw.uniform(0.05, 0.5);
      image.labels.push_back(draw.uniform_int(options.num_classes));
      image.boxes.push_back({draw.uniform(w / 2, 1 - w / 2), draw.uniform(h / 2, 1 - h / 2), w, h});
    }
    keys.push_back(RandomKey(seed).fold(static_cast<std::uint64_t>(3 + i)));
    largest = std::max(largest, count);
  }
  Scene scene;
  scene.targets = data::make_targets(images, data::box_capacity(largest), DType::f32);
  scene.denoising = data::make_denoising(scene.targets, options, data::keyed_draws(keys, options.num_classes), data::denoising_capacity(options.num_denoising, largest));
  return scene;
}

}  // namespace detr::bench

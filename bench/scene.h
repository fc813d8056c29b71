#pragma once
#include <cstdint>

#include "data/denoising.h"

namespace detr::bench {

/// The truth and the denoising queries of a batch, as the loader makes them.
struct Scene {
  data::Targets targets;
  data::Denoising denoising;
};

/// `n` pictures of 80 classes with 7.3 boxes on average, between none and 14; the first has `fullest` boxes where that is not 0.
Scene make_scene(std::int64_t n, std::int64_t fullest, std::uint64_t seed);

}  // namespace detr::bench

#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "autograd/parameter.h"
#include "data/denoising.h"
#include "runtime/tensor.h"

namespace detr::train::golden {

/// Inputs of the recorded reference runs: every weight, picture, target and draw is a closed-form function of a name and an index,
/// so no weight file is needed. Element i of the tensor `name` is
///   lo + (hi - lo) u,   u = top 24 bits of a SplitMix64 finaliser of (FNV-1a 64 of the name) + (i + 1) 0x9E3779B97F4A7C15, / 2^24
/// with i the row-major index in the reference's layout (NCHW, OIHW).
class Generator {
 public:
  explicit Generator(std::string_view name);
  /// u(name, i) in [0, 1), exact in float32.
  double operator()(std::int64_t i) const;

 private:
  std::uint64_t hash_;
};

/// Whether the values of this parameter or buffer are generated; others (num_points_scale) keep their initial values.
bool is_generated(const Parameter& parameter);
/// All elements in our layout.
std::vector<double> parameter_values(const Parameter& parameter);

/// Pictures (N, H, W, 3) f64 from the (N, 3, H, W) tensor `name`.
Tensor pictures(const std::string& name, std::int64_t n, std::int64_t h, std::int64_t w);

/// Targets of each image; names <prefix>.target<b>.{wh,c,label}.
std::vector<data::ImageTargets> targets(const std::string& prefix, const std::vector<std::int64_t>& counts, std::int64_t num_classes);

/// The recorded denoising draws of a batch with `slots` = Q slots an image.
data::DenoisingDraws denoising_draws(std::int64_t slots, std::int64_t num_classes);

}  // namespace detr::train::golden

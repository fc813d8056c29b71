#pragma once
#include <optional>
#include <string>
#include <vector>

#include "models/detr/config.h"
#include "models/nn/layers.h"

namespace detr::models {

/// One residual block of PResNet-vd: basic (two 3 x 3) or bottleneck (1 x 1, 3 x 3 with the stride, 1 x 1 to four times the
/// width). The first block of each stage has a 1 x 1 projection shortcut, after 2 x 2 average pooling where it strides.
struct ResidualBlock {
  ConvNorm branch2a, branch2b;
  std::optional<ConvNorm> branch2c;    ///< bottleneck only
  std::optional<ConvNorm> shortcut;    ///< first block of a stage only
  bool pool_shortcut = false;

  ResidualBlock(ParameterList& list, const std::string& name, std::int64_t in, std::int64_t width, bool bottleneck, std::int64_t stride,
                bool first, bool frozen_norm);
  Variable forward(Context& ctx, const Variable& x) const;
};

/// PResNet-vd: three 3 x 3 stem convolutions, max pooling, four stages; returns stages 1 to 3 (strides 8, 16, 32).
/// He et al. 2018, "Bag of Tricks", arXiv:1812.01187, ResNet-D; names as in RT-DETRv2.
class Backbone {
 public:
  Backbone(ParameterList& list, const std::string& name, const BackboneConfig& config);

  /// x (N, H, W, 3), H and W multiples of 32 -> three maps (N, H / s, W / s, channels()[i]).
  std::vector<Variable> forward(Context& ctx, const Variable& x) const;
  const std::vector<std::int64_t>& channels() const { return channels_; }

 private:
  std::vector<ConvNorm> stem_;
  std::vector<std::vector<ResidualBlock>> stages_;
  std::vector<std::int64_t> channels_;
};

}  // namespace detr::models

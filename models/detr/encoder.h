#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "models/detr/config.h"
#include "models/nn/layers.h"

namespace detr::models {

/// Cross-stage partial block with RepVGG units (two branches each: 3 x 3 and 1 x 1 with batch norm, added, SiLU):
///   z = RepVGG^n(conv1(x)) + conv2(x), then conv3 where the hidden width is not the output's.
struct CspRepBlock {
  ConvNorm conv1, conv2;
  std::vector<std::pair<ConvNorm, ConvNorm>> units;
  std::optional<ConvNorm> conv3;

  CspRepBlock(ParameterList& list, const std::string& name, std::int64_t in, std::int64_t out, std::int64_t hidden, std::int64_t units);
  Variable forward(Context& ctx, const Variable& x) const;
};

/// RT-DETR's hybrid encoder: projection of three maps to one width, one transformer layer on the coarsest (AIFI), then a top-down
/// and a bottom-up pass of CSP blocks. Zhao et al. 2023, "DETRs Beat YOLOs on Real-time Object Detection", arXiv:2304.08069, fig. 3.
class HybridEncoder {
 public:
  HybridEncoder(ParameterList& list, const std::string& name, const std::vector<std::int64_t>& in_channels, const EncoderConfig& config);

  /// Three maps (N, h, w, C_l) -> three maps (N, h, w, E), strides 8, 16, 32.
  std::vector<Variable> forward(Context& ctx, const std::vector<Variable>& maps);

 private:
  Variable aifi(Context& ctx, const Variable& map);

  EncoderConfig config_;
  std::vector<ConvNorm> input_proj_;
  SelfAttention attention_;
  Linear linear1_, linear2_;
  LayerNorm norm1_, norm2_;
  std::vector<ConvNorm> lateral_, downsample_;
  std::vector<CspRepBlock> fpn_, pan_;
  std::map<std::pair<std::int64_t, std::int64_t>, Tensor> position_tables_;
};

/// Sine and cosine position table (h w, E) in float32 as the reference builds it: entry p stands for column p / h and row p mod h,
/// although tokens are row-major.
std::vector<float> position_table(std::int64_t h, std::int64_t w, std::int64_t width, double temperature);

}  // namespace detr::models

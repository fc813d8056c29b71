#pragma once
#include "models/detr/backbone.h"
#include "models/detr/criterion.h"
#include "models/detr/decoder.h"
#include "models/detr/encoder.h"

namespace detr::models {

/// RT-DETRv2: pictures in, boxes and class logits out. Parameters have the reference's names.
/// Lv et al. 2024, "RT-DETRv2", arXiv:2407.17140.
class RtDetr {
 public:
  explicit RtDetr(const ModelConfig& config);

  /// images (N, H, W, 3) in [0, 1], H and W multiples of 32.
  /// Throws InvalidArgument for other sizes, and where there are fewer feature cells than queries.
  DecoderOutput forward(Context& ctx, const Variable& images, const DenoisingInputs& denoising = {}, const Tensor& imposed_topk = {});

  const ModelConfig& config() const { return config_; }
  const ParameterList& parameters() const { return list_; }
  /// Outputs of the last forward's backbone and encoder; empty unless keep_features is set.
  const std::vector<Variable>& backbone_features() const { return backbone_features_; }
  const std::vector<Variable>& encoder_features() const { return encoder_features_; }
  /// Keeps the features of each forward until the next (off by default: they are large).
  bool keep_features = false;

 private:
  ModelConfig config_;
  ParameterList list_;
  Backbone backbone_;
  HybridEncoder encoder_;
  Decoder decoder_;
  std::vector<Variable> backbone_features_, encoder_features_;
};

}  // namespace detr::models

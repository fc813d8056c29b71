#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace detr::models {

/// PResNet-vd. Field names are the reference's configuration keys; `widths` and `stem_width` are ours.
struct BackboneConfig {
  std::int64_t depth = 50;                          ///< 18, 34, 50 or 101 set `blocks` and the block type; 0: basic blocks, `blocks` as given
  std::vector<std::int64_t> blocks;                 ///< blocks of each of the four stages; empty: by depth
  std::vector<std::int64_t> widths = {64, 128, 256, 512};
  std::int64_t stem_width = 32;                     ///< channels of the first two stem convolutions; the third has twice as many
  std::int64_t freeze_at = -1;                      ///< -1: nothing; k >= 0: the stem and the first k stages
  bool freeze_norm = false;                         ///< batch norms become constants
};

struct EncoderConfig {
  std::int64_t hidden_dim = 256;
  std::int64_t dim_feedforward = 1024;
  std::int64_t nhead = 8;
  double expansion = 1.0;
  double depth_mult = 1.0;
  double pe_temperature = 10000;
};

struct DecoderConfig {
  std::int64_t num_classes = 80;
  std::int64_t hidden_dim = 256;
  std::int64_t num_queries = 300;
  std::int64_t num_layers = 6;
  std::int64_t nhead = 8;
  std::int64_t dim_feedforward = 1024;
  std::vector<std::int64_t> num_points = {4, 4, 4};  ///< sampling points of each level
  std::int64_t num_denoising = 100;
  double label_noise_ratio = 0.5;
  double box_noise_scale = 1.0;
  std::int64_t eval_idx = -1;                        ///< layer that evaluation reads; negative counts from the end
  std::string cross_attn_method = "default";         ///< or "discrete"
};

struct CriterionConfig {
  double weight_vfl = 1, weight_bbox = 5, weight_giou = 2;
  double alpha = 0.75, gamma = 2;
  double cost_class = 2, cost_bbox = 5, cost_giou = 2;
  double matcher_alpha = 0.25, matcher_gamma = 2;
};

/// Everything that fixes the network and its losses.
struct ModelConfig {
  BackboneConfig backbone;
  EncoderConfig encoder;
  DecoderConfig decoder;
  CriterionConfig criterion;

  /// Throws ConfigError naming the key if the values do not make a model.
  void validate() const;
};

/// Configuration of a published variant: r18, r34, r50m, r50 or r101. Throws ConfigError for another name.
ModelConfig variant_config(const std::string& variant);

}  // namespace detr::models

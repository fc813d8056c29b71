#include "models/detr/config.h"

#include "runtime/error.h"

namespace detr::models {

void ModelConfig::validate() const {
  const auto require = [](bool holds, auto... parts) {
    if (!holds) throw ConfigError(parts...);
  };
  const auto& b = backbone;
  require(b.depth == 0 || b.depth == 18 || b.depth == 34 || b.depth == 50 || b.depth == 101, "PResNet.depth must be 18, 34, 50 or 101, or 0 with PResNet.blocks; got ", b.depth);
  require(b.depth != 0 || b.blocks.size() == 4, "PResNet.blocks must have four entries where depth is 0");
  require(b.blocks.empty() || b.blocks.size() == 4, "PResNet.blocks must have four entries");
  require(b.widths.size() == 4, "PResNet.widths must have four entries");
  for (const auto n : b.blocks) require(n >= 1, "PResNet.blocks: each stage needs a block, got ", n);
  for (const auto w : b.widths) require(w >= 1, "PResNet.widths must be positive, got ", w);
  require(b.stem_width >= 1, "PResNet.stem_width must be positive");
  require(b.freeze_at >= -1 && b.freeze_at <= 4, "PResNet.freeze_at must be -1 to 4, got ", b.freeze_at);
  const auto& e = encoder;
  require(e.hidden_dim >= 4 && e.hidden_dim % 4 == 0, "HybridEncoder.hidden_dim must be a multiple of 4, got ", e.hidden_dim);
  require(e.nhead >= 1 && e.hidden_dim % e.nhead == 0, "HybridEncoder.nhead must divide hidden_dim ", e.hidden_dim, ", got ", e.nhead);
  require(e.dim_feedforward >= 1, "HybridEncoder.dim_feedforward must be positive");
  require(e.expansion > 0 && static_cast<std::int64_t>(static_cast<double>(e.hidden_dim) * e.expansion) >= 1, "HybridEncoder.expansion must be positive");
  require(e.depth_mult > 0, "HybridEncoder.depth_mult must be positive");
  const auto& d = decoder;
  require(d.num_classes >= 1, "num_classes must be at least 1, got ", d.num_classes);
  require(d.num_queries >= 1, "RTDETRTransformerv2.num_queries must be at least 1");
  require(d.num_layers >= 1, "RTDETRTransformerv2.num_layers must be at least 1");
  require(d.nhead >= 1 && d.hidden_dim % d.nhead == 0, "RTDETRTransformerv2.nhead must divide hidden_dim ", d.hidden_dim, ", got ", d.nhead);
  require(d.num_points.size() == 3, "RTDETRTransformerv2.num_points must have one entry for each of the 3 levels");
  for (const auto p : d.num_points) require(p >= 1, "RTDETRTransformerv2.num_points must be positive, got ", p);
  require(d.num_denoising >= 0, "RTDETRTransformerv2.num_denoising must not be negative");
  require(d.box_noise_scale > 0 || d.num_denoising == 0, "RTDETRTransformerv2.box_noise_scale must be positive");
  require(d.label_noise_ratio >= 0 && d.label_noise_ratio <= 2, "RTDETRTransformerv2.label_noise_ratio must be 0 to 2");
  require(d.eval_idx >= -d.num_layers && d.eval_idx < d.num_layers, "RTDETRTransformerv2.eval_idx ", d.eval_idx, " is no layer of ", d.num_layers);
  require(d.cross_attn_method == "default" || d.cross_attn_method == "discrete", "RTDETRTransformerv2.cross_attn_method must be default or discrete, got ", d.cross_attn_method);
}

ModelConfig variant_config(const std::string& variant) {
  ModelConfig c;
  if (variant == "r18" || variant == "r34") {
    c.backbone.depth = variant == "r18" ? 18 : 34;
    c.encoder.expansion = 0.5;
    c.decoder.num_layers = variant == "r18" ? 3 : 4;
  } else if (variant == "r50m" || variant == "r50" || variant == "r101") {
    c.backbone.depth = variant == "r101" ? 101 : 50;
    c.backbone.freeze_at = 0;
    c.backbone.freeze_norm = true;
    if (variant == "r50m") {
      c.encoder.expansion = 0.5;
      c.decoder.eval_idx = 2;
    }
    if (variant == "r101") {
      c.encoder.hidden_dim = 384;
      c.encoder.dim_feedforward = 2048;
    }
  } else {
    throw ConfigError("unknown variant '", variant, "'; there are r18, r34, r50m, r50 and r101");
  }
  return c;
}

}  // namespace detr::models

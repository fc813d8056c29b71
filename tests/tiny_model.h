#pragma once
#include "models/detr/rtdetr.h"

namespace detr::test {

/// A whole RT-DETRv2 with all its parts and the smallest widths; made for pictures of 64 pixels, which have 84 feature cells.
/// Not inlined: GCC 12 at -O3 gives a false alarm (-Wmaybe-uninitialized) where the constructors of a caller and of this meet.
[[gnu::noinline]] inline models::ModelConfig tiny_config() {
  models::ModelConfig c;
  c.backbone.depth = 0;
  c.backbone.blocks = {1, 1, 1, 1};
  c.backbone.widths = {4, 8, 8, 12};
  c.backbone.stem_width = 4;
  c.encoder.hidden_dim = 16;
  c.encoder.dim_feedforward = 24;
  c.encoder.nhead = 2;
  c.encoder.expansion = 0.5;
  c.encoder.depth_mult = 0.34;
  c.decoder.num_classes = 3;
  c.decoder.hidden_dim = 16;
  c.decoder.num_queries = 12;
  c.decoder.num_layers = 2;
  c.decoder.nhead = 2;
  c.decoder.dim_feedforward = 24;
  c.decoder.num_points = {2, 2, 2};
  c.decoder.num_denoising = 8;
  return c;
}

}  // namespace detr::test

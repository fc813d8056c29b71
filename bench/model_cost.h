#pragma once
#include <cstdint>

#include "bench/roofline.h"
#include "models/detr/config.h"

namespace detr::bench {

/// The floor of a training step by part: forward, and the gradients that are needed, in bf16 with fused epilogues. Sampler, optimiser, pools and
/// losses are not in it.
struct ModelCost {
  Cost stem;            ///< the three stem convolutions
  Cost backbone;        ///< the convolutions of the stages
  Cost encoder_convs;   ///< the encoder's convolutions
  Cost decoder_input;   ///< projections of the three maps to the decoder's width
  Cost batch_norm;      ///< trainable batch norms
  Cost aifi;            ///< the encoder's transformer layer
  Cost heads;           ///< encoder output projection and both heads, on all tokens
  Cost values;          ///< value projections of all decoder layers, as one product
  Cost decoder;         ///< all decoder layers with their heads
  std::int64_t convolutions = 0, conv_weights = 0;   ///< how many there are, and the elements of all their weights

  Cost total() const;
};

/// Walks a model of these settings for `images` pictures of `size` x `size` pixels, a multiple of 32.
///
/// A trainable batch norm takes seven passes over its map (statistics in the convolution's epilogue). In the backbone a dgrad's epilogue reads the
/// mask of the ReLU before it, and at a block's input the gradient of the identity; elsewhere each dgrad may have to add to a gradient that is
/// there. `queries`: with denoising slots. Throws ConfigError for a depth that is not published.
ModelCost training_cost(const models::ModelConfig& config, std::int64_t images, std::int64_t size, std::int64_t queries);

}  // namespace detr::bench

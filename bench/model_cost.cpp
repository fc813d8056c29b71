#include "bench/model_cost.h"

#include <array>
#include <cmath>

#include "runtime/error.h"

namespace detr::bench {
namespace {

constexpr double kElement = 2;          // bytes of a bf16
constexpr double kBatchNormPasses = 7;

std::array<std::int64_t, 4> blocks_of(const models::BackboneConfig& config) {
  if (config.blocks.size() == 4) return {config.blocks[0], config.blocks[1], config.blocks[2], config.blocks[3]};
  switch (config.depth) {
    case 18: return {2, 2, 2, 2};
    case 34:
    case 50: return {3, 4, 6, 3};
    case 101: return {3, 4, 23, 3};
    default: throw ConfigError("PResNet.depth: no block counts for depth ", config.depth);
  }
}

/// What the passes of a convolution read beside their operands, and which passes there are.
struct Passes {
  double forward_maps = 0, gradient_maps = 0;
  bool weight_gradient = true, data_gradient = true;
};

class Walk {
 public:
  Walk(const models::ModelConfig& config, std::int64_t images, std::int64_t size, std::int64_t queries) : config_(config), n_(images), size_(size), queries_(queries) {}

  ModelCost run() {
    stem();
    stages();
    encoder();
    decoder();
    return cost_;
  }

 private:
  /// A convolution on a map of `side` x `side`; its batch norm where that is trained.
  void conv(Cost& part, std::int64_t side, std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride, const Passes& passes, bool trained_norm) {
    const ConvGeometry g{n_, side, side, in, out, kernel, stride};
    part += conv_forward(g, kElement, passes.forward_maps);
    if (passes.data_gradient) part += conv_data_gradient(g, kElement, passes.gradient_maps);
    if (passes.weight_gradient) part += conv_weight_gradient(g, kElement);
    if (trained_norm) cost_.batch_norm += kernel_cost(0, kBatchNormPasses * kElement * g.y());
    ++cost_.convolutions;
    cost_.conv_weights += static_cast<std::int64_t>(g.weights());
  }

  void stem() {
    const auto& b = config_.backbone;
    const bool trained = b.freeze_at < 0;
    const Passes first{0, 0, trained, false}, other{0, 1, trained, trained};
    const std::int64_t w = b.stem_width;
    conv(cost_.stem, size_, 3, w, 3, 2, first, !b.freeze_norm);
    conv(cost_.stem, size_ / 2, w, w, 3, 1, other, !b.freeze_norm);
    conv(cost_.stem, size_ / 2, w, 2 * w, 3, 1, other, !b.freeze_norm);
  }

  void stages() {
    const auto& b = config_.backbone;
    const std::array<std::int64_t, 4> blocks = blocks_of(b);
    const bool bottleneck = b.depth >= 50, norm = !b.freeze_norm;
    std::int64_t side = size_ / 4, in = 2 * b.stem_width;
    for (std::size_t s = 0; s < 4; ++s) {
      const std::int64_t width = b.widths[s], out = bottleneck ? 4 * width : width;
      const bool trained = static_cast<std::int64_t>(s) >= b.freeze_at;
      for (std::int64_t block = 0; block < blocks[s]; ++block) {
        const bool first = block == 0;
        const std::int64_t stride = first && s > 0 ? 2 : 1, after = side / stride;
        // Behind a frozen part nothing wants the gradient of the input.
        const bool data = trained && !(first && b.freeze_at >= 0 && static_cast<std::int64_t>(s) == b.freeze_at);
        const Passes entry{0, 2, trained, data}, middle{0, 1, trained, trained}, join{1, 1, trained, trained}, shortcut{0, 0, trained, data};
        if (bottleneck) {
          conv(cost_.backbone, side, in, width, 1, 1, entry, norm);
          conv(cost_.backbone, side, width, width, 3, stride, middle, norm);
          conv(cost_.backbone, after, width, out, 1, 1, join, norm);
        } else {
          conv(cost_.backbone, side, in, width, 3, stride, entry, norm);
          conv(cost_.backbone, after, width, width, 3, 1, join, norm);
        }
        if (first) conv(cost_.backbone, after, in, out, 1, 1, shortcut, norm);
        side = after;
        in = out;
      }
      if (s > 0) channels_[s - 1] = out;
    }
  }

  void encoder_conv(std::int64_t side, std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride = 1) {
    conv(cost_.encoder_convs, side, in, out, kernel, stride, {0, 1, true, true}, true);
  }

  void csp_block(std::int64_t side) {
    const auto& e = config_.encoder;
    const auto hidden = static_cast<std::int64_t>(static_cast<double>(e.hidden_dim) * e.expansion);
    encoder_conv(side, 2 * e.hidden_dim, hidden, 1);
    encoder_conv(side, 2 * e.hidden_dim, hidden, 1);
    for (auto unit = static_cast<std::int64_t>(std::nearbyint(3 * e.depth_mult)); unit > 0; --unit) {
      encoder_conv(side, hidden, hidden, 3);
      encoder_conv(side, hidden, hidden, 1);
    }
    if (hidden != e.hidden_dim) encoder_conv(side, hidden, e.hidden_dim, 1);
  }

  void encoder() {
    const auto& e = config_.encoder;
    const std::int64_t width = e.hidden_dim;
    for (std::size_t l = 0; l < 3; ++l) encoder_conv(side_of(l), channels_[l], width, 1);
    encoder_conv(side_of(2), width, width, 1);
    csp_block(side_of(1));
    encoder_conv(side_of(1), width, width, 1);
    csp_block(side_of(0));
    encoder_conv(side_of(0), width, width, 3, 2);
    csp_block(side_of(1));
    encoder_conv(side_of(1), width, width, 3, 2);
    csp_block(side_of(2));

    const std::int64_t tokens = side_of(2) * side_of(2), rows = n_ * tokens;
    linear(cost_.aifi, rows, width, 3 * width);
    linear(cost_.aifi, rows, width, width);
    linear(cost_.aifi, rows, width, e.dim_feedforward);
    linear(cost_.aifi, rows, e.dim_feedforward, width);
    attention(cost_.aifi, tokens, width, e.nhead);
  }

  void decoder() {
    const auto& d = config_.decoder;
    const std::int64_t width = d.hidden_dim, layers = d.num_layers, classes = d.num_classes;
    std::int64_t tokens = 0, slots = 0;
    for (std::size_t l = 0; l < 3; ++l) {
      conv(cost_.decoder_input, side_of(l), config_.encoder.hidden_dim, width, 1, 1, {0, 1, true, true}, true);
      tokens += side_of(l) * side_of(l);
      slots += d.num_points[l];
    }
    linear(cost_.heads, n_ * tokens, width, width);
    linear(cost_.heads, n_ * tokens, width, classes);
    box_head(cost_.heads, n_ * tokens);
    linear(cost_.values, n_ * tokens, width, layers * width);

    const std::int64_t rows = n_ * queries_;
    Cost layer;
    linear(layer, rows, width, 3 * width);
    linear(layer, rows, width, width);
    linear(layer, rows, width, d.nhead * slots * 3);
    linear(layer, rows, width, width);
    linear(layer, rows, width, d.dim_feedforward);
    linear(layer, rows, d.dim_feedforward, width);
    attention(layer, queries_, width, d.nhead);
    linear(layer, rows, width, classes);
    box_head(layer, rows);
    layer += 2.0 * linear_product(rows, 4, 2 * width, kElement);   // the reference is constant: no data gradient
    linear(layer, rows, 2 * width, width);
    cost_.decoder += static_cast<double>(layers) * layer;
  }

  void box_head(Cost& part, std::int64_t rows) {
    const std::int64_t width = config_.decoder.hidden_dim;
    linear(part, rows, width, width);
    linear(part, rows, width, width);
    linear(part, rows, width, 4);
  }

  /// Forward, data gradient and weight gradient.
  void linear(Cost& part, std::int64_t rows, std::int64_t in, std::int64_t out) { part += 3.0 * linear_product(rows, in, out, kElement); }

  void attention(Cost& part, std::int64_t tokens, std::int64_t width, std::int64_t heads) {
    const AttentionGeometry g{n_, heads, tokens, tokens, width / heads};
    part += attention_forward(g, kElement) + attention_backward(g, kElement);
  }

  /// Of the map of stride 8, 16 or 32.
  std::int64_t side_of(std::size_t level) const { return size_ / (std::int64_t{8} << level); }

  const models::ModelConfig& config_;
  std::int64_t n_, size_, queries_;
  std::array<std::int64_t, 3> channels_{};
  ModelCost cost_;
};

}  // namespace

Cost ModelCost::total() const { return stem + backbone + encoder_convs + decoder_input + batch_norm + aifi + heads + values + decoder; }

ModelCost training_cost(const models::ModelConfig& config, std::int64_t images, std::int64_t size, std::int64_t queries) {
  DETR_CHECK(size > 0 && size % 32 == 0, "training_cost: size must be a multiple of 32, got ", size);
  return Walk(config, images, size, queries).run();
}

}  // namespace detr::bench

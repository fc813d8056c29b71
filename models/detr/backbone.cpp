#include "models/detr/backbone.h"

#include "autograd/spatial.h"
#include "runtime/error.h"

namespace detr::models {
namespace {

std::vector<std::int64_t> blocks_of(const BackboneConfig& config) {
  if (!config.blocks.empty()) return config.blocks;
  switch (config.depth) {
    case 18: return {2, 2, 2, 2};
    case 34:
    case 50: return {3, 4, 6, 3};
    case 101: return {3, 4, 23, 3};
    default: throw ConfigError("PResNet.depth: no block counts for depth ", config.depth);
  }
}

void freeze_all(const ParameterList& list, const std::string& prefix) {
  for (const Parameter& p : list.all()) {
    if (p.name().starts_with(prefix)) freeze(p);
  }
}

}  // namespace

ResidualBlock::ResidualBlock(ParameterList& list, const std::string& name, std::int64_t in, std::int64_t width, bool bottleneck,
                             std::int64_t stride, bool first, bool frozen_norm)
    : pool_shortcut(first && stride == 2) {
  const std::int64_t out = bottleneck ? 4 * width : width;
  if (first) {
    // Where it strides the reference nests the projection beside the pooling, hence the second ".conv" in its name.
    const std::string short_name = name + (pool_shortcut ? ".short.conv" : ".short");
    shortcut.emplace(list, short_name, in, out, 1, 1, Activation::none, frozen_norm);
  }
  if (bottleneck) {
    branch2a = ConvNorm(list, name + ".branch2a", in, width, 1, 1, Activation::relu, frozen_norm);
    branch2b = ConvNorm(list, name + ".branch2b", width, width, 3, stride, Activation::relu, frozen_norm);
    branch2c.emplace(list, name + ".branch2c", width, out, 1, 1, Activation::relu, frozen_norm);
  } else {
    branch2a = ConvNorm(list, name + ".branch2a", in, width, 3, stride, Activation::relu, frozen_norm);
    branch2b = ConvNorm(list, name + ".branch2b", width, width, 3, 1, Activation::relu, frozen_norm);
  }
}

Variable ResidualBlock::forward(Context& ctx, const Variable& x) const {
  const Variable a = branch2a.forward(ctx, x);
  Variable skip = x;   // after branch2a, so that in backward branch2a's convolution comes last and adds to what the shortcut left
  if (shortcut) skip = shortcut->forward(ctx, pool_shortcut ? avg_pool(ctx, x) : x);
  if (!branch2c) return branch2b.forward(ctx, a, skip);   // the shortcut is added before the last ReLU
  return branch2c->forward(ctx, branch2b.forward(ctx, a), skip);
}

Backbone::Backbone(ParameterList& list, const std::string& name, const BackboneConfig& config) {
  const bool frozen = config.freeze_norm;
  const std::int64_t w = config.stem_width;
  stem_.emplace_back(list, name + ".conv1.conv1_1", 3, w, 3, 2, Activation::relu, frozen);
  stem_.emplace_back(list, name + ".conv1.conv1_2", w, w, 3, 1, Activation::relu, frozen);
  stem_.emplace_back(list, name + ".conv1.conv1_3", w, 2 * w, 3, 1, Activation::relu, frozen);
  const bool bottleneck = config.depth >= 50;
  const std::vector<std::int64_t> blocks = blocks_of(config);
  std::int64_t in = 2 * w;
  for (std::size_t s = 0; s < 4; ++s) {
    std::vector<ResidualBlock>& stage = stages_.emplace_back();
    for (std::int64_t b = 0; b < blocks[s]; ++b) {
      const bool first = b == 0;
      stage.emplace_back(list, concat(name, ".res_layers.", s, ".blocks.", b), in, config.widths[s], bottleneck, first && s > 0 ? 2 : 1, first, frozen);
      in = bottleneck ? 4 * config.widths[s] : config.widths[s];
    }
    if (s > 0) channels_.push_back(in);
  }
  if (config.freeze_at >= 0) freeze_all(list, name + ".conv1.");
  for (std::int64_t s = 0; s < config.freeze_at; ++s) freeze_all(list, concat(name, ".res_layers.", s, "."));
}

std::vector<Variable> Backbone::forward(Context& ctx, const Variable& x) const {
  Variable y = x;
  for (const ConvNorm& conv : stem_) y = conv.forward(ctx, y);
  y = max_pool(ctx, y);
  std::vector<Variable> maps;
  for (std::size_t s = 0; s < stages_.size(); ++s) {
    for (const ResidualBlock& block : stages_[s]) y = block.forward(ctx, y);
    if (s > 0) maps.push_back(y);
  }
  return maps;
}

}  // namespace detr::models

#include "models/detr/encoder.h"

#include <cmath>

#include "autograd/pointwise.h"
#include "autograd/spatial.h"
#include "kernels/pointwise.h"
#include "models/nn/init.h"
#include "runtime/error.h"

namespace detr::models {

CspRepBlock::CspRepBlock(ParameterList& list, const std::string& name, std::int64_t in, std::int64_t out, std::int64_t hidden, std::int64_t n)
    : conv1(list, name + ".conv1", in, hidden, 1, 1, Activation::silu), conv2(list, name + ".conv2", in, hidden, 1, 1, Activation::silu) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::string unit = concat(name, ".bottlenecks.", i);
    ConvNorm three(list, unit + ".conv1", hidden, hidden, 3, 1, Activation::silu);
    ConvNorm one(list, unit + ".conv2", hidden, hidden, 1, 1, Activation::none);
    units.emplace_back(std::move(three), std::move(one));
  }
  if (hidden != out) conv3.emplace(list, name + ".conv3", hidden, out, 1, 1, Activation::silu);
}

Variable CspRepBlock::forward(Context& ctx, const Variable& x) const {
  Variable y = conv1.forward(ctx, x);
  for (const auto& [three, one] : units) y = sum_of_branches(ctx, three, one, y);
  const Variable z = add(ctx, y, conv2.forward(ctx, x));
  return conv3 ? conv3->forward(ctx, z) : z;
}

std::vector<float> position_table(std::int64_t h, std::int64_t w, std::int64_t width, double temperature) {
  const std::int64_t quarter = width / 4;
  std::vector<float> omega(static_cast<std::size_t>(quarter));
  for (std::int64_t k = 0; k < quarter; ++k) {
    const float exponent = static_cast<float>(k) / static_cast<float>(quarter);
    omega[static_cast<std::size_t>(k)] = 1.0F / std::pow(static_cast<float>(temperature), exponent);
  }
  std::vector<float> table(static_cast<std::size_t>(h * w * width));
  for (std::int64_t p = 0; p < h * w; ++p) {
    float* row = table.data() + p * width;
    const float a = static_cast<float>(p / h), b = static_cast<float>(p % h);
    for (std::int64_t k = 0; k < quarter; ++k) {
      const float o = omega[static_cast<std::size_t>(k)];
      row[k] = std::sin(a * o);
      row[quarter + k] = std::cos(a * o);
      row[2 * quarter + k] = std::sin(b * o);
      row[3 * quarter + k] = std::cos(b * o);
    }
  }
  return table;
}

HybridEncoder::HybridEncoder(ParameterList& list, const std::string& name, const std::vector<std::int64_t>& in_channels, const EncoderConfig& config)
    : config_(config) {
  const std::int64_t e = config.hidden_dim;
  for (std::size_t l = 0; l < in_channels.size(); ++l)
    input_proj_.emplace_back(list, concat(name, ".input_proj.", l), in_channels[l], e, 1, 1, Activation::none);
  const std::string layer = name + ".encoder.0.layers.0";
  attention_ = SelfAttention(list, layer + ".self_attn", e, config.nhead);
  linear1_ = Linear(list, layer + ".linear1", e, config.dim_feedforward);
  linear2_ = Linear(list, layer + ".linear2", config.dim_feedforward, e);
  norm1_ = LayerNorm(list, layer + ".norm1", e);
  norm2_ = LayerNorm(list, layer + ".norm2", e);
  const auto hidden = static_cast<std::int64_t>(static_cast<double>(e) * config.expansion);
  const auto units = static_cast<std::int64_t>(std::nearbyint(3 * config.depth_mult));
  for (int i = 0; i < 2; ++i) {
    lateral_.emplace_back(list, concat(name, ".lateral_convs.", i), e, e, 1, 1, Activation::silu);
    fpn_.emplace_back(list, concat(name, ".fpn_blocks.", i), 2 * e, e, hidden, units);
  }
  for (int i = 0; i < 2; ++i) {
    downsample_.emplace_back(list, concat(name, ".downsample_convs.", i), e, e, 3, 2, Activation::silu);
    pan_.emplace_back(list, concat(name, ".pan_blocks.", i), 2 * e, e, hidden, units);
  }
}

Variable HybridEncoder::aifi(Context& ctx, const Variable& map) {
  const std::int64_t n = map.dim(0), h = map.dim(1), w = map.dim(2), e = map.dim(3);
  const Variable x = reshape(ctx, map, {n, h * w, e});
  Tensor& table = position_tables_[{h, w}];
  if (!table.defined() || table.dtype() != map.value().dtype() || table.device() != map.value().device()) {
    const Stream lasting = ctx.stream().lasting();
    const Tensor host = host_tensor<float>({h * w, e}, position_table(h, w, e, config_.pe_temperature)), values = lasting.to_device(host);
    table = lasting.empty({h * w, e}, map.value().dtype());
    kernels::cast(lasting, values, table);
    lasting.wait();   // the host's copy goes
  }
  const Variable attended = attention_.forward(ctx, add(ctx, x, Variable(table)), x, Tensor());
  const Variable y = norm1_.forward(ctx, attended, x);
  const Variable f = linear2_.forward(ctx, activation(ctx, linear1_.forward(ctx, y), Activation::gelu));
  return reshape(ctx, norm2_.forward(ctx, f, y), {n, h, w, e});
}

std::vector<Variable> HybridEncoder::forward(Context& ctx, const std::vector<Variable>& maps) {
  const Variable s3 = input_proj_[0].forward(ctx, maps[0]);
  const Variable s4 = input_proj_[1].forward(ctx, maps[1]);
  const Variable f5 = aifi(ctx, input_proj_[2].forward(ctx, maps[2]));
  const auto join = [&](const Variable& a, const Variable& b) { return concatenate(ctx, std::vector<Variable>{a, b}, 3); };
  const Variable u5 = lateral_[0].forward(ctx, f5);
  const Variable m4 = fpn_[0].forward(ctx, join(upsample(ctx, u5), s4));
  const Variable u4 = lateral_[1].forward(ctx, m4);
  const Variable p3 = fpn_[1].forward(ctx, join(upsample(ctx, u4), s3));
  const Variable p4 = pan_[0].forward(ctx, join(downsample_[0].forward(ctx, p3), u4));
  const Variable p5 = pan_[1].forward(ctx, join(downsample_[1].forward(ctx, p4), u5));
  return {p3, p4, p5};
}

}  // namespace detr::models

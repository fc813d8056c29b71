#include "models/nn/layers.h"

#include <cmath>

#include "autograd/attention.h"
#include "autograd/conv2d.h"
#include "autograd/linear.h"
#include "autograd/norm.h"
#include "autograd/pointwise.h"
#include "models/nn/init.h"
#include "runtime/error.h"

namespace detr::models {

Linear::Linear(ParameterList& list, const std::string& name, std::int64_t in, std::int64_t out, Init weight_init, Init bias_init)
    : weight(list.add(name + ".weight", {out, in}, weight_init ? std::move(weight_init) : init::fan_in_uniform(in))),
      bias(list.add(name + ".bias", {out}, bias_init ? std::move(bias_init) : init::fan_in_uniform(in))) {}

Variable Linear::forward(Context& ctx, const Variable& x) const { return linear(ctx, x, ctx.leaf(weight), ctx.leaf(bias)); }

Mlp::Mlp(ParameterList& list, const std::string& name, const std::vector<std::int64_t>& widths, bool xavier, bool zero_last) {
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
    const bool zero = zero_last && i + 2 == widths.size();
    Init weight_init = zero ? init::constant(0) : xavier ? init::xavier_uniform(widths[i], widths[i + 1]) : Init();
    layers.emplace_back(list, concat(name, ".layers.", i), widths[i], widths[i + 1], std::move(weight_init), zero ? init::constant(0) : Init());
  }
}

Variable Mlp::forward(Context& ctx, const Variable& x) const {
  Variable y = x;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    y = layers[i].forward(ctx, y);
    if (i + 1 < layers.size()) y = detr::activation(ctx, y, Activation::relu);
  }
  return y;
}

LayerNorm::LayerNorm(ParameterList& list, const std::string& name, std::int64_t width)
    : weight(list.add(name + ".weight", {width}, init::constant(1))), bias(list.add(name + ".bias", {width}, init::constant(0))) {
  weight.state().wide = bias.state().wide = true;
}

Variable LayerNorm::forward(Context& ctx, const Variable& x, const Variable& residual) const {
  return layer_norm(ctx, x, residual, ctx.leaf(weight), ctx.leaf(bias), eps);
}

BatchNorm::BatchNorm(ParameterList& list, const std::string& name, std::int64_t channels, bool is_frozen) : frozen(is_frozen) {
  // The same four names either way; a frozen norm's are all buffers, so that no rewrite can make them trainable.
  const auto affine = [&](const char* part, double value) {
    return frozen ? list.add_buffer(name + part, {channels}, init::constant(value)) : list.add(name + part, {channels}, init::constant(value));
  };
  weight = affine(".weight", 1);
  bias = affine(".bias", 0);
  weight.state().wide = bias.state().wide = true;
  running_mean = list.add_buffer(name + ".running_mean", {channels}, init::constant(0));
  running_var = list.add_buffer(name + ".running_var", {channels}, init::constant(1));
}

Variable BatchNorm::forward(Context& ctx, const Variable& x, Activation activation, const Variable& residual) const {
  return batch_norm(ctx, x, ctx.leaf(weight), ctx.leaf(bias), residual, activation, eps, momentum, ctx.training() && !frozen,
                    {running_mean.value(), running_var.value()});
}

NormBranch BatchNorm::branch(Context& ctx, const Variable& x) const {
  return {x, ctx.leaf(weight), ctx.leaf(bias), eps, momentum, {running_mean.value(), running_var.value()}};
}

ConvNorm::ConvNorm(ParameterList& list, const std::string& name, std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride,
                   Activation act, bool frozen_norm, Init weight_init)
    : weight(list.add(name + ".conv.weight", {out, kernel, kernel, in}, weight_init ? std::move(weight_init) : init::fan_in_uniform(in * kernel * kernel))),
      norm(list, name + ".norm", out, frozen_norm),
      options{stride, (kernel - 1) / 2},
      activation(act) {}

Variable ConvNorm::forward(Context& ctx, const Variable& x, const Variable& residual) const {
  if (norm.frozen) {
    const ConstantNorm constants{norm.weight.value(), norm.bias.value(), norm.running_mean.value(), norm.running_var.value(), norm.eps};
    return conv2d_norm(ctx, x, ctx.leaf(weight), weight.exact(), constants, residual, activation, options);
  }
  return norm.forward(ctx, conv2d(ctx, x, ctx.leaf(weight), options), activation, residual);
}

Variable sum_of_branches(Context& ctx, const ConvNorm& a, const ConvNorm& b, const Variable& x) {
  DETR_CHECK(!a.norm.frozen && !b.norm.frozen, "sum_of_branches: a frozen norm belongs to its convolution");
  const Variable of_b = conv2d(ctx, x, ctx.leaf(b.weight), b.options), of_a = conv2d(ctx, x, ctx.leaf(a.weight), a.options);
  return batch_norm_sum(ctx, a.norm.branch(ctx, of_a), b.norm.branch(ctx, of_b), a.activation, ctx.training());
}

SelfAttention::SelfAttention(ParameterList& list, const std::string& name, std::int64_t d, std::int64_t a)
    : in_weight(list.add(name + ".in_proj_weight", {3 * d, d}, init::xavier_uniform(d, 3 * d))),
      in_bias(list.add(name + ".in_proj_bias", {3 * d}, init::constant(0))),
      out(list, name + ".out_proj", d, d, {}, init::constant(0)),
      width(d),
      heads(a) {}

Variable SelfAttention::forward(Context& ctx, const Variable& qk, const Variable& v, const Tensor& groups) const {
  const auto project = [&](const Variable& x, std::int64_t part) {
    const std::int64_t begin = part * width, end = begin + width;
    return linear(ctx, x, ctx.leaf(in_weight, begin, end), ctx.leaf(in_bias, begin, end));
  };
  return out.forward(ctx, attention(ctx, project(qk, 0), project(qk, 1), project(v, 2), heads, groups));
}

void freeze(const Parameter& parameter) { parameter.state().trainable = false; }

}  // namespace detr::models

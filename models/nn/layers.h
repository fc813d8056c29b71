#pragma once
#include <string>
#include <vector>

#include "autograd/context.h"
#include "autograd/norm.h"
#include "kernels/activation.h"
#include "kernels/conv2d.h"

namespace detr::models {

using kernels::Activation;

/// Affine map of the last dimension. Names: <name>.weight (O, I), <name>.bias (O).
struct Linear {
  Parameter weight, bias;
  Linear() = default;
  /// Default initialisation U(-1/sqrt(I), 1/sqrt(I)) of both, unless given.
  Linear(ParameterList& list, const std::string& name, std::int64_t in, std::int64_t out, Init weight_init = {}, Init bias_init = {});
  Variable forward(Context& ctx, const Variable& x) const;
};

/// Perceptron with ReLU between its layers. Names: <name>.layers.<i>.{weight,bias}.
struct Mlp {
  std::vector<Linear> layers;
  Mlp() = default;
  /// widths: input, hidden..., output. `xavier`: all weights Xavier-uniform; `zero_last`: the last layer starts at zero.
  Mlp(ParameterList& list, const std::string& name, const std::vector<std::int64_t>& widths, bool xavier = false, bool zero_last = false);
  Variable forward(Context& ctx, const Variable& x) const;
};

struct LayerNorm {
  Parameter weight, bias;
  double eps = 1e-5;
  LayerNorm() = default;
  LayerNorm(ParameterList& list, const std::string& name, std::int64_t width);
  /// Norm of x + residual; residual may be undefined.
  Variable forward(Context& ctx, const Variable& x, const Variable& residual = {}) const;
};

/// Batch norm, trainable (batch statistics in training) or frozen (four constants, in training too).
struct BatchNorm {
  Parameter weight, bias, running_mean, running_var;
  bool frozen = false;
  double eps = 1e-5, momentum = 0.1;
  BatchNorm() = default;
  BatchNorm(ParameterList& list, const std::string& name, std::int64_t channels, bool frozen);
  /// act(norm(x) + residual); residual may be undefined.
  Variable forward(Context& ctx, const Variable& x, Activation activation, const Variable& residual = {}) const;
  /// For batch_norm_sum.
  NormBranch branch(Context& ctx, const Variable& x) const;
};

/// Convolution without bias, batch norm, activation. Names: <name>.conv.weight, <name>.norm.*. Padding is (k - 1) / 2.
struct ConvNorm {
  Parameter weight;
  BatchNorm norm;
  kernels::Conv2dOptions options;
  Activation activation = Activation::none;

  ConvNorm() = default;
  ConvNorm(ParameterList& list, const std::string& name, std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride,
           Activation activation, bool frozen_norm = false, Init weight_init = {});
  Variable forward(Context& ctx, const Variable& x, const Variable& residual = {}) const;
};

/// activation(norm(conv(x)) + norm(conv(x))) of two, with the activation of `a`, as in a RepVGG unit. Their norms are not frozen.
Variable sum_of_branches(Context& ctx, const ConvNorm& a, const ConvNorm& b, const Variable& x);

/// Self-attention with packed in-projection (rows q, k, v). Names: <name>.in_proj_{weight,bias}, <name>.out_proj.{weight,bias}.
struct SelfAttention {
  Parameter in_weight, in_bias;
  Linear out;
  std::int64_t width = 0, heads = 1;
  SelfAttention() = default;
  SelfAttention(ParameterList& list, const std::string& name, std::int64_t width, std::int64_t heads);
  /// Queries and keys from `qk` (N, T, D), values from `v` (N, T, D); groups (T) or undefined: see kernels/attention.h.
  Variable forward(Context& ctx, const Variable& qk, const Variable& v, const Tensor& groups) const;
};

/// Marks a parameter as not trained.
void freeze(const Parameter& parameter);

}  // namespace detr::models

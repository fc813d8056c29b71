#include "models/detr/decoder.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "autograd/attention.h"
#include "autograd/detection.h"
#include "autograd/gather.h"
#include "autograd/pointwise.h"
#include "autograd/spatial.h"
#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/gather.h"
#include "kernels/pointwise.h"
#include "kernels/topk.h"
#include "models/nn/init.h"
#include "runtime/error.h"

namespace detr::models {
namespace {

constexpr double kPrior = 0.01;   // of a class at the start, as in RetinaNet

/// Directions of the heads at equal angles, stretched to the unit square; slot j of a level reaches j + 1 times as far.
Init offset_bias(const DecoderConfig& config) {
  return [heads = config.nhead, points = config.num_points](RandomKey, std::span<double> values) {
    std::size_t i = 0;
    for (std::int64_t m = 0; m < heads; ++m) {
      const double theta = 2 * std::numbers::pi * static_cast<double>(m) / static_cast<double>(heads);
      const double scale = std::max(std::abs(std::cos(theta)), std::abs(std::sin(theta)));
      for (const std::int64_t n : points) {
        for (std::int64_t j = 0; j < n; ++j) {
          values[i++] = std::cos(theta) / scale * static_cast<double>(j + 1);
          values[i++] = std::sin(theta) / scale * static_cast<double>(j + 1);
        }
      }
    }
  };
}

/// Standard normal rows; the last, the padding row, is zero.
Init class_rows(std::int64_t width) {
  return [width](RandomKey key, std::span<double> values) {
    const std::size_t real = values.size() - static_cast<std::size_t>(width);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = i < real ? normal(key, i) : 0;
  };
}

/// Layers are copies of one initialised layer, so equally placed tensors of all layers start equal.
void share_init(const ParameterList& list, std::size_t first, const std::string& name, const std::string& first_name) {
  for (std::size_t i = first; i < list.all().size(); ++i) {
    Parameter::State& state = list.all()[i].state();
    state.init_name = first_name + state.name.substr(name.size());
  }
}

Tensor concat_tensors(Context& ctx, const Tensor& a, const Tensor& b, int axis) {
  std::vector<std::int64_t> dims(a.shape().dims().begin(), a.shape().dims().end());
  dims[static_cast<std::size_t>(axis)] += b.dim(axis);
  Tensor y = ctx.empty(Shape(dims), a.dtype());
  kernels::concat_forward(ctx.stream(), std::vector<Tensor>{a, b}, axis, y);
  return y;
}

}  // namespace

DeformableAttention::DeformableAttention(ParameterList& list, const std::string& name, const DecoderConfig& config) {
  const std::int64_t d = config.hidden_dim;
  std::int64_t slots = 0;
  for (const std::int64_t n : config.num_points) slots += n;
  sampling_offsets = Linear(list, name + ".sampling_offsets", d, config.nhead * slots * 2, init::constant(0), offset_bias(config));
  attention_weights = Linear(list, name + ".attention_weights", d, config.nhead * slots, init::constant(0), init::constant(0));
  value_proj = Linear(list, name + ".value_proj", d, d, init::xavier_uniform(d, d), init::constant(0));
  output_proj = Linear(list, name + ".output_proj", d, d, init::xavier_uniform(d, d), init::constant(0));
  num_points_scale = list.add_buffer(name + ".num_points_scale", {slots}, [points = config.num_points](RandomKey, std::span<double> values) {
    std::size_t i = 0;
    for (const std::int64_t n : points)
      for (std::int64_t j = 0; j < n; ++j) values[i++] = 1 / static_cast<double>(n);
  });
  options.heads = config.nhead;
  options.points = config.num_points;
  if (config.cross_attn_method == "discrete") {
    options.sampling = kernels::Sampling::discrete;
    freeze(sampling_offsets.weight);   // a cell index has no gradient
    freeze(sampling_offsets.bias);
  }
}

Variable DeformableAttention::forward(Context& ctx, const Variable& query, const Tensor& reference, const Variable& memory,
                                      const std::vector<std::array<std::int64_t, 2>>& levels) const {
  kernels::DeformableOptions geometry = options;
  geometry.levels = levels;
  const bool fixed = options.sampling == kernels::Sampling::discrete;
  const Variable offsets = sampling_offsets.forward(ctx, fixed ? query.detach() : query);
  const Variable sampled = deformable_attention(ctx, value_proj.forward(ctx, memory), offsets, attention_weights.forward(ctx, query), reference, geometry);
  return output_proj.forward(ctx, sampled);
}

DecoderLayer::DecoderLayer(ParameterList& list, const std::string& name, const DecoderConfig& config)
    : self_attn(list, name + ".self_attn", config.hidden_dim, config.nhead),
      norm1(list, name + ".norm1", config.hidden_dim),
      cross_attn(list, name + ".cross_attn", config),
      norm2(list, name + ".norm2", config.hidden_dim),
      linear1(list, name + ".linear1", config.hidden_dim, config.dim_feedforward, init::xavier_uniform(config.hidden_dim, config.dim_feedforward)),
      linear2(list, name + ".linear2", config.dim_feedforward, config.hidden_dim, init::xavier_uniform(config.dim_feedforward, config.hidden_dim)),
      norm3(list, name + ".norm3", config.hidden_dim) {}

Variable DecoderLayer::forward(Context& ctx, const Variable& input, const Variable& position, const Tensor& reference, const Variable& memory,
                               const std::vector<std::array<std::int64_t, 2>>& levels, const Tensor& groups) const {
  Variable h = norm1.forward(ctx, self_attn.forward(ctx, add(ctx, input, position), input, groups), input);
  h = norm2.forward(ctx, cross_attn.forward(ctx, add(ctx, h, position), reference, memory, levels), h);
  return norm3.forward(ctx, linear2.forward(ctx, activation(ctx, linear1.forward(ctx, h), Activation::relu)), h);
}

template <class T>
Anchors<T> make_anchors(const std::vector<std::array<std::int64_t, 2>>& levels) {
  Anchors<T> anchors;
  for (std::size_t l = 0; l < levels.size(); ++l) {
    const auto [h, w] = levels[l];
    const T size = static_cast<T>(0.05) * static_cast<T>(1 << l), half = static_cast<T>(0.5);
    for (std::int64_t y = 0; y < h; ++y) {
      for (std::int64_t x = 0; x < w; ++x) {
        const std::array<T, 4> box = {(static_cast<T>(x) + half) / static_cast<T>(w), (static_cast<T>(y) + half) / static_cast<T>(h), size, size};
        const bool valid = std::all_of(box.begin(), box.end(), [](T v) { return v > static_cast<T>(0.01) && v < static_cast<T>(0.99); });
        anchors.valid.push_back(valid);
        for (const T v : box) anchors.logits.push_back(valid ? std::log(v / (1 - v)) : std::numeric_limits<T>::infinity());
      }
    }
  }
  return anchors;
}
template Anchors<float> make_anchors<float>(const std::vector<std::array<std::int64_t, 2>>&);
template Anchors<double> make_anchors<double>(const std::vector<std::array<std::int64_t, 2>>&);

Decoder::Decoder(ParameterList& list, const std::string& name, std::int64_t in_channels, const DecoderConfig& config) : config_(config) {
  const std::int64_t d = config.hidden_dim, c = config.num_classes;
  for (std::size_t l = 0; l < config.num_points.size(); ++l)
    input_proj_.emplace_back(list, detr::concat(name, ".input_proj.", l), in_channels, d, 1, 1, Activation::none, false, init::xavier_uniform(in_channels, d));
  const std::string first_name = name + ".decoder.layers.0";
  for (std::int64_t i = 0; i < config.num_layers; ++i) {
    const std::string layer_name = detr::concat(name, ".decoder.layers.", i);
    const std::size_t first = list.all().size();
    layers_.emplace_back(list, layer_name, config);
    share_init(list, first, layer_name, first_name);
  }
  if (config.num_denoising > 0) class_embed_ = list.add(name + ".denoising_class_embed.weight", {c + 1, d}, class_rows(d));
  query_pos_head_ = Mlp(list, name + ".query_pos_head", {4, 2 * d, d}, true);
  enc_proj_ = Linear(list, name + ".enc_output.proj", d, d, init::xavier_uniform(d, d));
  enc_norm_ = LayerNorm(list, name + ".enc_output.norm", d);
  const double prior_bias = -std::log((1 - kPrior) / kPrior);
  enc_score_head_ = Linear(list, name + ".enc_score_head", d, c, {}, init::constant(prior_bias));
  enc_bbox_head_ = Mlp(list, name + ".enc_bbox_head", {d, d, d, 4}, false, true);
  for (std::int64_t i = 0; i < config.num_layers; ++i)
    score_heads_.emplace_back(list, detr::concat(name, ".dec_score_head.", i), d, c, Init(), init::constant(prior_bias));
  for (std::int64_t i = 0; i < config.num_layers; ++i)
    bbox_heads_.emplace_back(list, detr::concat(name, ".dec_bbox_head.", i), std::vector<std::int64_t>{d, d, d, 4}, false, true);
}

const Decoder::Cells& Decoder::cells(const Stream& stream, const std::vector<std::array<std::int64_t, 2>>& levels, DType dtype) {
  Cells& entry = cells_[levels];
  if (!entry.logits.defined() || entry.logits.dtype() != dtype || entry.logits.device() != stream.device()) {
    const auto fill_entry = [&](const auto& anchors) {
      const auto tokens = static_cast<std::int64_t>(anchors.valid.size());
      const std::vector<std::int64_t> ordinary(static_cast<std::size_t>(config_.num_queries), kernels::kOrdinaryQuery);
      entry = {stream.to_device(host_tensor({tokens, 4}, anchors.logits)), stream.to_device(host_tensor({tokens}, anchors.valid)),
               stream.to_device(host_tensor({config_.num_queries}, ordinary))};
      stream.wait();   // the host's copies go
    };
    if (dtype == DType::f64) fill_entry(make_anchors<double>(levels));
    else fill_entry(make_anchors<float>(levels));
  }
  return entry;
}

Variable Decoder::encode_rows(Context& ctx, const Variable& memory) const {
  return enc_norm_.forward(ctx, enc_proj_.forward(ctx, memory));
}

DecoderOutput Decoder::forward(Context& ctx, const std::vector<Variable>& maps, const DenoisingInputs& denoising, const Tensor& imposed) {
  std::vector<std::array<std::int64_t, 2>> levels;
  std::vector<Variable> tokens;
  for (std::size_t l = 0; l < maps.size(); ++l) {
    const Variable x = input_proj_[l].forward(ctx, maps[l]);
    levels.push_back({x.dim(1), x.dim(2)});
    tokens.push_back(reshape(ctx, x, {x.dim(0), x.dim(1) * x.dim(2), x.dim(3)}));
  }
  const Variable memory = concatenate(ctx, tokens, 1);
  const std::int64_t n = memory.dim(0), t = memory.dim(1), q = config_.num_queries;
  const DType dtype = memory.value().dtype(), wide = wide_dtype(dtype);
  DETR_CHECK(t >= q, "decoder: ", q, " queries need as many feature cells, got ", t, "; use a larger image or fewer queries");
  const Cells& grid = cells(ctx.stream().lasting(), levels, wide);

  DecoderOutput out;
  out.selected = imposed;
  if (!imposed.defined()) {
    // Scores of all tokens, without gradient: only the selected rows have one, and they are computed again below.
    Context constant = ctx.without_tape();
    Tensor masked = ctx.empty_like(memory.value());
    kernels::mask_rows(ctx.stream(), memory.value(), grid.valid, masked);
    const Variable scores = enc_score_head_.forward(constant, encode_rows(constant, Variable(masked)));
    Tensor best = ctx.empty({n, t}, dtype), values = ctx.empty({n, q}, dtype);
    out.selected = ctx.empty({n, q}, DType::i64);
    kernels::max_last(ctx.stream(), scores.value(), best);
    kernels::topk(ctx.stream(), best, values, out.selected);
  }
  const Variable rows = encode_rows(ctx, gather_rows(ctx, memory, out.selected, grid.valid));
  Tensor anchors = ctx.empty({n, q, 4}, wide);
  kernels::embedding_forward(ctx.stream(), grid.logits, out.selected, anchors);
  out.enc_logits = enc_score_head_.forward(ctx, rows);
  out.enc_boxes = activation(ctx, add(ctx, cast(ctx, enc_bbox_head_.forward(ctx, rows), wide), Variable(anchors)), Activation::sigmoid);

  Variable h = rows.detach();
  Tensor reference = out.enc_boxes.value();
  Tensor groups;
  if (denoising.classes.defined()) {
    h = concatenate(ctx, std::vector<Variable>{embedding(ctx, ctx.leaf(class_embed_), denoising.classes, config_.num_classes), h}, 1);
    reference = concat_tensors(ctx, denoising.boxes, reference, 1);
    groups = concat_tensors(ctx, denoising.groups, grid.ordinary, 0);
  }
  const std::int64_t last = config_.eval_idx < 0 ? config_.num_layers + config_.eval_idx : config_.eval_idx;
  Variable refined;   // the box after the layer before, with its graph: the next layer's loss reaches it ("look forward twice")
  for (std::int64_t i = 0; i < config_.num_layers; ++i) {
    const auto l = static_cast<std::size_t>(i);
    const Variable position = query_pos_head_.forward(ctx, cast(ctx, Variable(reference), dtype));
    h = layers_[l].forward(ctx, h, position, reference, memory, levels, groups);
    const Variable delta = cast(ctx, bbox_heads_[l].forward(ctx, h), wide);
    const Variable next = refine_boxes(ctx, delta, Variable(reference));
    if (ctx.training() || i == last) {
      out.logits.push_back(score_heads_[l].forward(ctx, h));
      out.boxes.push_back(ctx.training() && i > 0 ? refine_boxes(ctx, delta, refined) : next);
    }
    if (!ctx.training() && i == last) break;
    refined = next;
    reference = next.value();
  }
  return out;
}

}  // namespace detr::models

#pragma once
#include <array>
#include <map>
#include <string>
#include <vector>

#include "kernels/deformable_attention.h"
#include "models/detr/config.h"
#include "models/nn/layers.h"

namespace detr::models {

/// Denoising queries as the decoder reads them; all undefined where there are none.
struct DenoisingInputs {
  Tensor classes;   ///< (N, Qcap) i64, rows of the class embedding
  Tensor boxes;     ///< (N, Qcap, 4) within [1e-5, 1 - 1e-5]
  Tensor groups;    ///< (Qcap) i64, see kernels/attention.h
};

struct DecoderOutput {
  std::vector<Variable> logits;   ///< of each layer that ran: (N, Qcap + Nq, C), denoising queries first
  std::vector<Variable> boxes;    ///< likewise (N, Qcap + Nq, 4), (cx, cy, w, h)
  Variable enc_logits, enc_boxes; ///< of the selected tokens, (N, Nq, C) and (N, Nq, 4); training only
  Tensor selected;                ///< (N, Nq) i64, tokens in descending order of score
};

/// Multi-scale deformable cross-attention with its four projections.
struct DeformableAttention {
  Linear sampling_offsets, attention_weights, value_proj, output_proj;
  Parameter num_points_scale;     ///< 1 / points of each slot's level; carried for the reference's file format
  kernels::DeformableOptions options;

  DeformableAttention(ParameterList& list, const std::string& name, const DecoderConfig& config);
  /// query (N, Q, D), reference (N, Q, 4), memory (N, T, D) -> (N, Q, D).
  Variable forward(Context& ctx, const Variable& query, const Tensor& reference, const Variable& memory,
                   const std::vector<std::array<std::int64_t, 2>>& levels) const;
};

/// Post-norm decoder layer: self-attention with the denoising mask, deformable cross-attention, feed-forward.
struct DecoderLayer {
  SelfAttention self_attn;
  LayerNorm norm1;
  DeformableAttention cross_attn;
  LayerNorm norm2;
  Linear linear1, linear2;
  LayerNorm norm3;

  DecoderLayer(ParameterList& list, const std::string& name, const DecoderConfig& config);
  Variable forward(Context& ctx, const Variable& h, const Variable& position, const Tensor& reference, const Variable& memory,
                   const std::vector<std::array<std::int64_t, 2>>& levels, const Tensor& groups) const;
};

/// Anchor of each token as a logit box (T, 4), +inf where the cell's box is not well inside (0, 1), and the mask of valid cells (T).
/// Computed in T, that of the model: a first cell centre that rounds to exactly 0.01 in float is outside.
template <class T>
struct Anchors {
  std::vector<T> logits;
  std::vector<std::uint8_t> valid;
};
template <class T>
Anchors<T> make_anchors(const std::vector<std::array<std::int64_t, 2>>& levels);

/// RT-DETRv2's decoder: query selection from the encoder's tokens, then layers that refine boxes.
class Decoder {
 public:
  Decoder(ParameterList& list, const std::string& name, std::int64_t in_channels, const DecoderConfig& config);

  /// maps: three (N, h, w, E). `imposed` (N, Nq) i64 or undefined replaces the top-k selection (checks against recorded runs).
  /// In training (ctx.training()) all layers run; otherwise those up to the evaluated one, whose output alone is returned.
  /// Throws InvalidArgument if there are fewer tokens than queries.
  DecoderOutput forward(Context& ctx, const std::vector<Variable>& maps, const DenoisingInputs& denoising, const Tensor& imposed);

 private:
  struct Cells {
    Tensor logits, valid;   // (T, 4), never bf16; (T) u8
    Tensor ordinary;        // (Nq) i64, the group of the ordinary queries
  };
  const Cells& cells(const Stream& stream, const std::vector<std::array<std::int64_t, 2>>& levels, DType dtype);
  Variable encode_rows(Context& ctx, const Variable& memory) const;

  DecoderConfig config_;
  std::vector<ConvNorm> input_proj_;
  std::vector<DecoderLayer> layers_;
  Parameter class_embed_;   // only with denoising
  Mlp query_pos_head_;
  Linear enc_proj_;
  LayerNorm enc_norm_;
  Linear enc_score_head_;
  Mlp enc_bbox_head_;
  std::vector<Linear> score_heads_;
  std::vector<Mlp> bbox_heads_;
  std::map<std::vector<std::array<std::int64_t, 2>>, Cells> cells_;
};

}  // namespace detr::models

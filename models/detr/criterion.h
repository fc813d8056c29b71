#pragma once
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "models/detr/config.h"
#include "models/detr/decoder.h"

namespace detr::models {

/// Truth of a batch as the criterion reads it, on the model's device and in its dtype.
struct TargetInputs {
  Tensor labels;          ///< (N, Gcap) i64
  Tensor boxes;           ///< (N, Gcap, 4)
  Tensor counts;          ///< (N) i64
  Tensor num_boxes;       ///< (1), what ordinary terms are divided by
  Tensor dn_match;        ///< (N, Qcap) i64, undefined without denoising
  Tensor dn_num_boxes;    ///< (1), num_boxes times the number of groups
};

struct CriterionOutput {
  Variable total;                      ///< (1), sum of all terms
  std::vector<Variable> terms;         ///< of each layer (sets, 3), then of the encoder (1, 3)
  std::vector<Tensor> matches;         ///< (N, Nq) i64: last layer, layers 0 to L-2, encoder
  std::vector<Tensor> match_status;    ///< (N) i64 of each matching, see kernels::assign
};

/// RT-DETRv2's criterion: varifocal, L1 and GIoU loss for the last layer, each earlier layer, the denoising queries of each layer
/// and the encoder's selection, each with its own matching; their plain sum is the loss.
class Criterion {
 public:
  explicit Criterion(const CriterionConfig& config) : config_(config) {}

  CriterionOutput forward(Context& ctx, const DecoderOutput& output, const DenoisingInputs& denoising, const TargetInputs& targets) const;

 private:
  Tensor match(Context& ctx, const Variable& logits, const Variable& boxes, std::int64_t begin, const TargetInputs& targets, CriterionOutput& out) const;

  CriterionConfig config_;
};

/// The terms under the reference's names and in its order: loss_vfl, loss_bbox, loss_giou, then the same with _aux_i, _dn_i, _enc_0.
/// `layer_terms` are the values of CriterionOutput::terms, on the host.
std::vector<std::pair<std::string, double>> named_losses(std::span<const Tensor> layer_terms);
std::vector<std::pair<std::string, double>> named_losses(const CriterionOutput& output);

}  // namespace detr::models

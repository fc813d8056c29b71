#include "models/detr/criterion.h"

#include "autograd/detection.h"
#include "autograd/pointwise.h"
#include "kernels/assignment.h"
#include "runtime/error.h"
#include "runtime/host_value.h"

namespace detr::models {

Tensor Criterion::match(Context& ctx, const Variable& logits, const Variable& boxes, std::int64_t begin, const TargetInputs& targets,
                        CriterionOutput& out) const {
  const std::int64_t n = logits.dim(0), q = logits.dim(1) - begin;
  kernels::MatchCostOptions options;
  options.class_weight = config_.cost_class;
  options.bbox_weight = config_.cost_bbox;
  options.giou_weight = config_.cost_giou;
  options.alpha = config_.matcher_alpha;
  options.gamma = config_.matcher_gamma;
  Tensor cost = ctx.empty({n, targets.labels.dim(1), q}, boxes.value().dtype());
  Tensor match = ctx.empty({n, q}, DType::i64), status = ctx.empty({n}, DType::i64);
  kernels::match_cost(ctx.stream(), logits.value(), boxes.value(), begin, targets.labels, targets.boxes, targets.counts, options, cost);
  kernels::assign(ctx.stream(), cost, targets.counts, match, status);
  out.match_status.push_back(status);
  return match;
}

CriterionOutput Criterion::forward(Context& ctx, const DecoderOutput& output, const DenoisingInputs& denoising, const TargetInputs& targets) const {
  const kernels::DetectionLossOptions options{config_.weight_vfl, config_.weight_bbox, config_.weight_giou, config_.alpha, config_.gamma};
  const kernels::TrueBoxes truth{targets.labels, targets.boxes};
  const bool with_dn = denoising.classes.defined();
  const std::int64_t dn = with_dn ? denoising.classes.dim(1) : 0;
  CriterionOutput out;
  const std::size_t layers = output.logits.size();
  std::vector<Tensor> matches;
  for (std::size_t l = 0; l < layers; ++l) {
    matches.push_back(match(ctx, output.logits[l], output.boxes[l], dn, targets, out));
    std::vector<kernels::PredictionSet> sets = {{dn, matches[l], Tensor(), targets.num_boxes}};
    if (with_dn) sets.push_back({0, targets.dn_match, denoising.groups, targets.dn_num_boxes});
    out.terms.push_back(detection_loss(ctx, output.logits[l], output.boxes[l], sets, truth, options));
  }
  matches.push_back(match(ctx, output.enc_logits, output.enc_boxes, 0, targets, out));
  out.terms.push_back(detection_loss(ctx, output.enc_logits, output.enc_boxes, {{0, matches.back(), Tensor(), targets.num_boxes}}, truth, options));
  out.matches.push_back(matches[layers - 1]);
  for (std::size_t l = 0; l <= layers; ++l) {
    if (l != layers - 1) out.matches.push_back(matches[l]);
  }
  out.total = sum(ctx, out.terms);
  return out;
}

std::vector<std::pair<std::string, double>> named_losses(std::span<const Tensor> layer_terms) {
  static constexpr const char* kNames[] = {"loss_vfl", "loss_bbox", "loss_giou"};
  std::vector<std::pair<std::string, double>> losses;
  const auto append = [&](const Tensor& terms, std::int64_t set, const std::string& suffix) {
    for (std::int64_t i = 0; i < 3; ++i) losses.emplace_back(kNames[i] + suffix, host_value(terms, set * 3 + i));
  };
  const std::size_t layers = layer_terms.size() - 1;
  append(layer_terms[layers - 1], 0, "");
  for (std::size_t l = 0; l + 1 < layers; ++l) append(layer_terms[l], 0, concat("_aux_", l));
  if (layer_terms[0].dim(0) > 1) {
    for (std::size_t l = 0; l < layers; ++l) append(layer_terms[l], 1, concat("_dn_", l));
  }
  append(layer_terms[layers], 0, "_enc_0");
  return losses;
}

std::vector<std::pair<std::string, double>> named_losses(const CriterionOutput& output) {
  std::vector<Tensor> terms;
  for (const Variable& layer : output.terms) terms.push_back(layer.value());
  return named_losses(terms);
}

}  // namespace detr::models

#include "train/step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/assignment.h"
#include "runtime/error.h"
#include "runtime/host_value.h"
#include "train/inputs.h"

namespace detr::train {
namespace {

bool finite(const Tensor& x) {
  const auto all = [](auto values) { return std::all_of(values.begin(), values.end(), [](auto v) { return std::isfinite(v); }); };
  return x.dtype() == DType::f64 ? all(x.span<double>()) : all(x.span<float>());
}

}  // namespace

Step::Step(models::RtDetr& model, ParameterStore& store, Optimizer& optimizer, const Stream& stream)
    : model_(model), store_(store), optimizer_(optimizer), criterion_(model.config().criterion), stream_(stream) {
  const Tensor& weights = store.weights();
  kept_buffers_ = stream.zeros({weights.numel() - store.grads().numel()}, weights.dtype());
}

StepResult Step::run(const data::Batch& batch, double lr_factor) {
  // A forward pass updates running statistics; a skipped step must leave them as they were.
  const Tensor buffers = store_.weights().slice(store_.grads().numel(), store_.weights().numel());
  const auto buffer_bytes = static_cast<std::size_t>(buffers.bytes());
  if (buffer_bytes) std::memcpy(kept_buffers_.raw(), buffers.raw(), buffer_bytes);

  StepResult result;
  store_.clear_gradients();
  Context ctx(stream_, &tape_, true);
  const StepInputs inputs = to_device(stream_, batch, batch.targets.total, store_.dtype());
  const models::DecoderOutput output = model_.forward(ctx, Variable(inputs.images), inputs.denoising);
  const models::CriterionOutput loss = criterion_.forward(ctx, output, inputs.denoising, inputs.targets);
  result.loss = host_value(loss.total.value(), 0);
  result.terms = models::named_losses(loss);
  const bool matched = std::all_of(loss.match_status.begin(), loss.match_status.end(), [](const Tensor& status) {
    const auto values = status.span<std::int64_t>();
    return std::all_of(values.begin(), values.end(), [](std::int64_t s) { return s == -1; });
  });
  const bool healthy = matched && std::isfinite(result.loss);
  std::vector<bool> used;
  if (healthy) {
    tape_.backward(ctx, loss.total);
    missing_.clear();
    for (const Parameter& p : store_.trainable()) {
      used.push_back(tape_.reached(p));
      if (!used.back()) missing_.push_back(p.name());
    }
    result.applied = optimizer_.step(lr_factor, used);
    result.grad_norm = optimizer_.gradient_norm();
  } else {
    result.applied = false;
  }
  if (!result.applied) {
    result.fault = healthy ? concat("gradient of ", optimizer_.first_bad_parameter() ? optimizer_.first_bad_parameter()->name() : "the model") : diagnose(output, loss);
    if (buffer_bytes) std::memcpy(buffers.raw(), kept_buffers_.raw(), buffer_bytes);
  }
  tape_.clear();
  return result;
}

std::string Step::diagnose(const models::DecoderOutput& output, const models::CriterionOutput& loss) const {
  for (const Parameter& p : store_.list().all()) {
    if (!p.is_buffer() && !finite(p.value())) return concat("weight ", p.name());
  }
  // Running statistics take in what the layers before them computed, so the first bad one tells where it began.
  for (const Parameter& p : store_.list().all()) {
    if (p.is_buffer() && !finite(p.value())) return concat("input of the norm with ", p.name());
  }
  if (!finite(output.enc_logits.value())) return "decoder.enc_score_head output";
  if (!finite(output.enc_boxes.value())) return "decoder.enc_bbox_head output";
  for (std::size_t l = 0; l < output.logits.size(); ++l) {
    if (!finite(output.logits[l].value())) return concat("decoder.dec_score_head.", l, " output");
    if (!finite(output.boxes[l].value())) return concat("decoder.dec_bbox_head.", l, " output");
  }
  for (const Tensor& status : loss.match_status) {
    try {
      kernels::expect_finite_costs(status, model_.config().decoder.num_queries);
    } catch (const Diverged& error) {
      return error.what();
    }
  }
  for (const auto& [name, value] : models::named_losses(loss)) {
    if (!std::isfinite(value)) return name;
  }
  return "total loss";
}

}  // namespace detr::train

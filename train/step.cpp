#include "train/step.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/assignment.h"
#include "kernels/step_report.h"
#include "runtime/error.h"
#include "runtime/host_value.h"

namespace detr::train {
namespace {

bool finite(const Tensor& x) {
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    if (!std::isfinite(host_value(x, i))) return false;
  }
  return true;
}

}  // namespace

Step::Step(models::RtDetr& model, ParameterStore& store, Optimizer& optimizer, const Stream& stream, bool graphs)
    : model_(model), store_(store), optimizer_(optimizer), criterion_(model.config().criterion), arena_(stream.with_arena()),
      graphs_(graphs && !stream.device().is_cpu()) {
  const Tensor& weights = store.weights();
  kept_buffers_ = stream.zeros({weights.numel() - store.grads().numel()}, weights.dtype());
  for (std::size_t i = 0; i < kInFlight; ++i) flights_.push_back({nullptr, {}, {}, Upload(stream)});
}

StepResult Step::run(const data::Batch& batch, double lr_factor) {
  start(batch, lr_factor);
  return finish();
}

void Step::start(const data::Batch& batch, double lr_factor) {
  DETR_CHECK(started_ - finished_ < kInFlight, "step: ", kInFlight, " steps are in flight; finish() one first");
  DETR_CHECK(!arena_.is_planning(), "step: a planning stream runs no steps");
  Program& program = program_of(key_of(batch));
  const bool is_new = !program.report.defined();
  Flight& flight = flights_[started_ % kInFlight];
  flight.upload.wait();
  Tensor step_inputs = optimizer_.scalars().slice(0, kernels::kStepInputs);
  flight.upload.enqueue(host_tensor<double>({kernels::kStepInputs}, {lr_factor, 1}), step_inputs);
  flight.upload.enqueue(batch, batch.targets.total, program.inputs);

  if (program.graph.defined()) {
    program.graph.launch(arena_);
  } else if (graphs_ && !is_new) {
    program.graph = arena_.capture([&] { enqueue(program); });
    program.graph.launch(arena_);
  } else {
    enqueue(program);
  }
  if (!flight.report.defined() || flight.report.shape() != program.report.shape()) flight.report = arena_.empty_host(program.report.shape(), DType::f64);
  arena_.copy(program.report, flight.report);
  flight.done = arena_.record();
  flight.program = last_ = &program;
  ++started_;
}

void Step::reserve(std::int64_t bytes) {
  static_cast<void>(arena_.empty({bytes}, DType::u8));
  reserved_ = arena_.empty({1}, DType::u8);
}

void Step::plan(const StepKey& key) {
  DETR_CHECK(arena_.is_planning(), "step: plan() is for a planning stream");
  enqueue(program_of(key));
}

Step::Program& Step::program_of(const StepKey& key) {
  const auto [found, is_new] = programs_.try_emplace(key);
  Program& program = found->second;
  if (is_new) {
    program.key = key;
    program.inputs = empty_inputs(arena_.lasting(), key);
    Tensor& pictures = pictures_.try_emplace(key.pictures, program.inputs.pictures).first->second;   // by far the largest: one for all keys
    program.inputs.pictures = pictures;
  }
  return program;
}

StepResult Step::finish() {
  DETR_CHECK(finished_ < started_, "step: finish() without start()");
  Flight& flight = flights_[finished_ % kInFlight];
  ++finished_;
  flight.done.wait();
  missing_ = flight.program->missing;
  return read(*flight.program, flight.report);
}

/// Everything between the batch's arrival and its report. Nothing here may wait or depend on values.
void Step::enqueue(Program& program) {
  // A forward pass updates running statistics; a skipped step must leave them as they were.
  Tensor buffers = store_.weights().slice(store_.grads().numel(), store_.weights().numel());
  arena_.copy(buffers, kept_buffers_);
  store_.clear_gradients(arena_);

  Context ctx(arena_, &tape_, true);
  const auto mark = [&](const std::string& part) {
    if (after_part) after_part(part);
  };
  if (after_part) {
    ctx.after_op = [&](const std::string& op) { mark("forward " + op); };
    tape_.observer = [&](const std::string& op, const Tensor&) { mark("backward " + op); };
  }
  mark("start");
  const StepInputs& inputs = program.inputs;
  const Tensor images = resized_pictures(arena_, inputs.pictures, program.key.height, program.key.width, store_.compute_dtype());
  const models::DecoderOutput output = model_.forward(ctx, Variable(images), inputs.denoising);
  const models::CriterionOutput loss = criterion_.forward(ctx, output, inputs.denoising, inputs.targets);
  kernels::check_step(arena_, loss.total.value(), loss.match_status, optimizer_.scalars());
  tape_.backward(ctx, loss.total);

  if (!program.used.defined()) {   // the same for all batches of the key
    std::vector<std::uint8_t> used;
    for (const Parameter& p : store_.trainable()) {
      used.push_back(tape_.reached(p) ? 1 : 0);
      if (!used.back()) program.missing.push_back(p.name());
    }
    program.used = arena_.lasting().to_device(host_tensor<std::uint8_t>({std::ssize(used)}, used));
    arena_.wait();
  }
  tape_.observer = nullptr;
  optimizer_.enqueue(arena_, program.used);
  mark("optimizer");

  // In the order of the computation, so that the first bad one tells where it began.
  std::vector<Tensor> watched = {buffers, output.enc_logits.value(), output.enc_boxes.value()};
  for (std::size_t l = 0; l < output.logits.size(); ++l) {
    watched.push_back(output.logits[l].value());
    watched.push_back(output.boxes[l].value());
  }
  Tensor first_bad = arena_.empty({std::ssize(watched)}, DType::i64);
  kernels::first_not_finite(arena_, watched, first_bad);
  kernels::restore_unless_applied(arena_, optimizer_.scalars(), kept_buffers_, buffers);

  std::vector<Tensor> parts = {optimizer_.scalars(), loss.total.value(), optimizer_.norms(), first_bad};
  program.terms.clear();
  for (const Variable& terms : loss.terms) {
    parts.push_back(terms.value());
    program.terms.push_back(terms.shape());
  }
  parts.insert(parts.end(), loss.match_status.begin(), loss.match_status.end());
  program.statuses = loss.match_status.size();
  program.images = inputs.targets.counts.numel();
  program.outputs = std::ssize(watched);
  if (!program.report.defined()) {
    std::int64_t size = 0;
    for (const Tensor& part : parts) size += part.numel();
    program.report = arena_.lasting().empty({size}, DType::f64);
  }
  kernels::collect(arena_, parts, program.report);
  mark("report");
  tape_.clear();
}

/// The report's parts in the order in which enqueue() lists them.
StepResult Step::read(const Program& program, const Tensor& report) const {
  const double* at = report.data<double>();
  const auto take = [&](std::int64_t count) { return std::exchange(at, at + count); };
  const double* scalars = take(kernels::kScalars);
  StepResult result;
  result.loss = *take(1);
  const auto parameters = static_cast<std::int64_t>(store_.trainable().size());
  const Tensor norms = host_tensor<double>({parameters}, std::span<const double>(take(parameters), static_cast<std::size_t>(parameters)));
  const double* first_bad = take(program.outputs);
  std::vector<Tensor> terms;
  for (const Shape& shape : program.terms) terms.push_back(host_tensor<double>(shape, std::span<const double>(take(shape.numel()), static_cast<std::size_t>(shape.numel()))));
  result.terms = models::named_losses(terms);
  result.applied = scalars[kernels::kApply] == 1;
  result.grad_norm = scalars[kernels::kGradNorm];
  const double* statuses = at;
  const bool healthy = std::isfinite(result.loss) && std::all_of(statuses, statuses + static_cast<std::int64_t>(program.statuses) * program.images, [](double s) { return s == -1; });
  if (!result.applied) result.fault = diagnose(program, statuses, norms, first_bad, result.terms, healthy);
  return result;
}

std::string Step::diagnose(const Program& program, const double* statuses, const Tensor& norms, const double* first_bad, const NamedValues& terms,
                           bool healthy) const {
  if (healthy) {
    const Parameter* bad = optimizer_.first_bad_parameter(norms);
    return concat("gradient of ", bad ? bad->name() : "the model");
  }
  const Tensor weights = store_.on_host(store_.weights());
  for (const Parameter& p : store_.list().all()) {
    if (!p.is_buffer() && !finite(store_.slice(weights, p))) return concat("weight ", p.name());
  }
  // Running statistics take in what the layers before them computed, so the first bad one tells where it began.
  if (const double index = *first_bad++; index >= 0) {
    const std::int64_t place = store_.grads().numel() + static_cast<std::int64_t>(index);
    for (const Parameter& p : store_.list().all()) {
      const std::int64_t begin = store_.offset(p);
      if (p.is_buffer() && place >= begin && place < begin + p.shape().numel()) return concat("input of the norm with ", p.name());
    }
  }
  if (*first_bad++ >= 0) return "decoder.enc_score_head output";
  if (*first_bad++ >= 0) return "decoder.enc_bbox_head output";
  for (std::int64_t l = 0; l < (program.outputs - 3) / 2; ++l) {
    if (*first_bad++ >= 0) return concat("decoder.dec_score_head.", l, " output");
    if (*first_bad++ >= 0) return concat("decoder.dec_bbox_head.", l, " output");
  }
  for (std::size_t s = 0; s < program.statuses; ++s) {
    std::vector<std::int64_t> status(statuses, statuses + program.images);
    statuses += program.images;
    try {
      kernels::expect_finite_costs(host_tensor<std::int64_t>({program.images}, status), model_.config().decoder.num_queries);
    } catch (const Diverged& error) {
      return error.what();
    }
  }
  for (const auto& [name, value] : terms) {
    if (!std::isfinite(value)) return name;
  }
  return "total loss";
}

}  // namespace detr::train

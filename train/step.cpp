#include "train/step.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/assignment.h"
#include "kernels/pointwise.h"
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

/// The loss, and three terms of each layer's and the encoder's predictions, with and without denoising.
std::int64_t loss_values(const models::ModelConfig& config) { return 1 + 3 * (2 * config.decoder.num_layers + 1); }

bool can_capture(const StepOptions& options, const Stream& stream) {
  return options.graphs && !stream.device().is_cpu() && (options.ranks.communicator == nullptr || options.ranks.communicator->capturable());
}

// Note [Trailer of a step]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// What the ranks add up besides gradients and used counts, in f64: whether the step before was made (0 or 1); a vote of each micro-batch
// (1: its loss is finite here); of each micro-batch the loss and its terms, then zeros. Losses are divided by the boxes of all
// ranks, so their sums are those of the whole batch.
std::int64_t vote_at(std::int64_t micro_batch) { return 1 + micro_batch; }

/// While it lives the parameters that a rehearsed failure drops are not trained, so ops record no gradient for them.
class Dropped {
 public:
  Dropped(const ParameterStore& store, const StepFaults& faults, std::int64_t step, std::int64_t micro_batch) {
    if (!faults.drops) return;
    for (const Parameter& p : store.trainable()) {
      if (!faults.drops(step, micro_batch, p.name())) continue;
      p.state().trainable = false;
      dropped_.push_back(p);
    }
  }
  ~Dropped() {
    for (const Parameter& p : dropped_) p.state().trainable = true;
  }
  Dropped(const Dropped&) = delete;
  Dropped& operator=(const Dropped&) = delete;

 private:
  std::vector<Parameter> dropped_;
};

}  // namespace

Step::Step(models::RtDetr& model, ParameterStore& store, Optimizer& optimizer, const Stream& stream, const StepOptions& options)
    : model_(model), store_(store), optimizer_(optimizer), criterion_(model.config().criterion), arena_(stream.with_arena()), options_(options),
      values_(loss_values(model.config())),
      collectives_(options.ranks, store, arena_, options.micro_batches, 1 + options.micro_batches * (1 + values_)) {
  options_.graphs = can_capture(options, stream);
  const Tensor& weights = store.weights();
  kept_buffers_ = stream.zeros({weights.numel() - store.grads().numel()}, weights.dtype());
  applied_ = stream.zeros({1}, DType::f64);
  bad_gradients_ = stream.zeros({collectives_.buckets()}, DType::i64);
  if (!arena_.device().is_cpu()) side_.emplace(arena_);
  for (std::size_t i = 0; i < kInFlight; ++i) flights_.push_back({{}, {}, {}, Upload(stream), {}});
  collectives_.before_bucket = [this](int index) { before_bucket(index); };
}

StepResult Step::run(const data::Batch& batch, double lr_factor) {
  start(batch, lr_factor);
  return finish();
}

void Step::start(const data::Batch& batch, double lr_factor) {
  DETR_CHECK(started_ - finished_ < kInFlight, "step: ", kInFlight, " steps are in flight; finish() one first");
  DETR_CHECK(!arena_.is_planning(), "step: a planning stream runs no steps");
  const StepRanks& ranks = options_.ranks;
  const std::int64_t boxes = std::max<std::int64_t>(ranks.size > 1 ? batch.agreed.boxes : batch.targets.total, ranks.rank_rules ? ranks.size : 1);
  Flight& flight = flights_[started_ % kInFlight];
  if (ranks.control != nullptr && !arena_.device().is_cpu()) ranks.control->enter("launch", static_cast<std::int64_t>(started_), dist::Waits::device);
  flight.upload.wait();
  flight.programs.clear();
  flight.reports.resize(static_cast<std::size_t>(options_.micro_batches));
  for (std::int64_t micro = 0; micro < options_.micro_batches; ++micro) {
    const data::Batch part = part_of(batch, micro, options_.micro_batches);
    StepKey key = key_of(part);
    key.micro_batch = micro;
    Program& program = program_of(key);
    const bool is_new = !program.report.defined();
    if (micro == 0) {
      Tensor step_inputs = optimizer_.scalars().slice(0, kernels::kStepInputs);
      flight.upload.enqueue(host_tensor<double>({kernels::kStepInputs}, {lr_factor, 1}), step_inputs);
    }
    flight.upload.enqueue(part, boxes, program.inputs);
    launch(program, is_new);
    Tensor& report = flight.reports[static_cast<std::size_t>(micro)];
    if (!report.defined() || report.shape() != program.report.shape()) report = arena_.empty_host(program.report.shape(), DType::f64);
    arena_.copy(program.report, report);
    flight.programs.push_back(&program);
    last_ = &program;
  }
  flight.done = arena_.record();
  // What a captured step sends is not seen as it is issued.
  flight.number.reset();
  if (options_.ranks.size > 1 && graph().defined()) flight.number = options_.ranks.communicator->record().issue(started_, concat("captured step ", started_), 0);
  ++started_;
}

void Step::launch(Program& program, bool is_new) {
  if (program.graph.defined()) {
    program.graph.launch(arena_);
  } else if (options_.graphs && !is_new) {
    program.graph = arena_.capture([&] { enqueue(program); });
    program.graph.launch(arena_);
  } else {
    enqueue(program);
  }
}

void Step::count_from(std::int64_t steps) {
  DETR_CHECK(last_ == nullptr && steps >= 0, "step: count_from() is for before the first one");
  started_ = finished_ = static_cast<std::size_t>(steps);
}

void Step::reserve(std::int64_t bytes) {
  static_cast<void>(arena_.empty({bytes}, DType::u8));
  reserved_ = arena_.empty({1}, DType::u8);
}

void Step::plan(const StepKey& key) {
  DETR_CHECK(arena_.is_planning(), "step: plan() is for a planning stream");
  StepKey part = key;
  for (part.micro_batch = 0; part.micro_batch < options_.micro_batches; ++part.micro_batch) enqueue(program_of(part));
}

Step::Program& Step::program_of(const StepKey& key) {
  const auto [found, is_new] = programs_.try_emplace(key);
  Program& program = found->second;
  if (is_new) {
    program.key = key;
    program.inputs = empty_inputs(arena_.lasting(), key, store_.dtype());
    Tensor& pictures = pictures_.try_emplace(key.pictures, program.inputs.pictures).first->second;   // by far the largest: one for all keys
    program.inputs.pictures = pictures;
  }
  return program;
}

/// Everything between a micro-batch's arrival and its report. Nothing here may wait or depend on values.
void Step::enqueue(Program& program) {
  Tensor buffers = store_.weights().slice(store_.grads().numel(), store_.weights().numel());
  if (program.key.micro_batch == 0) {
    // A forward pass updates running statistics; a skipped step must leave them as they were.
    arena_.copy(buffers, kept_buffers_);
    store_.clear_gradients(arena_);
  }

  Context ctx(arena_, &tape_, true);
  ctx.statistics = collectives_.statistics();
  if (side_ && !after_part) ctx.side = &*side_;   // marks are of one queue
  const auto mark = [&](const std::string& part) {
    if (after_part) after_part(part);
  };
  const auto after = [&](const char* pass, const std::string& op) {
    if (options_.ranks.control != nullptr) options_.ranks.control->tick();   // a long pass is no stall
    if (after_part) after_part(pass + op);
  };
  if (options_.ranks.control != nullptr || after_part) {
    ctx.after_op = [&](const std::string& op) { after("forward ", op); };
    tape_.observer = [&](const std::string& op, const Tensor&) { after("backward ", op); };
  }
  mark("start");
  const auto step = static_cast<std::int64_t>(started_);
  collectives_.begin(step, program.key.micro_batch);
  if (faults.buckets) collectives_.bucketer().set_fault(faults.buckets(step));
  const auto at = [&](const char* phase) {
    if (faults.at) faults.at(phase, step);
  };
  at("forward");
  const StepInputs& inputs = program.inputs;
  const Tensor images = resized_pictures(arena_, inputs.pictures, program.key.height, program.key.width, store_.compute_dtype());
  const Dropped dropped(store_, faults, step, program.key.micro_batch);
  const models::DecoderOutput output = model_.forward(ctx, Variable(images), inputs.denoising);
  const models::CriterionOutput loss = criterion_.forward(ctx, output, inputs.denoising, inputs.targets);
  kernels::check_step(arena_, loss.total.value(), loss.match_status, optimizer_.scalars());

  std::vector<Tensor> values = {loss.total.value()};   // see Note [Trailer of a step]
  program.terms.clear();
  std::int64_t count = 1;
  for (const Variable& terms : loss.terms) {
    values.push_back(terms.value());
    program.terms.push_back(terms.shape());
    count += terms.value().numel();
  }
  const Tensor extras = collectives_.bucketer().extras();
  const std::int64_t micro = program.key.micro_batch, begin = vote_at(options_.micro_batches) + micro * values_;
  Tensor vote = extras.slice(vote_at(micro), vote_at(micro) + 1), sums = extras.slice(begin, begin + count), rest = extras.slice(begin + count, begin + values_);
  kernels::collect(arena_, std::vector<Tensor>{optimizer_.scalars().slice(kernels::kApply, kernels::kApply + 1)}, vote);
  kernels::collect(arena_, values, sums);
  kernels::fill(arena_, 0, rest);

  const Variable total = faults.constant_loss && faults.constant_loss(step, micro) ? Variable(loss.total.value()) : loss.total;
  tape_.backward(ctx, total, [&](const Parameter& p) { collectives_.ready(p); }, [&] {
    collectives_.counted(tape_);
    at("backward");
  });
  tape_.observer = nullptr;
  if (side_) side_->join();
  if (last(program)) {
    Tensor before = extras.slice(0, 1);
    arena_.copy(applied_, before);
  }
  at("reduce");
  collectives_.finish();
  mark("reduce");
  at("update");

  // In the order of the computation, so that the first bad one tells where it began.
  std::vector<Tensor> watched = {buffers, output.enc_logits.value(), output.enc_boxes.value()};
  for (std::size_t l = 0; l < output.logits.size(); ++l) {
    watched.push_back(output.logits[l].value());
    watched.push_back(output.boxes[l].value());
  }
  Tensor first_bad = arena_.empty({std::ssize(watched)}, DType::i64);
  kernels::first_not_finite(arena_, watched, first_bad);
  if (last(program)) update(buffers);

  std::vector<Tensor> parts = values;
  parts.push_back(first_bad);
  parts.insert(parts.end(), loss.match_status.begin(), loss.match_status.end());
  program.statuses = loss.match_status.size();
  program.images = inputs.targets.counts.numel();
  program.outputs = std::ssize(watched);
  if (last(program)) {
    const dist::Bucketer& bucketer = collectives_.bucketer();
    for (const Tensor& part : {bad_gradients_, optimizer_.scalars(), optimizer_.norms(), bucketer.used(), bucketer.extras()}) parts.push_back(part);
  }
  if (!program.report.defined()) {
    std::int64_t size = 0;
    for (const Tensor& part : parts) size += part.numel();
    program.report = arena_.lasting().empty({size}, DType::f64);
  }
  kernels::collect(arena_, parts, program.report);
  mark("report");
  tape_.clear();
}

/// Of this rank's own gradient, before it is summed: rehearsed failures, and, where there are several ranks, the first value that is not finite.
void Step::before_bucket(int index) {
  if (options_.ranks.size == 1 && !faults.bad_values) return;   // nothing reads the bucket
  if (side_) side_->join();
  const dist::Layout& layout = collectives_.bucketer().layout();
  const dist::Bucket& bucket = layout.buckets[static_cast<std::size_t>(index)];
  if (faults.bad_values) {
    for (const BadValue& bad : faults.bad_values(collectives_.bucketer().step())) {
      for (const int p : bucket.parameters) {
        const auto i = static_cast<std::size_t>(p);
        if (layout.parameters[i].name != bad.parameter) continue;
        DETR_CHECK(bad.index >= 0 && bad.index < layout.parameters[i].shape.numel(), "fault: ", bad.parameter, " has no element ", bad.index);
        Tensor place = store_.grads().slice(layout.offsets[i] + bad.index, layout.offsets[i] + bad.index + 1);
        kernels::fill(arena_, bad.value, place);
      }
    }
  }
  if (options_.ranks.size == 1) return;
  const Tensor gradient = store_.grads().slice(bucket.begin, bucket.end);
  Tensor first = bad_gradients_.slice(index, index + 1);
  kernels::first_not_finite(arena_, std::span(&gradient, 1), first);
}

/// From the summed gradients to new weights.
void Step::update(const Tensor& buffers) {
  Tensor place = buffers;
  collectives_.share_buffers(place);   // before the moving average takes them in
  const Tensor votes = collectives_.bucketer().extras().slice(vote_at(0), vote_at(options_.micro_batches));
  kernels::check_votes(arena_, votes, options_.ranks.size, optimizer_.scalars());
  optimizer_.enqueue(arena_, collectives_.bucketer().used());
  if (after_part) after_part("optimizer");
  kernels::restore_unless_applied(arena_, optimizer_.scalars(), kept_buffers_, place);
  arena_.copy(optimizer_.scalars().slice(kernels::kApply, kernels::kApply + 1), applied_);
}

StepResult Step::finish() {
  DETR_CHECK(finished_ < started_, "step: finish() without start()");
  Flight& flight = flights_[finished_ % kInFlight];
  const StepRanks& ranks = options_.ranks;
  if (ranks.size > 1) {
    // A GPU that does not get on may wait for any rank, so only a host that stands still is suspected of a stall.
    if (ranks.control) ranks.control->enter("wait for the GPU", static_cast<std::int64_t>(finished_), dist::Waits::peers);
    ranks.communicator->watch(flight.done, dist::Clock::now() + ranks.timeout, concat("the end of step ", finished_));
    if (ranks.control) ranks.control->enter("settle", static_cast<std::int64_t>(finished_));
    if (flight.number) ranks.communicator->record().end(*flight.number);
  } else {
    flight.done.wait();
  }
  ++finished_;

  // The report of the last micro-batch ends with what the ranks share.
  const Program& program = *flight.programs.back();
  const auto parameters = std::ssize(store_.trainable());
  const std::int64_t extras = collectives_.bucketer().extras().numel(), shared = collectives_.buckets() + kernels::kScalars + 2 * parameters + extras;
  const double* at = flight.reports.back().data<double>() + flight.reports.back().numel() - shared;
  const auto take = [&](std::int64_t count) { return std::exchange(at, at + count); };
  const double *bad_gradients = take(collectives_.buckets()), *scalars = take(kernels::kScalars), *norms = take(parameters), *used = take(parameters), *trailer = take(extras);
  if (const double before = trailer[0]; before != 0 && before != ranks.size)
    throw CommError("step ", finished_, ": the ranks disagree on whether the step before was made: it was on ", before, " of ", ranks.size);

  StepResult result;
  result.applied = scalars[kernels::kApply] == 1;
  result.grad_norm = scalars[kernels::kGradNorm];
  for (std::int64_t m = 0; m < options_.micro_batches; ++m) {
    const double* values = trailer + vote_at(options_.micro_batches) + m * values_;
    result.loss += *values++;
    std::vector<Tensor> terms;
    for (const Shape& shape : program.terms) {
      terms.push_back(host_tensor<double>(shape, std::span<const double>(values, static_cast<std::size_t>(shape.numel()))));
      values += shape.numel();
    }
    const NamedValues named = models::named_losses(terms);
    if (m == 0) result.terms = named;
    else std::ranges::transform(result.terms, named, result.terms.begin(), [](const auto& a, const auto& b) { return std::pair(a.first, a.second + b.second); });
  }
  missing_.clear();
  for (std::int64_t i = 0; i < parameters; ++i) {
    if (used[i] == 0) missing_.push_back(store_.trainable()[static_cast<std::size_t>(i)].name());
  }
  if (result.applied) return result;
  for (std::size_t m = 0; m < flight.programs.size() && result.fault.empty(); ++m) result.fault = diagnose(*flight.programs[m], flight.reports[m].data<double>());
  if (result.fault.empty() && ranks.size > 1) result.fault = bad_gradient(bad_gradients);
  const Parameter* bad = optimizer_.first_bad_parameter(host_tensor<double>({parameters}, std::span<const double>(norms, static_cast<std::size_t>(parameters))));
  result.sum_fault = concat("gradient of ", bad ? bad->name() : "the model");
  if (result.fault.empty() && ranks.size == 1) result.fault = result.sum_fault;
  return result;
}

/// The report's parts in the order in which enqueue() lists them.
std::string Step::diagnose(const Program& program, const double* at) const {
  const auto take = [&](std::int64_t count) { return std::exchange(at, at + count); };
  const double loss = *take(1);
  std::vector<Tensor> terms;
  for (const Shape& shape : program.terms) terms.push_back(host_tensor<double>(shape, std::span<const double>(take(shape.numel()), static_cast<std::size_t>(shape.numel()))));
  const double *first_bad = take(program.outputs), *statuses = at;
  const auto all = static_cast<std::int64_t>(program.statuses) * program.images;
  if (std::isfinite(loss) && std::all_of(statuses, statuses + all, [](double s) { return s == -1; })) return {};
  return fault_in(program, first_bad, statuses, models::named_losses(terms));
}

std::string Step::fault_in(const Program& program, const double* first_bad, const double* statuses, const NamedValues& terms) const {
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

/// "gradient of decoder.x.weight[17]", of the first bucket in which this rank's own gradient is not finite; else nothing.
std::string Step::bad_gradient(const double* first_bad) const {
  const dist::Layout& layout = collectives_.bucketer().layout();
  for (std::size_t b = 0; b < layout.buckets.size(); ++b) {
    if (first_bad[b] < 0) continue;
    const std::int64_t place = layout.buckets[b].begin + static_cast<std::int64_t>(first_bad[b]);
    for (const int p : layout.buckets[b].parameters) {
      const auto i = static_cast<std::size_t>(p);
      const std::int64_t element = place - layout.offsets[i];
      if (element >= 0 && element < layout.parameters[i].shape.numel()) return concat("gradient of ", layout.parameters[i].name, "[", element, "]");
    }
  }
  return {};
}

}  // namespace detr::train

#include "train/collectives.h"

#include <algorithm>

#include "kernels/pointwise.h"
#include "runtime/error.h"

namespace detr::train {
namespace {

std::string list_of(const std::vector<int>& values) {
  std::string text;
  for (const int v : values) text += (text.empty() ? "" : " ") + std::to_string(v);
  return text;
}

dist::BucketerOptions options_of(const StepRanks& ranks, std::int64_t micro_batches, std::int64_t extras) {
  dist::BucketerOptions options;
  options.extras = extras;
  options.timeout = ranks.timeout;
  options.exchanges_before = ranks.plan.exchanges_before;
  options.slots_before = micro_batches * 2 * std::ssize(ranks.plan.forward_lengths) + 1;   // the last one: share_buffers
  return options;
}

dist::Layout sent_layout(const StepRanks& ranks, const ParameterStore& store, bool narrow) {
  dist::Layout layout = layout_of(store, ranks.caps);
  if (narrow) layout.dtype = DType::bf16;   // the same elements
  return layout;
}

dist::Communicator& one_rank() {
  static const std::unique_ptr<dist::Communicator> single = dist::single_communicator();
  return *single;
}

}  // namespace

std::string CollectivePlan::text() const {
  return concat("forward ", list_of(forward_lengths), "; backward ", list_of(backward), "; before buckets ", list_of(exchanges_before));
}

dist::Layout layout_of(const ParameterStore& store, const dist::BucketCaps& caps) {
  std::vector<dist::ParameterSpec> parameters;
  for (const Parameter& p : store.trainable()) parameters.push_back({p.name(), store.dtype(), p.shape()});
  dist::Layout layout = dist::make_layout(std::move(parameters), caps);
  for (std::size_t i = 0; i < layout.offsets.size(); ++i)
    DETR_CHECK(layout.offsets[i] == store.offset(store.trainable()[i]), "collectives: ", layout.parameters[i].name, " lies elsewhere in the store than in the buckets");
  return layout;
}

Collectives::Collectives(const StepRanks& ranks, ParameterStore& store, const Stream& stream, std::int64_t micro_batches, std::int64_t extras)
    : ranks_(ranks), stream_(stream), store_(store), micro_batches_(micro_batches), shares_(ranks.size > 1 && ranks.share_statistics), planning_(stream.is_planning()),
      narrow_(ranks.size > 1 && ranks.narrow && store.dtype() == DType::f32), sent_(narrow_ ? stream.lasting().zeros(store.grads().shape(), DType::bf16) : store.grads()),
      bucketer_(ranks.communicator != nullptr ? *ranks.communicator : one_rank(), sent_layout(ranks, store, narrow_), sent_, stream, options_of(ranks, micro_batches, extras)) {
  DETR_CHECK(planning_ || (ranks.communicator ? ranks.communicator->size() : 1) == ranks.size, "collectives: ", ranks.size, " ranks without their communicator");
  place_.assign(store.list().all().size(), -1);
  for (std::size_t i = 0; i < store.trainable().size(); ++i) place_[static_cast<std::size_t>(store.trainable()[i].index())] = static_cast<int>(i);
  bucketer_.before_bucket = [this](int index) {
    if (before_bucket) before_bucket(index);
    if (!narrow_) return;
    const dist::Bucket& bucket = bucketer_.layout().buckets[static_cast<std::size_t>(index)];
    Tensor rounded = sent_.slice(bucket.begin, bucket.end);
    kernels::cast(stream_, store_.grads().slice(bucket.begin, bucket.end), rounded);
  };
  if (planning_) found_.exchanges_before.assign(static_cast<std::size_t>(buckets()), 0);
}

void Collectives::enter(const char* phase, dist::Waits waits) {
  if (ranks_.control == nullptr || planning_) return;
  // On a GPU the host stands still where a queue is full, and waits for results elsewhere.
  ranks_.control->enter(phase, bucketer_.step(), stream_.device().is_cpu() ? waits : dist::Waits::device);
}

void Collectives::begin(std::int64_t step, std::int64_t micro_batch) {
  micro_batch_ = micro_batch;
  forward_ = 0;
  backward_ = 0;
  if (micro_batch == 0) {
    bucketer_.begin(step);
    reached_.assign(store_.trainable().size(), false);
  }
  if (planning_) {
    found_.forward_lengths.clear();
    found_.backward.clear();
  }
  enter("forward", dist::Waits::nobody);
}

/// call: the number of the layer's exchange in forward.
void Collectives::exchange(const Stream& stream, const Tensor& mine, Tensor& all, bool backward, int call) {
  const auto passes = std::ssize(ranks_.plan.forward_lengths);
  const std::int64_t slot = (micro_batch_ * 2 + (backward ? 1 : 0)) * passes + call;
  const dist::Place place{bucketer_.tag(slot), concat(backward ? "gradient sums of statistics " : "statistics ", call, " of step ", bucketer_.step())};
  dist::expect_planned(ranks_.communicator->rank(), place, slot, ranks_.plan.forward_lengths[static_cast<std::size_t>(call)], mine.numel());
  ranks_.communicator->all_gather(stream, mine, all, place)->wait(stream, dist::Clock::now() + ranks_.timeout);
}

int Collectives::gather_forward(const Stream& stream, const Tensor& mine, Tensor& all) {
  const int call = forward_++;
  if (planning_) {
    found_.forward_lengths.push_back(static_cast<int>(mine.numel()));
    return call;
  }
  DETR_CHECK(call < std::ssize(ranks_.plan.forward_lengths), "collectives: a batch norm exchanges statistics beyond the ", ranks_.plan.forward_lengths.size(), " of the plan");
  enter("forward", dist::Waits::peers);
  exchange(stream, mine, all, false, call);
  enter("forward", dist::Waits::nobody);
  return call;
}

void Collectives::gather_backward(const Stream& stream, int call, const Tensor& mine, Tensor& all) {
  if (planning_) {
    found_.backward.push_back(call);
    return;
  }
  skip_to(call);
  exchange_backward(stream, call, mine, all);
}

/// Zeros for the layers that come before `call` (-1: for all that are left) and that backward has passed by.
void Collectives::skip_to(int call) {
  const std::vector<int>& plan = ranks_.plan.backward;
  for (; backward_ < plan.size() && plan[backward_] != call;) {
    const std::int64_t length = ranks_.plan.forward_lengths.at(static_cast<std::size_t>(plan[backward_]));
    Tensor ignored = stream_.empty({ranks_.size, length}, DType::f64);
    exchange_backward(stream_, plan[backward_], stream_.zeros({length}, DType::f64), ignored);
  }
  DETR_CHECK(call < 0 || backward_ < plan.size(), "collectives: the batch norm with statistics ", call, " has no place left in backward's order");
}

void Collectives::exchange_backward(const Stream& stream, int call, const Tensor& mine, Tensor& all) {
  ++backward_;
  const auto issue = [&] {
    enter("backward", dist::Waits::peers);
    exchange(stream, mine, all, true, call);
    enter("backward", dist::Waits::nobody);
  };
  if (last()) bucketer_.exchange(issue);
  else issue();
}

void Collectives::counted(const Tape& tape) {
  enter("backward", dist::Waits::nobody);
  for (const Parameter& p : store_.trainable()) {
    const int place = place_[static_cast<std::size_t>(p.index())];
    const auto i = static_cast<std::size_t>(place);
    if (!last()) {
      if (tape.reached(p)) reached_[i] = true;
      continue;
    }
    if (reached_[i]) bucketer_.mark_used(place);
    if (!tape.reached(p)) bucketer_.mark_missing(place);
  }
}

void Collectives::ready(const Parameter& parameter) {
  if (!last()) return;
  const int place = place_[static_cast<std::size_t>(parameter.index())];
  if (planning_) {
    int& before = found_.exchanges_before[static_cast<std::size_t>(bucketer_.layout().bucket_of[static_cast<std::size_t>(place)])];
    before = std::max(before, static_cast<int>(std::ssize(found_.backward)));
  }
  bucketer_.mark_ready(place);
}

void Collectives::finish() {
  if (!planning_) skip_to(-1);
  if (!last()) return;
  enter("reduce", dist::Waits::peers);
  bucketer_.finish();
  if (narrow_) kernels::cast(stream_, sent_, store_.grads());
  enter("update", dist::Waits::nobody);
}

void Collectives::share_buffers(Tensor& buffers) {
  if (ranks_.size == 1 || shares_ || planning_) return;
  const std::int64_t slot = micro_batches_ * 2 * std::ssize(ranks_.plan.forward_lengths);
  ranks_.communicator->broadcast(stream_, buffers, 0, {bucketer_.tag(slot), concat("running statistics of step ", bucketer_.step())})
      ->wait(stream_, dist::Clock::now() + ranks_.timeout);
}

CollectivePlan Collectives::plan() const {
  CollectivePlan plan = found_;
  for (std::size_t b = 1; b < plan.exchanges_before.size(); ++b) plan.exchanges_before[b] = std::max(plan.exchanges_before[b], plan.exchanges_before[b - 1]);
  return plan;
}

}  // namespace detr::train

// Of the trainer: what its rank agrees on with the others, and failures that it rehearses.
#include <algorithm>
#include <chrono>
#include <span>
#include <sstream>
#include <utility>

#include "runtime/build.h"
#include "runtime/error.h"
#include "train/trainer.h"

namespace detr::train {
namespace {

std::string ids_of(const std::vector<std::int64_t>& image_ids, const char* between = ", ") {
  std::string text;
  for (const std::int64_t id : image_ids) text += (text.empty() ? "" : between) + std::to_string(id);
  return text;
}

}  // namespace

/// Rehearsed failures are asked for while a step is enqueued, so it is enqueued each time.
bool Trainer::captures() const { return config_.graph && options_.faults.text().empty(); }

void Trainer::check_faults() const {
  const dist::Layout layout = layout_of(*store_, step_ranks_.caps);
  std::vector<std::pair<std::string, std::int64_t>> parameters;
  for (const auto& parameter : layout.parameters) parameters.emplace_back(parameter.name, parameter.shape.numel());
  options_.faults.expect_parameters(parameters);
  options_.faults.expect_slots(static_cast<int>(layout.buckets.size()));
  std::vector<std::string> fields;
  if (replicas_.size() > 1 && !options_.faults.manifest_fields().empty()) {
    const dist::Manifest whole = manifest();
    for (const auto& [name, value] : whole.entries()) fields.push_back(name);
  }
  options_.faults.expect_fields(fields);
}

void Trainer::arm_step() {
  const Faults& faults = options_.faults;
  step_->faults.at = [&faults](const char* phase, std::int64_t step) { faults.at(phase, step); };
  step_->faults.constant_loss = [&faults](std::int64_t step, std::int64_t) { return faults.constant_loss(step); };
  step_->faults.drops = [&faults](std::int64_t step, std::int64_t, const std::string& name) {
    const Faults::Predicate drop = faults.drop(step);
    return drop && drop(name);
  };
  step_->faults.bad_values = [&faults](std::int64_t step) {
    std::vector<BadValue> values;
    for (const Faults::SetValue& v : faults.set_values(step)) values.push_back({v.parameter, v.index, v.value});
    return values;
  };
  step_->faults.buckets = [&faults](std::int64_t step) {
    dist::BucketerOptions::Fault fault;
    if (const auto swap = faults.swapped_slots(step)) fault.swap_a = swap->a, fault.swap_b = swap->b;
    if (const auto slot = faults.short_slot(step)) fault.shorten = *slot;
    return fault;
  };
}

void Trainer::flip_bits() {
  for (const Faults::FlipBit& flip : options_.faults.flip_bits(state_.step)) {
    Tensor& buffer = flip.buffer == "weights" ? store_->weights() : flip.buffer == "ema" ? store_->ema() : store_->exp_avg();
    const Tensor host = store_->on_host(buffer);
    if (flip.index < 0 || flip.index >= host.numel()) throw ConfigError("DETRTRAIN_FAULT: ", flip.buffer, " has no element ", flip.index);
    auto* bits = static_cast<std::uint32_t*>(host.raw());
    bits[flip.index] ^= std::uint32_t{1} << static_cast<unsigned>(flip.bit);
    store_->from_host(host, buffer);
    store_->refresh_shadow();
  }
}

void Trainer::meet_ranks() {
  const dist::Manifest own = manifest();
  const std::string bytes = own.bytes();
  manifest_hash_ = hash_text(std::as_bytes(std::span(bytes.data(), bytes.size())));
  if (replicas_.size() == 1) return;
  enter("manifest");
  replicas_.expect_equal(own);
  enter("connect", dist::Waits::peers);
  communicator_ = options_.ranks.connect(stream_);
  step_ranks_.communicator = communicator_.get();
  step_ranks_.control = options_.ranks.control.get();
}

dist::Manifest Trainer::manifest() const {
  dist::Manifest manifest;
  const std::vector<std::string> changed = options_.faults.manifest_fields();
  const auto add = [&](const std::string& name, const auto& value) {
    const bool differs = std::ranges::find(changed, name) != changed.end();
    manifest.add(name, concat(value, differs ? ", changed by DETRTRAIN_FAULT" : ""));
  };
  add("version", options_.version);
  add("binary", build_id());   // the commit in the version is that of the last configuration
  add("ranks", replicas_.size());
  for (const auto& [name, value] : options_.ranks.settings) add(name, value);
  add("device", stream_.device().is_cpu() ? "cpu" : "cuda");
  add("compute dtype", store_->compute_dtype());
  add("steps of an epoch", train_loader_->steps());
  add("steps of the run", total_steps());
  add("warm-up", warmup_steps_);
  add("overfit", options_.overfit);
  add("save every", options_.save_every_steps);
  add("check replicas every", options_.ranks.check_every);
  add("steps are captured", captures() && !stream_.device().is_cpu() ? "yes" : "no");
  add("rehearsed failures", options_.faults.text().empty() ? "none" : options_.faults.text());
  for (const std::string& expression : options_.freeze) add("freeze", expression);
  for (const auto& [key, value] : flat_config(options_.config_json)) {
    if (!is_local(key)) add(key, value);
  }
  for (const data::Category& c : options_.train.coco->categories) add("class", concat(c.id, " ", c.name));
  add("training data", digest(*options_.train.coco));
  add("validation data", options_.val.coco ? digest(*options_.val.coco) : "none");
  dist::Manifest layout;
  layout.add(layout_of(*store_, step_ranks_.caps));
  for (const auto& [name, value] : layout.entries()) add(name, value);
  add("collectives", step_ranks_.plan.text());
  return manifest;
}

data::StepCounts Trainer::agree(std::int64_t epoch, std::int64_t step, const data::StepCounts& local) {
  const RunRanks& ranks = options_.ranks;
  const std::int64_t images = options_.faults.no_batch(epoch * train_loader_->steps() + step) ? 0 : local.images;
  const std::string counts = concat(images, ' ', local.boxes, ' ', local.largest, ' ', wished() ? 1 : 0, ' ', ids_of(std::exchange(bad_here_, {}), " "));
  const std::vector<std::string> all = ranks.control->all_gather(counts, concat("counts of epoch ", epoch, " step ", step), dist::Clock::now() + std::chrono::hours(24), dist::Line::loader);
  data::StepCounts sum;
  std::vector<std::size_t> without;
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::istringstream text(all[r]);
    data::StepCounts of_rank;
    if (!(text >> of_rank.images >> of_rank.boxes >> of_rank.largest >> of_rank.stops)) throw CommError("rank ", r, ": the counts of epoch ", epoch, " step ", step, " cannot be read");
    if (of_rank.images == 0) without.push_back(r);
    sum.images += of_rank.images;
    sum.boxes += of_rank.boxes;
    sum.largest = std::max(sum.largest, of_rank.largest);
    sum.stops += of_rank.stops;
    for (std::int64_t id = 0; text >> id;) bad_anywhere_.insert(id);
  }
  sum.bad = std::ssize(bad_anywhere_);
  if (!without.empty()) throw CommError("rank ", without.front(), " has no batch at step ", step, " of epoch ", epoch, " (", all.size() - without.size(), " of ", all.size(), " ranks do)");
  return sum;
}

std::string Trainer::check_replicas() {
  enter("compare");
  const std::string hash = state_hash(*store_, *optimizer_);
  replicas_.expect_equal_hash(hash, state_.step);
  return hash;
}

std::string Trainer::blame(const StepResult& result, const std::vector<std::int64_t>& image_ids) {
  if (replicas_.size() == 1) return concat(result.fault, "; images ", ids_of(image_ids));
  const std::vector<std::string> faults = replicas_.from_all(result.fault.empty() ? "" : concat(result.fault, "; images ", ids_of(image_ids)), "fault");
  std::string text;
  for (std::size_t r = 0; r < faults.size(); ++r) {
    if (!faults[r].empty()) text += concat(text.empty() ? "" : "; ", "rank ", r, ": ", faults[r]);
  }
  return text.empty() ? result.sum_fault + ", by the sum over the ranks" : text;
}

}  // namespace detr::train

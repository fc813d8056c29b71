#include "train/trainer.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <utility>

#include "runtime/error.h"
#include "runtime/timing.h"
#include "train/evaluate.h"

namespace detr::train {
namespace {

/// The first ten of some names, and how many there are beyond.
std::string some_of(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(names.size(), 10); ++i) text += (i == 0 ? "" : ", ") + names[i];
  return names.size() > 10 ? concat(text, " and ", names.size() - 10, " more") : text;
}

std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

/// A double as text that gives it back with all its bits.
std::string exact_text(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%a", value);
  return text;
}

void add_terms(NamedValues& sums, const NamedValues& terms) {
  if (sums.empty()) {
    sums = terms;
    return;
  }
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i].second += terms[i].second;
}

}  // namespace

void Trainer::note(const std::string& line) const {
  if (replicas_.root()) reporter_.note(line);
}

void Trainer::warn(const std::string& line) const {
  if (replicas_.root()) reporter_.warning(line);
}

void Trainer::enter(const char* phase, dist::Waits waits) const {
  const std::int64_t step = stop_ ? state_.step : -1;   // -1: not running yet
  if (options_.ranks.control) options_.ranks.control->enter(phase, step, waits);
  options_.faults.at(phase, step);
}

bool Trainer::next_batch(data::Batch& batch) {
  enter("load", dist::Waits::loader);
  try {
    const bool got = train_loader_->next(batch);
    tell_bad(*train_loader_, told_train_);
    return got;
  } catch (...) {
    tell_bad(*train_loader_, told_train_);   // one of them may be why
    throw;
  }
}

void Trainer::tell_bad(const data::Loader& loader, std::size_t& told) {
  for (const data::BadImage& bad : loader.bad_images(told)) {
    reporter_.warning(concat("image ", bad.image_id, " left out: ", bad.reason));
    ++told;
  }
}

void Trainer::stop_loader() {
  const auto& control = options_.ranks.control;
  if (control) control->cancel(dist::Line::loader);   // its thread may wait for ranks that load no more
  train_loader_->stop();
  if (control) control->reopen(dist::Line::loader);
}

bool Trainer::wished() const { return (stop_ && *stop_) || out_of_time() || (options_.ranks.control && options_.ranks.control->stop_wished()); }

std::int64_t Trainer::total_steps() const {
  const std::int64_t total = config_.epochs * train_loader_->steps() + more_steps_;
  return options_.max_steps > 0 ? std::min(total, options_.max_steps) : total;
}

bool Trainer::out_of_patience() const { return config_.patience > 0 && state_.evaluations_since_best >= config_.patience; }

bool Trainer::done() const { return state_.step >= total_steps() || out_of_patience(); }

bool Trainer::out_of_time() const { return options_.time_limit_s > 0 && now_s() - started_s_ > options_.time_limit_s; }

CheckpointInfo Trainer::info() const {
  CheckpointInfo info;
  info.state = state_;
  info.config = options_.config_json;
  info.classes = options_.train.coco->categories;
  info.ema_updates = optimizer_->ema_updates();
  info.warmup_steps = warmup_steps_;
  info.ema_ramp = optimizer_->config().ema_warmups;
  info.version = options_.version;
  info.epoch_samples = state_.epoch_step * config_.train.batch_size;
  info.ranks = replicas_.size();
  info.manifest = manifest_hash_;
  info.scored = config_.optimizer.use_ema ? "ema" : "model";
  return info;
}

void Trainer::save(bool finished) {
  const double begin = now_s();
  state_.finished = finished;
  CheckpointInfo now = info();
  now.state_hash = check_replicas();
  enter("save");
  const std::string error = written("last.safetensors", [&](const std::filesystem::path& file) { save_checkpoint(file, *store_, *optimizer_, now, progress_of(options_.ranks.control)); });
  saved_at_s_ = now_s();
  save_took_s_ = saved_at_s_ - begin;
  count_save(error, finished || stopping_);
}

std::string Trainer::written(const std::string& name, const std::function<void(const std::filesystem::path&)>& write) {
  std::string error;
  if (replicas_.root()) {
    try {
      write(options_.output_dir / name);
      reporter_.saved(name, state_.step);
    } catch (const StorageError& failure) {
      error = failure.what();
    }
  }
  return replicas_.from_root(error, "save");   // and nobody waits inside a step for a slow disk
}

void Trainer::count_save(const std::string& error, bool last) {
  failed_saves_ = error.empty() ? 0 : failed_saves_ + 1;
  if (error.empty()) return;
  if (last || failed_saves_ >= 3) throw StorageError(replicas_.size() > 1 ? "rank 0: " : "", error, last ? "" : " (three times in a row)");
  warn("not saved: " + error + "; the run goes on, and tries again");
}

RunSummary Trainer::run(const std::atomic<bool>& stop) {
  stop_ = &stop;
  try {
    return run_epochs();
  } catch (const std::exception& error) {
    if (options_.ranks.failed) options_.ranks.failed(error);
    throw;
  }
}

RunSummary Trainer::run_epochs() {
  RunSummary summary;
  if (state_.finished && done()) {
    summary.end = RunEnd::already_finished;
  } else {
    while (!done()) {
      if (run_epoch(summary)) continue;
      stopping_ = true;
      if (state_.step > 0) save(false);
      summary.end = RunEnd::stopped;
      break;
    }
    if (summary.end == RunEnd::finished) save(true);
  }
  summary.state = state_;
  summary.best = best_;
  enter("end");
  summary.hash = state_hash(*store_, *optimizer_);
  replicas_.expect_equal_hash(summary.hash, state_.step);
  return summary;
}

bool Trainer::run_epoch(RunSummary& summary) {
  const std::int64_t steps = train_loader_->steps();
  const double decay = multistep_factor(state_.epoch, config_.milestones, config_.gamma);
  const double epoch_start = now_s();
  std::int64_t images = 0;
  std::deque<std::pair<double, std::int64_t>> recent;   // end and images of the last steps
  double waited = 0;
  data::Batch batch;
  if (state_.epoch_step < steps) train_loader_->start(state_.epoch, state_.epoch_step);
  recent.emplace_back(epoch_start, 0);

  struct Started {
    double factor = 0, data_wait_s = 0;
    std::vector<std::int64_t> image_ids;
  };
  std::deque<Started> in_flight;
  const auto settle = [&](std::size_t most) {   // the results of all but the last `most` steps
    for (; in_flight.size() > most; in_flight.pop_front()) {
      const Started& started = in_flight.front();
      const StepResult result = step_->finish();
      ++state_.step;
      ++state_.epoch_step;
      count(result, started.image_ids);
      const std::int64_t count = std::ssize(started.image_ids) * replicas_.size();   // of all ranks
      images += count;
      waited += started.data_wait_s;
      recent.emplace_back(now_s(), count);
      if (recent.size() > 21) recent.pop_front();

      StepRecord record;
      record.step = state_.step;
      record.epoch = state_.epoch;
      record.epoch_step = state_.epoch_step;
      record.steps_per_epoch = steps;
      record.epochs = config_.epochs;
      record.loss = result.loss;
      record.terms = result.terms;
      for (const double lr : optimizer_->group_lr()) record.group_lr.push_back(lr * started.factor);
      record.grad_norm = result.grad_norm;
      record.seconds = recent.back().first - recent[recent.size() - 2].first;
      record.data_wait_s = started.data_wait_s;
      const double step_s = (recent.back().first - recent.front().first) / static_cast<double>(recent.size() - 1);
      record.images_per_s = static_cast<double>(count) / step_s;
      record.eta_s = static_cast<double>(total_steps() - state_.step) * step_s;
      record.skipped = state_.skipped;
      record.applied = result.applied;
      record.memory_bytes = static_cast<std::int64_t>(stream_.allocator().peak_bytes() + step_->peak_bytes());
      record.rss_bytes = resident_bytes();
      summary.images_per_s = record.images_per_s;
      if (replicas_.root()) reporter_.step(record);
    }
  };
  // On a GPU the next step is enqueued before the last one's result is read.
  const std::size_t ahead = stream_.device().is_cpu() ? 0 : Step::kInFlight - 1;
  const auto begun = [&](std::int64_t done) { return done + std::ssize(in_flight); };
  const auto every = [&](std::int64_t interval) { return interval > 0 && begun(state_.step) % interval == 0; };
  const bool alone = replicas_.size() == 1;
  bool stopped = false;
  while (begun(state_.step) < total_steps() && begun(state_.epoch_step) < steps) {
    if (alone && (stopped = wished())) break;
    if (!next_batch(batch)) break;
    if (!alone && (stopped = batch.agreed.stops > 0)) break;   // several ranks stop where all of them have heard of it
    const double factor = warmup_factor(begun(state_.step), warmup_steps_) * decay;
    step_->start(batch, factor);
    in_flight.push_back({factor, train_loader_->last_wait_s(), batch.image_ids});
    const bool save_now = every(options_.save_every_steps), check_now = !alone && every(options_.ranks.check_every);
    const bool flip_now = !options_.faults.text().empty();
    settle(save_now || check_now || flip_now ? 0 : ahead);
    if (flip_now) flip_bits();
    if (save_now) save(false);
    else if (check_now) check_replicas();
  }
  settle(0);
  stop_loader();
  if (stopped || (alone && wished())) return false;
  if (state_.epoch_step < steps) {
    note(concat("stopped at step ", state_.step, " by the step limit, within epoch ", state_.epoch, ": not evaluated"));
    return true;
  }
  EpochRecord record;
  record.train_s = now_s() - epoch_start;
  record.images_per_s = static_cast<double>(images) / record.train_s;
  record.data_wait_share = waited / record.train_s;
  for (const double lr : optimizer_->group_lr()) record.group_lr.push_back(lr * warmup_factor(state_.step - 1, warmup_steps_) * decay);
  return finish_epoch(summary, record);
}

void Trainer::count(const StepResult& result, const std::vector<std::int64_t>& image_ids) {
  const std::vector<std::string>& missing = step_->missing();
  if (options_.ranks.require_all_used && !missing.empty()) throw CheckFailed("step ", state_.step, ": no loss reaches ", some_of(missing), " (--require-all-used)");
  for (const std::string& name : missing) {
    if (told_unused_.insert(name).second) warn(concat("step ", state_.step, ": no loss reaches ", name));
  }
  if (result.applied) {
    state_.skips_in_row = 0;
    add_terms(state_.epoch_terms, result.terms);
    state_.epoch_loss += result.loss;
    ++state_.epoch_counted;
    return;
  }
  ++state_.skipped;
  const std::string what = concat("step ", state_.step, " is not finite (loss ", result.loss, "), first in ", blame(result, image_ids));
  if (++state_.skips_in_row > config_.max_skips)
    throw Diverged(what, "; ", state_.skips_in_row, " such steps in a row: the learning rate is too high, or the data is at fault");
  warn(what + "; skipped");
}

/// Evaluates, keeps the best, reports, saves. Until the evaluation is done the state says "all steps of this epoch made", so that a
/// stopped run evaluates when it goes on.
bool Trainer::finish_epoch(RunSummary& summary, EpochRecord& record) {
  const bool last = state_.step >= total_steps();
  const double start = now_s();
  if (val_loader_ && config_.eval_every > 0 && (last || (state_.epoch + 1) % config_.eval_every == 0)) {
    const bool ema = config_.optimizer.use_ema;
    if (last && ema) record.raw_evaluation = evaluate(false);
    if (!last || !ema || record.raw_evaluation) record.evaluation = evaluate(ema);
    if (!record.evaluation) return false;   // the run is to stop
  }
  record.eval_s = now_s() - start;
  record.epoch = state_.epoch;
  record.step = state_.step;
  record.skipped = state_.skipped;
  record.parameters = store_->trainable_values();
  record.terms = state_.epoch_terms;
  const auto counted = static_cast<double>(std::max<std::int64_t>(state_.epoch_counted, 1));
  for (auto& [name, value] : record.terms) value /= counted;
  record.loss = state_.epoch_loss / counted;
  ++state_.epoch;
  state_.epoch_step = 0;
  state_.epoch_terms.clear();
  state_.epoch_loss = 0;
  state_.epoch_counted = 0;
  if (record.evaluation) {
    summary.last = record.evaluation;
    keep_best(record);
  }
  record.best_ap = state_.best_ap;
  record.best_epoch = state_.best_epoch;
  if (replicas_.root()) reporter_.epoch(record);
  if (replicas_.root() && record.evaluation && record.evaluation->AP < 0.001 && record.evaluation->AP >= 0) {
    for (const std::string& line : diagnose_low_ap(*options_.val.coco, detections_, stream_.pool().threads())) reporter_.note("AP near 0: " + line);
  }
  if (out_of_patience()) note(concat("no better AP in ", config_.patience, " evaluations: done"));
  // Epochs of a second or two, on a small data set, would go by in saving: at most a tenth of the time does.
  if (!done() && config_.save_every > 0 && state_.epoch % config_.save_every == 0) {
    const bool due = now_s() - saved_at_s_ >= 10 * save_took_s_;
    if (!replicas_.from_root(due ? "due" : "", "whether to save").empty()) save(false);
  }
  return true;
}

void Trainer::keep_best(const EpochRecord& record) {
  const bool raw_wins = record.raw_evaluation && record.raw_evaluation->AP > record.evaluation->AP;
  const data::EvalResult& result = raw_wins ? *record.raw_evaluation : *record.evaluation;
  if (result.AP <= state_.best_ap) {
    ++state_.evaluations_since_best;
    return;
  }
  const double best_ap = std::exchange(state_.best_ap, result.AP);
  const std::int64_t best_epoch = std::exchange(state_.best_epoch, record.epoch);
  state_.evaluations_since_best = 0;
  CheckpointInfo best = info();
  best.state_hash = check_replicas();
  best.scored = raw_wins || !config_.optimizer.use_ema ? "model" : "ema";
  const std::string error = written("best.safetensors", [&](const std::filesystem::path& file) { save_weights(file, *store_, best, progress_of(options_.ranks.control)); });
  if (error.empty()) {
    best_ = result;
  } else {   // the best is what the file holds
    state_.best_ap = best_ap;
    state_.best_epoch = best_epoch;
  }
  count_save(error, false);
}

std::optional<data::EvalResult> Trainer::evaluate(bool ema) {
  std::optional<ParameterStore::UseEma> scope;
  if (ema) scope.emplace(*store_);
  const std::int64_t total = val_loader_->images();
  enter("eval");
  bool wish = false;
  std::vector<data::Detection> found = detect(*model_, *val_loader_, options_.train.coco->categories, config_.num_top_queries, store_->compute_dtype(), step_->stream(), [&](std::int64_t done) {
    if (options_.ranks.control) options_.ranks.control->tick();
    if (replicas_.root()) reporter_.evaluating(std::min(total, done * replicas_.size()), total);
    return !(wish = wished());
  });
  tell_bad(*val_loader_, told_val_);
  if (replicas_.any(wish, "evaluation")) return std::nullopt;
  detections_ = replicas_.gather(std::move(found));
  data::EvalResult result;
  if (replicas_.root()) {
    data::EvalOptions options;
    options.threads = stream_.pool().threads();
    result = data::evaluate(*options_.val.coco, detections_, options);
  }
  // Of the result the other ranks need what the run's course depends on.
  const std::string ap = replicas_.from_root(exact_text(result.AP), "AP");
  if (!replicas_.root()) result.AP = std::strtod(ap.c_str(), nullptr);
  return result;
}

}  // namespace detr::train

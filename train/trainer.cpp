#include "train/trainer.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <fstream>
#include <regex>

#include "runtime/error.h"
#include "runtime/gpus.h"
#include "train/evaluate.h"
#include "train/memory_plan.h"

namespace detr::train {
namespace {

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::string ids_of(const std::vector<std::int64_t>& image_ids) {
  std::string text;
  for (const std::int64_t id : image_ids) text += (text.empty() ? "" : ", ") + std::to_string(id);
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

Trainer::Trainer(const RunConfig& config, RunOptions options, const Stream& stream, Reporter& reporter)
    : config_(config), options_(std::move(options)), stream_(stream), reporter_(reporter), started_s_(now_s()) {
  config_.model.decoder.num_classes = static_cast<std::int64_t>(options_.train.coco->categories.size());
  if (options_.overfit > 0) options_.val = options_.train;
  build_loaders();
  const std::int64_t total = config_.epochs * train_loader_->steps();
  const std::int64_t automatic = std::min<std::int64_t>(2000, std::max<std::int64_t>(1, total / 5));
  warmup_steps_ = config_.warmup_steps.value_or(automatic);
  config_.optimizer.ema_warmups = static_cast<double>(config_.ema_warmups.value_or(automatic));

  const std::int64_t reserve = plan_memory();
  model_ = make_model();
  store_ = std::make_unique<ParameterStore>(model_->parameters(), stream_, DType::f32, compute_dtype(config_.amp, stream_));
  store_->initialise(config_.seed);
  optimizer_ = std::make_unique<Optimizer>(*store_, stream_, config_.optimizer);
  step_ = std::make_unique<Step>(*model_, *store_, *optimizer_, stream_, config_.graph);
  if (reserve > 0) step_->reserve(reserve);
  state_.seed = config_.seed;
  restore();
  describe();
}

std::unique_ptr<models::RtDetr> Trainer::make_model() const {
  auto model = std::make_unique<models::RtDetr>(config_.model);
  for (const std::string& expression : options_.freeze) {
    const std::regex pattern(expression);
    for (const Parameter& p : model->parameters().all()) {
      if (!p.is_buffer() && std::regex_search(p.name(), pattern)) models::freeze(p);
    }
  }
  return model;
}

std::int64_t Trainer::plan_memory() const {
  const Device device = stream_.device();
  if (device.is_cpu()) return 0;
  MemoryRequest request;
  request.make_model = [this] { return make_model(); };
  request.optimizer = config_.optimizer;
  request.compute = compute_dtype(config_.amp, stream_);
  request.graphs = config_.graph;
  request.device = device;
  request.keys = keys_;
  if (val_loader_ && config_.eval_every > 0) {
    const auto [height, width] = data::output_size(config_.val.transforms);
    request.evaluation = {std::min(config_.val.batch_size, val_loader_->images()), height, width, 3};
  }
  const MemoryPlan plan = train::plan_memory(request);
  const std::int64_t free_bytes = memory_info(device).free_bytes;
  expect_fit(request, plan, free_bytes);
  reporter_.note(train::describe(plan, free_bytes));
  return plan.reserve;
}

std::int64_t Trainer::most_boxes() const {
  std::int64_t most = 0;
  for (const data::ImageRecord& image : options_.train.coco->images) most = std::max(most, image.count);
  return most;
}

void Trainer::build_loaders() {
  data::LoaderOptions common;
  common.seed = config_.seed;
  common.exif = config_.exif;
  common.limits = config_.limits;
  common.bad_images = config_.bad_images;
  common.max_bad_share = config_.max_bad_share;
  common.on_bad_image = [this](const data::BadImage& bad) { reporter_.warning(concat("image ", bad.image_id, " left out: ", bad.reason)); };
  const auto limit = options_.overfit > 0 ? options_.overfit : std::numeric_limits<std::int64_t>::max();
  const std::vector<std::int64_t> train_images = data::select_images(*options_.train.coco, config_.drop_empty, limit);
  if (train_images.empty()) throw DataError(options_.train.coco->file.string(), ": there is nothing to train on: no images", config_.drop_empty ? " with boxes" : "");

  data::LoaderOptions train = common;
  const bool augment = options_.overfit == 0;
  train.transforms = augment ? config_.train.transforms : config_.val.transforms;
  train.policy = config_.train.policy;
  if (augment) train.scales = config_.train.scales;
  train.scales_stop_epoch = config_.train.scales_stop_epoch;
  train.batch_size = config_.train.batch_size;
  train.drop_last = config_.train.drop_last;
  train.num_workers = config_.train.num_workers;
  train.cache_bytes = options_.cache_bytes;
  const models::DecoderConfig& d = config_.model.decoder;
  train.denoising = {d.num_denoising, d.label_noise_ratio, d.box_noise_scale, d.num_classes};
  keys_ = keys_of(train, most_boxes());
  train_loader_ = std::make_unique<data::Loader>(options_.train.coco, options_.train.images, train_images, train);
  if (!options_.val.coco) return;

  data::LoaderOptions val = common;
  val.evaluation = true;
  val.transforms = config_.val.transforms;
  val.batch_size = config_.val.batch_size;
  val.num_workers = config_.val.num_workers;
  val_loader_ = std::make_unique<data::Loader>(options_.val.coco, options_.val.images, data::select_images(*options_.val.coco, false, limit), val);
}

void Trainer::restore() {
  if (!options_.resume.empty()) {
    const CheckpointInfo info = load_checkpoint(options_.resume, *store_, *optimizer_);
    std::vector<std::string> ours, theirs;
    for (const data::Category& c : options_.train.coco->categories) ours.push_back(concat(c.id, " ", c.name));
    for (const data::Category& c : info.classes) theirs.push_back(concat(c.id, " ", c.name));
    if (ours != theirs) throw DataError(options_.resume.string(), ": was trained on other classes than ", options_.train.coco->file.string(), "; -t takes the weights alone");
    state_ = info.state;
    // The automatic lengths were fixed when the run began; a changed number of epochs must not bend them.
    if (!config_.warmup_steps) warmup_steps_ = info.warmup_steps;
    if (!config_.ema_warmups) optimizer_->set_ema_ramp(info.ema_ramp);
    reporter_.note(concat("resumed   ", options_.resume.string(), " at step ", state_.step, ", epoch ", state_.epoch));
  } else if (!options_.tuning.empty()) {
    const WeightsReport report = load_weights(options_.tuning, *store_, WeightsChoice::scored, options_.allow_partial);
    store_->reset_ema();
    reporter_.note(concat("weights   ", options_.tuning.string(), ": ", report.matched, "/", report.tensors, " tensors, ",
                          100 * static_cast<double>(report.matched_values) / static_cast<double>(report.values), " % of the weights"));
    for (const std::string& name : report.reshaped) reporter_.note("weights   another shape, starts anew: " + name);
  } else if (!options_.backbone.empty()) {
    const WeightsReport report = load_backbone(options_.backbone, *store_);
    store_->reset_ema();
    reporter_.note(concat("weights   random; backbone: ", options_.backbone.string(), ", ", report.matched, "/", report.tensors, " tensors"));
  } else {
    reporter_.note("weights   random; backbone: random (the published recipe starts from ImageNet weights: --backbone FILE)");
  }
}

void Trainer::describe() {
  std::int64_t frozen = 0, frozen_values = 0;
  for (const Parameter& p : model_->parameters().all()) {
    if (p.is_buffer() || p.trainable()) continue;
    ++frozen;
    frozen_values += p.shape().numel();
  }
  const double millions = static_cast<double>(store_->trainable_values() + frozen_values) / 1e6;
  reporter_.note(concat("model     ", millions, " M parameters; frozen: ", frozen, " tensors, ", frozen_values, " values"));
  const std::vector<std::int64_t>& sizes = optimizer_->group_sizes();
  for (std::size_t g = 0; g + 1 < sizes.size(); ++g) {
    if (sizes[g] == 0) reporter_.warning(concat("optimizer.params.", g, " matches no trainable parameter: '", config_.optimizer.groups[g].params, "'"));
  }
  const std::int64_t most = most_boxes();
  const models::DecoderConfig& d = config_.model.decoder;
  reporter_.note(concat("boxes     at most ", most, " in a picture; ", d.num_queries, " queries, ", data::denoising_capacity(d.num_denoising, most), " denoising slots"));
  if (most > d.num_queries) reporter_.warning(concat("a picture has ", most, " boxes for ", d.num_queries, " queries: not all can be found (RTDETRTransformerv2.num_queries)"));
  const std::int64_t steps = train_loader_->steps();
  reporter_.note(concat("schedule  ", config_.epochs, " epochs x ", steps, " steps; batch ", config_.train.batch_size, "; lr ", config_.optimizer.lr, "; warm-up ", warmup_steps_,
                        ", EMA ramp ", optimizer_->config().ema_warmups));
  if (warmup_steps_ * 5 > config_.epochs * steps && config_.warmup_steps) reporter_.warning(concat("the warm-up of ", warmup_steps_, " steps is more than a fifth of the run's ", config_.epochs * steps));
  const std::int64_t strong = config_.train.policy.epoch;
  reporter_.note(concat("augment   ", options_.overfit > 0 ? std::string("none (--overfit)") : strong < config_.epochs ? concat("strong until epoch ", strong) : "strong to the end",
                        config_.train.scales.empty() ? "; multi-scale off" : concat("; multi-scale until epoch ", config_.train.scales_stop_epoch)));
}

std::int64_t Trainer::total_steps() const {
  const std::int64_t total = config_.epochs * train_loader_->steps();
  return options_.max_steps > 0 ? std::min(total, options_.max_steps) : total;
}

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
  info.scored = config_.optimizer.use_ema ? "ema" : "model";
  return info;
}

void Trainer::save(bool finished) {
  const double begin = now_s();
  state_.finished = finished;
  save_checkpoint(options_.output_dir / "last.safetensors", *store_, *optimizer_, info());
  saved_at_s_ = now_s();
  save_took_s_ = saved_at_s_ - begin;
  reporter_.saved("last.safetensors", state_.step);
}

RunSummary Trainer::run(const std::atomic<bool>& stop) {
  RunSummary summary;
  if (state_.finished && state_.step >= total_steps()) {
    summary.end = RunEnd::already_finished;
  } else {
    while (state_.step < total_steps()) {
      if (run_epoch(stop, summary)) continue;
      if (state_.step > 0) save(false);
      summary.end = RunEnd::stopped;
      break;
    }
    if (summary.end == RunEnd::finished) save(true);
  }
  summary.state = state_;
  summary.best = best_;
  summary.hash = state_hash(*store_, *optimizer_);
  return summary;
}

bool Trainer::run_epoch(const std::atomic<bool>& stop, RunSummary& summary) {
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
      const std::int64_t count = std::ssize(started.image_ids);
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
      reporter_.step(record);
    }
  };
  // On a GPU the next step is enqueued before the last one's result is read.
  const std::size_t ahead = stream_.device().is_cpu() ? 0 : Step::kInFlight - 1;
  const auto begun = [&](std::int64_t done) { return done + std::ssize(in_flight); };
  while (begun(state_.step) < total_steps() && begun(state_.epoch_step) < steps && !stop && !out_of_time() && train_loader_->next(batch)) {
    const double factor = warmup_factor(begun(state_.step), warmup_steps_) * decay;
    step_->start(batch, factor);
    in_flight.push_back({factor, train_loader_->last_wait_s(), batch.image_ids});
    const bool save_now = options_.save_every_steps > 0 && begun(state_.step) % options_.save_every_steps == 0;
    settle(save_now ? 0 : ahead);
    if (save_now) save(false);
  }
  settle(0);
  train_loader_->stop();
  if (stop || out_of_time()) return false;
  if (state_.epoch_step < steps) {
    reporter_.note(concat("stopped at step ", state_.step, " by the step limit, within epoch ", state_.epoch, ": not evaluated"));
    return true;
  }
  EpochRecord record;
  record.train_s = now_s() - epoch_start;
  record.images_per_s = static_cast<double>(images) / record.train_s;
  record.data_wait_share = waited / record.train_s;
  for (const double lr : optimizer_->group_lr()) record.group_lr.push_back(lr * warmup_factor(state_.step - 1, warmup_steps_) * decay);
  return finish_epoch(stop, summary, record);
}

void Trainer::count(const StepResult& result, const std::vector<std::int64_t>& image_ids) {
  if (state_.step == 1) {
    for (const std::string& name : step_->missing()) reporter_.warning("no loss reaches " + name);
  }
  if (result.applied) {
    state_.skips_in_row = 0;
    add_terms(state_.epoch_terms, result.terms);
    state_.epoch_loss += result.loss;
    ++state_.epoch_counted;
    return;
  }
  ++state_.skipped;
  const std::string what = concat("step ", state_.step, " is not finite (loss ", result.loss, "), first in ", result.fault, "; images ", ids_of(image_ids));
  if (++state_.skips_in_row > config_.max_skips)
    throw Diverged(what, "; ", state_.skips_in_row, " such steps in a row: the learning rate is too high, or the data is at fault");
  reporter_.warning(what + "; skipped");
}

/// Evaluates, keeps the best, reports, saves. Until the evaluation is done the state says "all steps of this epoch made", so that a
/// stopped run evaluates when it goes on.
bool Trainer::finish_epoch(const std::atomic<bool>& stop, RunSummary& summary, EpochRecord& record) {
  const bool last = state_.step >= total_steps();
  const double start = now_s();
  if (val_loader_ && config_.eval_every > 0 && (last || (state_.epoch + 1) % config_.eval_every == 0)) {
    const bool ema = config_.optimizer.use_ema;
    if (last && ema) record.raw_evaluation = evaluate(false, stop);
    record.evaluation = evaluate(ema, stop);
    if (stop) return false;
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
  reporter_.epoch(record);
  if (record.evaluation && record.evaluation->AP < 0.001 && record.evaluation->AP >= 0) {
    for (const std::string& line : diagnose_low_ap(*options_.val.coco, detections_, stream_.pool().threads())) reporter_.note("AP near 0: " + line);
  }
  if (config_.patience > 0 && state_.evaluations_since_best >= config_.patience) {
    reporter_.note(concat("no better AP in ", config_.patience, " evaluations: done"));
    options_.max_steps = state_.step;
  }
  // Epochs of a second or two, on a small data set, would go by in saving: at most a tenth of the time does.
  const bool due = now_s() - saved_at_s_ >= 10 * save_took_s_;
  if (!last && config_.save_every > 0 && state_.epoch % config_.save_every == 0 && due) save(false);
  return true;
}

void Trainer::keep_best(const EpochRecord& record) {
  const bool raw_wins = record.raw_evaluation && record.raw_evaluation->AP > record.evaluation->AP;
  const data::EvalResult& result = raw_wins ? *record.raw_evaluation : *record.evaluation;
  if (result.AP <= state_.best_ap) {
    ++state_.evaluations_since_best;
    return;
  }
  state_.best_ap = result.AP;
  state_.best_epoch = record.epoch;
  state_.evaluations_since_best = 0;
  best_ = result;
  CheckpointInfo best = info();
  best.scored = raw_wins || !config_.optimizer.use_ema ? "model" : "ema";
  save_weights(options_.output_dir / "best.safetensors", *store_, best);
  reporter_.saved("best.safetensors", state_.step);
}

std::optional<data::EvalResult> Trainer::evaluate(bool ema, const std::atomic<bool>& stop) {
  std::optional<ParameterStore::UseEma> scope;
  if (ema) scope.emplace(*store_);
  const std::int64_t total = val_loader_->images();
  detections_ = detect(*model_, *val_loader_, options_.train.coco->categories, config_.num_top_queries, store_->compute_dtype(), step_->stream(), [&](std::int64_t done) {
    reporter_.evaluating(done, total);
    return !stop;
  });
  if (stop) return std::nullopt;
  data::EvalOptions options;
  options.threads = stream_.pool().threads();
  return data::evaluate(*options_.val.coco, detections_, options);
}

}  // namespace detr::train

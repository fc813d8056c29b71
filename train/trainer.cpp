#include "train/trainer.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <regex>
#include <sstream>
#include <utility>

#include "runtime/error.h"
#include "runtime/gpus.h"
#include "train/evaluate.h"

namespace detr::train {
namespace {

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::string ids_of(const std::vector<std::int64_t>& image_ids, const char* between = ", ") {
  std::string text;
  for (const std::int64_t id : image_ids) text += (text.empty() ? "" : between) + std::to_string(id);
  return text;
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

Trainer::Trainer(const RunConfig& config, RunOptions options, const Stream& stream, Reporter& reporter)
    : config_(config), options_(std::move(options)), stream_(stream), reporter_(reporter), replicas_(options_.ranks), started_s_(now_s()) {
  config_.model.decoder.num_classes = static_cast<std::int64_t>(options_.train.coco->categories.size());
  if (options_.overfit > 0) options_.val = options_.train;
  build_loaders();
  const std::int64_t total = config_.epochs * train_loader_->steps();
  const std::int64_t automatic = std::min<std::int64_t>(2000, std::max<std::int64_t>(1, total / 5));
  warmup_steps_ = config_.warmup_steps.value_or(automatic);
  config_.optimizer.ema_warmups = static_cast<double>(config_.ema_warmups.value_or(automatic));

  step_ranks_.size = replicas_.size();
  step_ranks_.share_statistics = config_.sync_bn;
  step_ranks_.caps.bytes = config_.bucket_mib << 20;
  step_ranks_.narrow = config_.bucket_dtype == "bf16";
  step_ranks_.timeout = options_.ranks.timeout;
  enter("plan");
  const std::int64_t reserve = plan_memory(memory_request());
  if (replicas_.size() > 1) step_ranks_.plan = plan_collectives(memory_request());
  model_ = make_model();
  store_ = std::make_unique<ParameterStore>(model_->parameters(), stream_, DType::f32, compute_dtype(config_.amp, stream_));
  store_->initialise(config_.seed);
  optimizer_ = std::make_unique<Optimizer>(*store_, stream_, config_.optimizer);
  try {
    meet_ranks();
    begin(reserve);
  } catch (const std::exception& error) {
    if (options_.ranks.failed) options_.ranks.failed(error);
    throw;
  }
}

void Trainer::begin(std::int64_t reserve) {
  step_ = std::make_unique<Step>(*model_, *store_, *optimizer_, stream_, StepOptions{config_.graph && options_.faults.text().empty(), config_.accum, step_ranks_});
  if (reserve > 0) step_->reserve(reserve);
  state_.seed = config_.seed;
  restore();
  if (!options_.faults.text().empty()) arm_step();
  describe();
}

Trainer::~Trainer() {
  if (options_.ranks.closed) options_.ranks.closed();
}

void Trainer::arm_step() {
  const Faults& faults = options_.faults;
  const std::int64_t base = state_.step;   // a step's own count begins with the process
  step_->faults.at = [&faults, base](const char* phase, std::int64_t step) { faults.at(phase, base + step); };
  step_->faults.constant_loss = [&faults, base](std::int64_t step, std::int64_t) { return faults.constant_loss(base + step); };
  step_->faults.drops = [&faults, base](std::int64_t step, std::int64_t, const std::string& name) {
    const Faults::Predicate drop = faults.drop(base + step);
    return drop && drop(name);
  };
  step_->faults.bad_values = [&faults, base](std::int64_t step) {
    std::vector<BadValue> values;
    for (const Faults::SetValue& v : faults.set_values(base + step)) values.push_back({v.parameter, v.index, v.value});
    return values;
  };
  step_->faults.buckets = [&faults, base](std::int64_t step) {
    dist::BucketerOptions::Fault fault;
    if (const auto swap = faults.swapped_slots(base + step)) fault.swap_a = swap->a, fault.swap_b = swap->b;
    if (const auto slot = faults.short_slot(base + step)) fault.shorten = *slot;
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

void Trainer::meet_ranks() {
  if (replicas_.size() == 1) return;
  enter("manifest");
  replicas_.expect_equal(manifest());
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
  for (const std::string& expression : options_.freeze) add("freeze", expression);
  for (const auto& [key, value] : flat_config(options_.config_json)) add(key, value);
  for (const data::Category& c : options_.train.coco->categories) add("class", concat(c.id, " ", c.name));
  add("training data", digest(*options_.train.coco));
  add("validation data", options_.val.coco ? digest(*options_.val.coco) : "none");
  manifest.add(layout_of(*store_, step_ranks_.caps));
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

bool Trainer::next_batch(data::Batch& batch) {
  enter("load", dist::Waits::loader);
  return train_loader_->next(batch);
}

void Trainer::stop_loader() {
  const auto& control = options_.ranks.control;
  if (control) control->cancel(dist::Line::loader);   // its thread may wait for ranks that load no more
  train_loader_->stop();
  if (control) control->reopen(dist::Line::loader);
}

bool Trainer::wished() const { return (stop_ && *stop_) || out_of_time() || (options_.ranks.control && options_.ranks.control->stop_wished()); }

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

MemoryRequest Trainer::memory_request() const {
  MemoryRequest request;
  request.make_model = [this] { return make_model(); };
  request.optimizer = config_.optimizer;
  request.compute = compute_dtype(config_.amp, stream_);
  request.step = {config_.graph, config_.accum, step_ranks_};
  request.device = stream_.device();
  request.keys = keys_;
  if (val_loader_ && config_.eval_every > 0) {
    const auto [height, width] = data::output_size(config_.val.transforms);
    request.evaluation = {std::min(val_batch(), val_loader_->images()), height, width, 3};
  }
  return request;
}

std::int64_t Trainer::plan_memory(const MemoryRequest& request) const {
  if (stream_.device().is_cpu()) return 0;
  const MemoryPlan plan = train::plan_memory(request);
  const std::int64_t free_bytes = memory_info(stream_.device()).free_bytes;
  expect_fit(request, plan, free_bytes);
  note(train::describe(plan, free_bytes));
  return plan.reserve;
}

std::int64_t Trainer::val_batch() const { return (config_.val.batch_size + replicas_.size() - 1) / replicas_.size(); }

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
  common.rank = replicas_.rank();
  common.ranks = replicas_.size();
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
  if (const std::int64_t parts = replicas_.size() * config_.accum; train.batch_size % parts != 0)
    throw ConfigError("batch size ", train.batch_size, " must be a multiple of ", parts, ": ", replicas_.size(), " ranks x ", config_.accum, " micro-batches");
  keys_ = keys_of(train, most_boxes(), config_.accum);
  train.on_bad_image = [this, report = common.on_bad_image](const data::BadImage& bad) {
    bad_here_.push_back(bad.image_id);
    report(bad);
  };
  if (replicas_.size() > 1) train.agree = [this](std::int64_t epoch, std::int64_t step, const data::StepCounts& local) { return agree(epoch, step, local); };
  train_loader_ = std::make_unique<data::Loader>(options_.train.coco, options_.train.images, train_images, train);
  if (!options_.val.coco) return;

  data::LoaderOptions val = common;
  val.evaluation = true;
  val.transforms = config_.val.transforms;
  val.batch_size = val_batch() * replicas_.size();
  val.num_workers = config_.val.num_workers;
  val_loader_ = std::make_unique<data::Loader>(options_.val.coco, options_.val.images, data::select_images(*options_.val.coco, false, limit), val);
}

void Trainer::restore() {
  if (replicas_.root()) load_state();
  enter("start", dist::Waits::peers);
  CheckpointInfo shared = info();
  if (communicator_) replicas_.share(*communicator_, stream_, *store_, *optimizer_, shared);
  state_ = shared.state;
  warmup_steps_ = shared.warmup_steps;
  optimizer_->set_ema_ramp(shared.ema_ramp);
}

void Trainer::load_state() {
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
  note(concat("model     ", millions, " M parameters; frozen: ", frozen, " tensors, ", frozen_values, " values"));
  const std::vector<std::int64_t>& sizes = optimizer_->group_sizes();
  for (std::size_t g = 0; g + 1 < sizes.size(); ++g) {
    if (sizes[g] == 0) warn(concat("optimizer.params.", g, " matches no trainable parameter: '", config_.optimizer.groups[g].params, "'"));
  }
  const std::int64_t most = most_boxes();
  const models::DecoderConfig& d = config_.model.decoder;
  note(concat("boxes     at most ", most, " in a picture; ", d.num_queries, " queries, ", data::denoising_capacity(d.num_denoising, most), " denoising slots"));
  if (most > d.num_queries) warn(concat("a picture has ", most, " boxes for ", d.num_queries, " queries: not all can be found (RTDETRTransformerv2.num_queries)"));
  const std::int64_t steps = train_loader_->steps();
  note(concat("schedule  ", config_.epochs, " epochs x ", steps, " steps; batch ", config_.train.batch_size, "; lr ", config_.optimizer.lr, "; warm-up ", warmup_steps_,
                        ", EMA ramp ", optimizer_->config().ema_warmups));
  if (warmup_steps_ * 5 > config_.epochs * steps && config_.warmup_steps) warn(concat("the warm-up of ", warmup_steps_, " steps is more than a fifth of the run's ", config_.epochs * steps));
  const std::int64_t strong = config_.train.policy.epoch;
  note(concat("augment   ", options_.overfit > 0 ? std::string("none (--overfit)") : strong < config_.epochs ? concat("strong until epoch ", strong) : "strong to the end",
                        config_.train.scales.empty() ? "; multi-scale off" : concat("; multi-scale until epoch ", config_.train.scales_stop_epoch)));
}

std::string Trainer::parts_text() const {
  const std::int64_t ranks = replicas_.size();
  if (ranks == 1 && config_.accum == 1) return {};
  return concat(" = ", ranks, " ranks x ", config_.train.batch_size / ranks / config_.accum, " x accum ", config_.accum);
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

void Trainer::check_replicas() {
  if (replicas_.size() == 1) return;
  enter("compare");
  replicas_.expect_equal_hash(state_hash(*store_, *optimizer_), state_.step);
}

/// A save that fails costs nothing but safety, so the run goes on, unless it is the last one or the third in a row.
void Trainer::save(bool finished) {
  const double begin = now_s();
  state_.finished = finished;
  check_replicas();
  enter("save");
  std::string error;
  if (replicas_.root()) {
    try {
      save_checkpoint(options_.output_dir / "last.safetensors", *store_, *optimizer_, info());
      reporter_.saved("last.safetensors", state_.step);
    } catch (const StorageError& failure) {
      error = failure.what();
    }
  }
  error = replicas_.from_root(error, "save");   // and nobody waits inside a step for a slow disk
  saved_at_s_ = now_s();
  save_took_s_ = saved_at_s_ - begin;
  failed_saves_ = error.empty() ? 0 : failed_saves_ + 1;
  if (error.empty()) return;
  const bool last = finished || stopping_;
  if (last || failed_saves_ >= 3) throw StorageError(error, last ? "" : " (three times in a row)");
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
  if (state_.finished && state_.step >= total_steps()) {
    summary.end = RunEnd::already_finished;
  } else {
    while (state_.step < total_steps()) {
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
    const bool save_now = every(options_.save_every_steps), check_now = every(options_.ranks.check_every);
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
  if (state_.step == 1) {
    for (const std::string& name : step_->missing()) warn("no loss reaches " + name);
  }
  if (options_.ranks.require_all_used && !step_->missing().empty())
    throw CheckFailed("step ", state_.step, ": no loss reaches ", step_->missing().front(), " and ", step_->missing().size() - 1, " other parameters (--require-all-used)");
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

std::string Trainer::blame(const StepResult& result, const std::vector<std::int64_t>& image_ids) {
  if (replicas_.size() == 1) return concat(result.fault, "; images ", ids_of(image_ids));
  const std::vector<std::string> faults = replicas_.from_all(result.fault.empty() ? "" : concat(result.fault, "; images ", ids_of(image_ids)), "fault");
  std::string text;
  for (std::size_t r = 0; r < faults.size(); ++r) {
    if (!faults[r].empty()) text += concat(text.empty() ? "" : "; ", "rank ", r, ": ", faults[r]);
  }
  return text.empty() ? result.sum_fault + ", by the sum over the ranks" : text;
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
  if (config_.patience > 0 && state_.evaluations_since_best >= config_.patience) {
    note(concat("no better AP in ", config_.patience, " evaluations: done"));
    options_.max_steps = state_.step;
  }
  // Epochs of a second or two, on a small data set, would go by in saving: at most a tenth of the time does.
  if (!last && config_.save_every > 0 && state_.epoch % config_.save_every == 0) {
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
  state_.best_ap = result.AP;
  state_.best_epoch = record.epoch;
  state_.evaluations_since_best = 0;
  best_ = result;
  if (!replicas_.root()) return;
  CheckpointInfo best = info();
  best.scored = raw_wins || !config_.optimizer.use_ema ? "model" : "ema";
  save_weights(options_.output_dir / "best.safetensors", *store_, best);
  reporter_.saved("best.safetensors", state_.step);
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

// Of the trainer: what happens before the first step.
#include <algorithm>
#include <limits>
#include <map>
#include <regex>

#include "runtime/error.h"
#include "runtime/gpus.h"
#include "runtime/timing.h"
#include "train/trainer.h"

namespace detr::train {

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
  step_ranks_.caps.bytes = config_.comm.bucket_mib << 20;
  step_ranks_.narrow = config_.comm.bucket_dtype == "bf16";
  step_ranks_.rank_rules = config_.rank_rules;
  step_ranks_.timeout = options_.ranks.timeout;
  enter("plan");
  const std::int64_t reserve = plan_memory(memory_request());
  if (replicas_.size() > 1) step_ranks_.plan = plan_collectives(memory_request());
  model_ = make_model();
  store_ = std::make_unique<ParameterStore>(model_->parameters(), stream_, DType::f32, compute_dtype(config_.amp, stream_));
  store_->initialise(config_.seed);
  optimizer_ = std::make_unique<Optimizer>(*store_, stream_, config_.optimizer);
  try {
    check_faults();
    meet_ranks();
    begin(reserve);
  } catch (const std::exception& error) {
    if (options_.ranks.failed) options_.ranks.failed(error);
    throw;
  }
}

void Trainer::begin(std::int64_t reserve) {
  step_ = std::make_unique<Step>(*model_, *store_, *optimizer_, stream_, StepOptions{captures(), config_.accum, step_ranks_});
  if (reserve > 0) step_->reserve(reserve);
  state_.seed = config_.seed;
  restore();
  step_->count_from(state_.step);
  if (!options_.faults.text().empty()) arm_step();
  describe();
}

Trainer::~Trainer() {
  stop_loader();   // first: its threads call back
  if (options_.ranks.closed) options_.ranks.closed();
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
  train.rank_rules = config_.rank_rules;
  const models::DecoderConfig& d = config_.model.decoder;
  train.denoising = {d.num_denoising, d.label_noise_ratio, d.box_noise_scale, d.num_classes};
  expect_equal_parts(config_, replicas_.size());
  keys_ = keys_of(train, most_boxes(), config_.accum);
  if (replicas_.size() > 1) {
    train.on_bad_image = [this](const data::BadImage& bad) { bad_here_.push_back(bad.image_id); };
    train.agree = [this](std::int64_t epoch, std::int64_t step, const data::StepCounts& local) { return agree(epoch, step, local); };
  }
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
  enter("start");
  if (replicas_.root()) load_state();
  enter("start", dist::Waits::peers);
  CheckpointInfo shared = info();
  if (communicator_) replicas_.share(*communicator_, stream_, *store_, *optimizer_, shared);
  state_ = shared.state;
  more_steps_ = state_.step - state_.epoch * train_loader_->steps() - state_.epoch_step;
  warmup_steps_ = shared.warmup_steps;
  optimizer_->set_ema_ramp(shared.ema_ramp);
}

void Trainer::load_state() {
  const Moved moved = progress_of(options_.ranks.control);
  if (!options_.resume.empty()) {
    const CheckpointInfo info = load_checkpoint(options_.resume, *store_, *optimizer_, moved);
    std::vector<std::string> ours, theirs;
    for (const data::Category& c : options_.train.coco->categories) ours.push_back(concat(c.id, " ", c.name));
    for (const data::Category& c : info.classes) theirs.push_back(concat(c.id, " ", c.name));
    if (ours != theirs) throw DataError(options_.resume.string(), ": was trained on other classes than ", options_.train.coco->file.string(), "; -t takes the weights alone");
    state_ = info.state;
    state_.seed = config_.seed;   // of the draws from here on
    // The automatic lengths were fixed when the run began; a changed number of epochs must not bend them.
    if (!config_.warmup_steps) warmup_steps_ = info.warmup_steps;
    if (!config_.ema_warmups) optimizer_->set_ema_ramp(info.ema_ramp);
    reporter_.note(concat("resumed   ", options_.resume.string(), " at step ", state_.step, ", epoch ", state_.epoch));
    find_place(info);
    tell_changes(info);
  } else if (!options_.tuning.empty()) {
    const WeightsReport report = load_weights(options_.tuning, *store_, WeightsChoice::scored, options_.allow_partial, moved);
    store_->reset_ema();
    reporter_.note(concat("weights   ", options_.tuning.string(), ": ", report.matched, "/", report.tensors, " tensors, ",
                          100 * static_cast<double>(report.matched_values) / static_cast<double>(report.values), " % of the weights"));
    for (const std::string& name : report.reshaped) reporter_.note("weights   another shape, starts anew: " + name);
  } else if (!options_.backbone.empty()) {
    const WeightsReport report = load_backbone(options_.backbone, *store_, moved);
    store_->reset_ema();
    reporter_.note(concat("weights   random; backbone: ", options_.backbone.string(), ", ", report.matched, "/", report.tensors, " tensors"));
  } else {
    reporter_.note("weights   random; backbone: random (the published recipe starts from ImageNet weights: --backbone FILE)");
  }
}

void Trainer::find_place(const CheckpointInfo& info) {
  if (info.epoch_samples < 0) return;
  const std::int64_t batch = config_.train.batch_size;
  state_.epoch_step = std::min(info.epoch_samples / batch, train_loader_->steps());
  const std::int64_t again = info.epoch_samples - state_.epoch_step * batch;
  if (again > 0 && state_.epoch_step < train_loader_->steps())
    reporter_.note(concat("resumed   with other batches: ", again, " of the ", info.epoch_samples, " pictures that epoch ", state_.epoch, " has seen come again"));
}

void Trainer::tell_changes(const CheckpointInfo& info) {
  std::map<std::string, std::pair<std::string, std::string>> values;   // by key: then, now
  for (const auto& [key, value] : flat_config(info.config)) values[key].first = value;
  for (const auto& [key, value] : flat_config(options_.config_json)) values[key].second = value;
  std::string changes;
  const auto add = [&](const std::string& key, const std::string& then, const std::string& now) {
    changes += concat(changes.empty() ? "" : "; ", key, ": ", then.empty() ? "none" : then, " -> ", now.empty() ? "none" : now);
  };
  if (info.ranks != replicas_.size()) add("ranks", concat(info.ranks), concat(replicas_.size()));
  for (const auto& [path, value] : values) {
    if (value.first == value.second || path.empty() || is_local(path)) continue;
    std::string key = path.substr(1);
    std::ranges::replace(key, '/', '.');
    add(key, value.first, value.second);
  }
  if (!changes.empty()) reporter_.note("resumed   with other settings: " + changes);
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
  if (options_.ranks.settings.size() > 1) {
    std::string text;
    for (const auto& [name, value] : options_.ranks.settings) text += concat(text.empty() ? "" : "; ", name, " ", value);
    note("comm      " + text);
  }
  const std::int64_t most = most_boxes();
  const models::DecoderConfig& d = config_.model.decoder;
  note(concat("boxes     at most ", most, " in a picture; ", d.num_queries, " queries, ", data::denoising_capacity(d.num_denoising, most), " denoising slots"));
  if (most > d.num_queries) warn(concat("a picture has ", most, " boxes for ", d.num_queries, " queries: not all can be found (RTDETRTransformerv2.num_queries)"));
  const std::int64_t steps = train_loader_->steps();
  note(concat("schedule  ", config_.epochs, " epochs x ", steps, " steps", tail_text(), "; batch ", config_.train.batch_size, parts_text(), "; lr ", config_.optimizer.lr, "; warm-up ", warmup_steps_,
                        ", EMA ramp ", optimizer_->config().ema_warmups));
  if (warmup_steps_ * 5 > config_.epochs * steps && config_.warmup_steps) warn(concat("the warm-up of ", warmup_steps_, " steps is more than a fifth of the run's ", config_.epochs * steps));
  const std::int64_t strong = config_.train.policy.epoch;
  note(concat("augment   ", options_.overfit > 0 ? std::string("none (--overfit)") : strong < config_.epochs ? concat("strong until epoch ", strong) : "strong to the end",
                        config_.train.scales.empty() ? "; multi-scale off" : concat("; multi-scale until epoch ", config_.train.scales_stop_epoch)));
}

std::string Trainer::parts_text() const {
  const std::int64_t ranks = replicas_.size();
  if (ranks == 1 && config_.accum == 1) return {};
  return concat(" = ", ranks > 1 ? concat(ranks, " ranks x ") : "", config_.train.batch_size / ranks / config_.accum, " x accum ", config_.accum);
}

std::string Trainer::tail_text() const {
  const std::int64_t images = train_loader_->images(), used = train_loader_->steps() * config_.train.batch_size;
  if (used < images) return concat(" (each epoch leaves out ", images - used, " of ", images, " pictures)");
  if (used > images) return concat(" (each epoch has ", images, " pictures, and takes ", used - images, " again to fill its last step)");
  return {};
}

}  // namespace detr::train

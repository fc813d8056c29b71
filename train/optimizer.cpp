#include "train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <regex>

#include "runtime/error.h"

namespace detr::train {
namespace {

/// Group of each trainable parameter; groups.size() is the rest.
std::vector<std::size_t> assign_groups(const std::vector<Parameter>& parameters, const std::vector<GroupConfig>& groups) {
  std::vector<std::size_t> assigned(parameters.size(), groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    std::regex pattern;
    try {
      pattern = std::regex(groups[g].params, std::regex::ECMAScript);
    } catch (const std::regex_error& error) {
      throw ConfigError("optimizer.params.", g, ".params: '", groups[g].params, "' is no regular expression: ", error.what());
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!std::regex_search(parameters[i].name(), pattern)) continue;
      if (assigned[i] != groups.size())
        throw ConfigError("optimizer.params: ", parameters[i].name(), " is in groups ", assigned[i], " and ", g, "; groups must not overlap");
      assigned[i] = g;
    }
  }
  return assigned;
}

}  // namespace

Optimizer::Optimizer(ParameterStore& store, const Stream& stream, const OptimizerConfig& config) : store_(store), stream_(stream.lasting()), config_(config) {
  const std::vector<Parameter>& parameters = store.trainable();
  const std::vector<std::size_t> groups = assign_groups(parameters, config.groups);
  group_sizes_.assign(config.groups.size() + 1, 0);
  std::vector<double> group_decay;
  for (const GroupConfig& group : config.groups) {
    group_lr_.push_back(group.lr.value_or(config.lr));
    group_decay.push_back(group.weight_decay.value_or(config.weight_decay));
  }
  group_lr_.push_back(config.lr);
  group_decay.push_back(config.weight_decay);

  std::vector<std::int64_t> begin, count;
  std::vector<double> lr, decay;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    begin.push_back(store.offset(parameters[i]));
    count.push_back(parameters[i].shape().numel());
    lr.push_back(group_lr_[groups[i]]);
    decay.push_back(group_decay[groups[i]]);
    ++group_sizes_[groups[i]];
  }
  const Shape shape{static_cast<std::int64_t>(parameters.size())};
  segments_ = {stream_.to_device(host_tensor(shape, begin)), stream_.to_device(host_tensor(shape, count)), stream_.to_device(host_tensor(shape, lr)),
               stream_.to_device(host_tensor(shape, decay)), stream_.zeros(shape, DType::i64), stream_.zeros(shape, DType::f64)};
  norms_ = stream_.zeros(shape, DType::f64);
  scalars_ = stream_.zeros({kernels::kScalars}, DType::f64);
  stream_.wait();   // the host's tables go
}

void Optimizer::enqueue(const Stream& stream, const Tensor& used) {
  segments_.used = used;
  Tensor weights = store_.trained_weights();
  kernels::squared_norms(stream, segments_, store_.grads(), norms_);
  kernels::finish_norm(stream, norms_, config_.clip_max_norm, scalars_);
  kernels::adamw(stream, segments_, config_.adam, scalars_, store_.grads(), weights, store_.exp_avg(), store_.exp_avg_sq());
  if (config_.use_ema) kernels::update_ema(stream, config_.ema_decay, config_.ema_warmups, scalars_, store_.weights(), store_.ema());
  store_.refresh_shadow(stream);
}

bool Optimizer::step(double lr_factor, const std::vector<bool>& used, bool allowed) {
  DETR_CHECK(used.size() == store_.trainable().size(), "optimizer: ", used.size(), " used bits for ", store_.trainable().size(), " parameters");
  Tensor inputs = scalars_.slice(0, kernels::kStepInputs);
  const Tensor values = host_tensor<double>({kernels::kStepInputs}, {lr_factor, allowed ? 1.0 : 0.0});
  const Tensor bits = host_tensor<double>(segments_.used.shape(), std::vector<double>(used.begin(), used.end()));
  stream_.copy(values, inputs);
  enqueue(stream_, stream_.to_device(bits));
  return scalar(kernels::kApply) == 1;
}

void Optimizer::set_ema_updates(std::int64_t updates) {
  Tensor place = scalars_.slice(kernels::kEmaUpdates, kernels::kEmaUpdates + 1);
  store_.from_host(host_tensor<double>({1}, {static_cast<double>(updates)}), place);
}

void Optimizer::set_steps(const Tensor& steps) { store_.from_host(steps, segments_.steps); }

const Parameter* Optimizer::first_bad_parameter(const Tensor& norms) const {
  // In registration order, so that the earliest layer is named.
  const std::vector<Parameter>& parameters = store_.trainable();
  for (std::size_t i = parameters.size(); i-- > 0;) {
    if (!std::isfinite(norms.data<double>()[i])) return &parameters[i];
  }
  return nullptr;
}

double warmup_factor(std::int64_t step, std::int64_t duration) {
  return duration <= 0 ? 1 : std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(duration));
}

double multistep_factor(std::int64_t epoch, const std::vector<std::int64_t>& milestones, double gamma) {
  const auto passed = std::count_if(milestones.begin(), milestones.end(), [&](std::int64_t m) { return m <= epoch; });
  return std::pow(gamma, static_cast<double>(passed));
}

}  // namespace detr::train

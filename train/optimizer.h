#pragma once
#include <optional>
#include <string>
#include <vector>

#include "kernels/optimizer.h"
#include "train/store.h"

namespace detr::train {

/// A parameter group: what is searched (ECMAScript regular expression) in the names of trainable parameters, and what differs from
/// the optimiser's own values.
struct GroupConfig {
  std::string params;
  std::optional<double> lr, weight_decay;
};

struct OptimizerConfig {
  double lr = 1e-4, weight_decay = 1e-4;
  kernels::AdamWOptions adam;
  std::vector<GroupConfig> groups;   ///< listed groups; the rest forms a last one
  double clip_max_norm = 0.1;        ///< 0: no clipping
  bool use_ema = true;
  double ema_decay = 0.9999, ema_warmups = 2000;
};

/// AdamW with clipping and the moving average over a parameter store.
class Optimizer {
 public:
  /// Throws ConfigError for a bad expression or a parameter in two groups. A group may match nothing: see group_sizes().
  Optimizer(ParameterStore& store, const Stream& stream, const OptimizerConfig& config);

  /// Enqueues one update from the gradients in the store, by scalars() and `used` (S) f64: how many ranks' losses reached
  /// store.trainable()[i]. No update is made, and kApply becomes 0, if the gradient is not finite.
  void enqueue(const Stream& stream, const Tensor& used);
  /// The same by itself, for checks: `lr_factor` is the schedule's; `allowed` false makes no update. Returns whether it was made.
  bool step(double lr_factor, const std::vector<bool>& used, bool allowed = true);

  /// kernels::kScalars numbers on the device, and (S) f64 the squared norm of each parameter's gradient.
  Tensor& scalars() { return scalars_; }
  const Tensor& norms() const { return norms_; }
  /// After an update: norm of the gradient before clipping, and the first parameter whose gradient is not finite (null: none), here
  /// by squared norms on the host. These wait for the device.
  double gradient_norm() const { return scalar(kernels::kGradNorm); }
  const Parameter* first_bad_parameter() const { return first_bad_parameter(stream_.to_host(norms_)); }
  const Parameter* first_bad_parameter(const Tensor& norms) const;

  std::int64_t ema_updates() const { return static_cast<std::int64_t>(scalar(kernels::kEmaUpdates)); }
  void set_ema_updates(std::int64_t updates);
  void set_ema_ramp(double updates) { config_.ema_warmups = updates; }
  /// Updates of each trainable parameter so far, (S) i64 in the store's order, on the host.
  Tensor steps() const { return stream_.to_host(segments_.steps); }
  void set_steps(const Tensor& steps);

  /// Number of trainable parameters of each group, the rest last.
  const std::vector<std::int64_t>& group_sizes() const { return group_sizes_; }
  /// Learning rate of each group before the schedule.
  const std::vector<double>& group_lr() const { return group_lr_; }
  const OptimizerConfig& config() const { return config_; }

 private:
  double scalar(kernels::Scalar which) const { return stream_.to_host(scalars_).data<double>()[which]; }

  ParameterStore& store_;
  Stream stream_;
  OptimizerConfig config_;
  kernels::Segments segments_;
  Tensor norms_, scalars_;
  std::vector<std::int64_t> group_sizes_;
  std::vector<double> group_lr_;
};

/// Linear warm-up of the learning rate: factor min(1, (step + 1) / duration); 1 for duration 0. `step` counts from 0.
double warmup_factor(std::int64_t step, std::int64_t duration);

/// MultiStep decay: gamma to the number of milestones (epochs) that lie at or before `epoch`.
double multistep_factor(std::int64_t epoch, const std::vector<std::int64_t>& milestones, double gamma);

}  // namespace detr::train

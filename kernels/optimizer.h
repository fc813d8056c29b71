#pragma once
#include <span>

#include "runtime/stream.h"

namespace detr::kernels {

/// Tables that describe the trainable parameters inside the flat buffers; one entry each, S in all, on the buffers' device. The flat
/// buffers are f32 or f64 on the CPU, f32 on CUDA.
struct Segments {
  Tensor begin, count;       ///< (S) i64: first element and number of elements; ascending and without overlap, gaps are left alone
  Tensor lr, weight_decay;   ///< (S) f64: of the parameter's group; lr before the schedule's factor
  Tensor steps;              ///< (S) i64, in and out: updates so far; a parameter may sit out a step
  Tensor used;               ///< (S) f64: how many ranks' losses reached the parameter; where it is 0 the parameter is left alone
};

/// Scalars of a step, one f64 tensor (kScalars) on the device, so that nothing waits for the host.
enum Scalar : int {
  kLrFactor = 0,       ///< in: factor of the schedule
  kApply = 1,          ///< in and out: 1 if the update is made; set to 0 where the norm is not finite
  kStepInputs = 2,     ///< what is written anew for each step lies before
  kGradNorm = 2,       ///< out: L2 norm over all used gradients, before clipping
  kClip = 3,           ///< out: min(1, max_norm / (norm + 1e-6))
  kEmaUpdates = 4,     ///< in and out: number of EMA updates
  kScalars = 5
};

/// norms (S) f64 out: sum of squares of each used segment of grads (flat), 0 where unused; sums in double in a fixed order.
/// A segment with a value that is not finite has a norm that is not finite.
void squared_norms(const Stream& stream, const Segments& segments, const Tensor& grads, Tensor& norms);

/// Adds the norms in a fixed order and writes kGradNorm, kClip (max_norm 0: no clipping) and kApply of `scalars`.
void finish_norm(const Stream& stream, const Tensor& norms, double max_norm, Tensor& scalars);

/// kApply becomes 0 unless `total` (1), of a floating dtype, is finite and every element of every status (see assign) is -1. At most kMaxStatuses.
void check_step(const Stream& stream, const Tensor& total, std::span<const Tensor> statuses, Tensor& scalars);
inline constexpr std::size_t kMaxStatuses = 16;

/// kApply becomes 0 unless each of votes (n) f64, n > 0, is `wanted`: steps are made by all ranks or by none. Each rank votes with its kApply,
/// and the votes are added over the ranks.
void check_votes(const Stream& stream, const Tensor& votes, double wanted, Tensor& scalars);

/// buffers = kept where kApply is 0: a step that is not made leaves running statistics as they were. Of one shape, f32 or f64 on the
/// CPU, f32 on CUDA.
void restore_unless_applied(const Stream& stream, const Tensor& scalars, const Tensor& kept, Tensor& buffers);

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
};

/// Decoupled weight decay Adam on the used segments, where kApply is 1:
///   t += 1;  w *= 1 - lr wd;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
/// with g = kClip grad and lr = kLrFactor segments.lr. weights, grads, exp_avg, exp_avg_sq flat, of one dtype. The factors of a segment
/// are computed in f64, its elements in the buffers' dtype; what lies between segments stays as it is.
/// Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2.
void adamw(const Stream& stream, Segments& segments, const AdamWOptions& options, const Tensor& scalars, const Tensor& grads,
           Tensor& weights, Tensor& exp_avg, Tensor& exp_avg_sq);

/// Where kApply is 1: u += 1, d = decay (1 - exp(-u / ramp)), ema = d ema + (1 - d) weights, element by element over the whole
/// buffers (running statistics too). u is kEmaUpdates. ramp > 0.
void update_ema(const Stream& stream, double decay, double ramp, Tensor& scalars, const Tensor& weights, Tensor& ema);

namespace cpu {
extern decltype(kernels::squared_norms) squared_norms;
extern decltype(kernels::finish_norm) finish_norm;
extern decltype(kernels::check_step) check_step;
extern decltype(kernels::check_votes) check_votes;
extern decltype(kernels::restore_unless_applied) restore_unless_applied;
extern decltype(kernels::adamw) adamw;
extern decltype(kernels::update_ema) update_ema;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::squared_norms) squared_norms;
extern decltype(kernels::finish_norm) finish_norm;
extern decltype(kernels::check_step) check_step;
extern decltype(kernels::check_votes) check_votes;
extern decltype(kernels::restore_unless_applied) restore_unless_applied;
extern decltype(kernels::adamw) adamw;
extern decltype(kernels::update_ema) update_ema;
}  // namespace cuda
}  // namespace detr::kernels

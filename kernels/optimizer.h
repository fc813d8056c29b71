#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// Tables that describe the trainable parameters inside the flat buffers; one entry each, S in all.
struct Segments {
  Tensor begin, count;       ///< (S) i64: first element and number of elements
  Tensor lr, weight_decay;   ///< (S) f64: of the parameter's group; lr before the schedule's factor
  Tensor steps;              ///< (S) i64, in and out: updates so far; a parameter may sit out a step
  Tensor used;               ///< (S) u8: 1 where some rank's loss reached the parameter
};

/// Scalars of a step, one f64 tensor (kScalars) on the device, so that nothing waits for the host.
enum Scalar : int {
  kLrFactor = 0,       ///< in: factor of the schedule
  kGradNorm = 1,       ///< out: L2 norm over all used gradients, before clipping
  kClip = 2,           ///< out: min(1, max_norm / (norm + 1e-6))
  kApply = 3,          ///< in and out: 1 if the update is made; set to 0 where the norm is not finite
  kEmaUpdates = 4,     ///< in and out: number of EMA updates
  kScalars = 5
};

/// norms (S) f64 out: sum of squares of each used segment of grads (flat, f32 or f64), 0 where unused; sums in double in a fixed
/// order. A segment with a value that is not finite has a norm that is not finite.
void squared_norms(const Stream& stream, const Segments& segments, const Tensor& grads, Tensor& norms);

/// Adds the norms in order and writes kGradNorm, kClip (max_norm 0: no clipping) and kApply of `scalars`.
void finish_norm(const Stream& stream, const Tensor& norms, double max_norm, Tensor& scalars);

struct AdamWOptions {
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
};

/// Decoupled weight decay Adam on the used segments, where kApply is 1:
///   t += 1;  w *= 1 - lr wd;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
/// with g = kClip grad and lr = kLrFactor segments.lr. weights, grads, exp_avg, exp_avg_sq flat, of one dtype.
/// Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2.
void adamw(const Stream& stream, Segments& segments, const AdamWOptions& options, const Tensor& scalars, const Tensor& grads,
           Tensor& weights, Tensor& exp_avg, Tensor& exp_avg_sq);

/// Where kApply is 1: u += 1, d = decay (1 - exp(-u / ramp)), ema = d ema + (1 - d) weights, element by element over the whole
/// buffers (running statistics too). u is kEmaUpdates. ramp > 0.
void update_ema(const Stream& stream, double decay, double ramp, Tensor& scalars, const Tensor& weights, Tensor& ema);

namespace cpu {
extern decltype(kernels::squared_norms) squared_norms;
extern decltype(kernels::finish_norm) finish_norm;
extern decltype(kernels::adamw) adamw;
extern decltype(kernels::update_ema) update_ema;
}  // namespace cpu
}  // namespace detr::kernels

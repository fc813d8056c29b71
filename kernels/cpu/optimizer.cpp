#include "kernels/optimizer.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/dispatch.h"
#include "runtime/host_value.h"

namespace detr::kernels::cpu {
namespace {

constexpr std::int64_t kBlock = 1 << 14;   // elements of one task; fixed, since sums are kept inside a block

/// Calls fn(segment, begin, end) for blocks of all segments, spread over the threads.
template <class F>
void for_blocks(const Stream& stream, const Segments& segments, F&& fn) {
  struct Block {
    std::int64_t segment, begin, end;
  };
  std::vector<Block> blocks;
  for (std::int64_t s = 0; s < segments.begin.numel(); ++s) {
    const std::int64_t begin = segments.begin.data<std::int64_t>()[s], end = begin + segments.count.data<std::int64_t>()[s];
    for (std::int64_t b = begin; b < end; b += kBlock) blocks.push_back({s, b, std::min(end, b + kBlock)});
  }
  stream.pool().parallel_for(static_cast<std::int64_t>(blocks.size()), [&](std::int64_t i) {
    const Block& block = blocks[static_cast<std::size_t>(i)];
    fn(i, block.segment, block.begin, block.end);
  });
}

}  // namespace

void squared_norms(const Stream& stream, const Segments& segments, const Tensor& grads, Tensor& norms) {
  const std::int64_t count = segments.begin.numel();
  const double* used = segments.used.data<double>();
  std::int64_t blocks = 0;
  for (std::int64_t s = 0; s < count; ++s) blocks += (segments.count.data<std::int64_t>()[s] + kBlock - 1) / kBlock;
  std::vector<double> partial(static_cast<std::size_t>(blocks), 0.0);
  dispatch_float("squared_norms", grads.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* g = grads.data<T>();
    for_blocks(stream, segments, [&](std::int64_t block, std::int64_t s, std::int64_t begin, std::int64_t end) {
      if (used[s] == 0) return;
      double sum = 0;
      for (std::int64_t i = begin; i < end; ++i) sum += static_cast<double>(g[i]) * static_cast<double>(g[i]);
      partial[static_cast<std::size_t>(block)] = sum;
    });
  });
  double* out = norms.data<double>();
  std::size_t block = 0;
  for (std::int64_t s = 0; s < count; ++s) {
    out[s] = 0;
    for (std::int64_t b = 0; b < segments.count.data<std::int64_t>()[s]; b += kBlock) out[s] += partial[block++];
  }
}

void finish_norm(const Stream&, const Tensor& norms, double max_norm, Tensor& scalars) {
  double sum = 0;
  for (const double n : norms.span<double>()) sum += n;
  double* s = scalars.data<double>();
  s[kGradNorm] = std::sqrt(sum);
  s[kClip] = max_norm > 0 ? std::min(1.0, max_norm / (s[kGradNorm] + 1e-6)) : 1.0;
  if (!std::isfinite(s[kGradNorm])) s[kApply] = 0;
}

void check_step(const Stream&, const Tensor& total, std::span<const Tensor> statuses, Tensor& scalars) {
  bool healthy = std::isfinite(host_value(total, 0));
  for (const Tensor& status : statuses) {
    for (const std::int64_t s : status.span<std::int64_t>()) healthy = healthy && s == -1;
  }
  if (!healthy) scalars.data<double>()[kApply] = 0;
}

void check_votes(const Stream&, const Tensor& votes, double wanted, Tensor& scalars) {
  for (const double vote : votes.span<double>()) {
    if (vote != wanted) scalars.data<double>()[kApply] = 0;
  }
}

void restore_unless_applied(const Stream&, const Tensor& scalars, const Tensor& kept, Tensor& buffers) {
  if (scalars.data<double>()[kApply] == 0 && buffers.bytes()) std::memcpy(buffers.raw(), kept.raw(), static_cast<std::size_t>(buffers.bytes()));
}

void adamw(const Stream& stream, Segments& segments, const AdamWOptions& options, const Tensor& scalars, const Tensor& grads,
           Tensor& weights, Tensor& exp_avg, Tensor& exp_avg_sq) {
  const double* s = scalars.data<double>();
  if (s[kApply] == 0) return;
  const double* used = segments.used.data<double>();
  std::int64_t* steps = segments.steps.data<std::int64_t>();
  for (std::int64_t i = 0; i < segments.begin.numel(); ++i) steps[i] += used[i] != 0 ? 1 : 0;
  dispatch_float("adamw", grads.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* g = grads.data<T>();
    T* w = weights.data<T>();
    T* m = exp_avg.data<T>();
    T* v = exp_avg_sq.data<T>();
    const T clip = static_cast<T>(s[kClip]), b1 = static_cast<T>(options.beta1), b2 = static_cast<T>(options.beta2);
    const T one_b1 = static_cast<T>(1 - options.beta1), one_b2 = static_cast<T>(1 - options.beta2), eps = static_cast<T>(options.eps);
    for_blocks(stream, segments, [&](std::int64_t, std::int64_t segment, std::int64_t begin, std::int64_t end) {
      if (used[segment] == 0) return;
      const double lr = s[kLrFactor] * segments.lr.data<double>()[segment], t = static_cast<double>(steps[segment]);
      const T decay = static_cast<T>(1 - lr * segments.weight_decay.data<double>()[segment]);
      const T rate = static_cast<T>(lr / (1 - std::pow(options.beta1, t)));
      const T correction = static_cast<T>(1 / std::sqrt(1 - std::pow(options.beta2, t)));
      for (std::int64_t i = begin; i < end; ++i) {
        const T gradient = clip * g[i];
        m[i] = b1 * m[i] + one_b1 * gradient;
        v[i] = b2 * v[i] + one_b2 * gradient * gradient;
        w[i] = decay * w[i] - rate * m[i] / (std::sqrt(v[i]) * correction + eps);
      }
    });
  });
}

void update_ema(const Stream& stream, double decay, double ramp, Tensor& scalars, const Tensor& weights, Tensor& ema) {
  double* s = scalars.data<double>();
  if (s[kApply] == 0) return;
  s[kEmaUpdates] += 1;
  const double d = decay * (1 - std::exp(-s[kEmaUpdates] / ramp));
  dispatch_float("update_ema", weights.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* w = weights.data<T>();
    T* e = ema.data<T>();
    const T keep = static_cast<T>(d), take = static_cast<T>(1 - d);
    stream.parallel_blocks(weights.numel(), kBlock, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) e[i] = keep * e[i] + take * w[i];
    });
  });
}

}  // namespace detr::kernels::cpu

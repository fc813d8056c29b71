#pragma once
#include <cstdint>

namespace detr::bench {

/// What one H200 reaches: dense bf16 products, and bytes read and written by a copy. Both measured, see docs/performance.md.
inline constexpr double kFlopsPerSecond = 790e12;
inline constexpr double kBytesPerSecond = 4.3e12;

/// The least that a piece of work asks of the machine.
struct Cost {
  double mac = 0;        ///< multiply-adds of matrix products and samples; two FLOP each
  double bytes = 0;      ///< read and written, each tensor once for each pass that cannot be avoided
  double floor_ms = 0;   ///< sum over kernels of the larger of their time by FLOP and by bytes

  Cost& operator+=(const Cost& other);
};
Cost operator+(Cost a, const Cost& b);
Cost operator*(double factor, const Cost& cost);

/// One kernel: the floor is max(2 mac / kFlopsPerSecond, bytes / kBytesPerSecond).
Cost kernel_cost(double mac, double bytes);

// Below, `e` is the size of an activation's element in bytes. Gradients of parameters, statistics and boxes are f32. Vectors of a channel's or
// a column's length are left out.

/// A square convolution of padding (kernel - 1) / 2 on a map (n, h, w, in).
struct ConvGeometry {
  std::int64_t n = 1, h = 1, w = 1, in = 1, out = 1, kernel = 1, stride = 1;

  std::int64_t out_h() const { return (h + stride - 1) / stride; }
  std::int64_t out_w() const { return (w + stride - 1) / stride; }
  double x() const;        ///< elements of the input
  double y() const;        ///< elements of the output
  double weights() const;
  double mac() const;
};
/// fprop; `extra_maps` is the number of further maps of the output's size that its epilogue reads (a residual: 1).
Cost conv_forward(const ConvGeometry& g, double e, double extra_maps = 0);
/// dgrad; `extra_maps` is the number of further maps of the input's size that its epilogue reads (a ReLU's mask, a gradient to add to).
Cost conv_data_gradient(const ConvGeometry& g, double e, double extra_maps = 0);
/// wgrad, written in f32.
Cost conv_weight_gradient(const ConvGeometry& g, double e);

/// One product of a linear layer over `rows` rows: forward, data gradient and weight gradient alike.
Cost linear_product(std::int64_t rows, std::int64_t in, std::int64_t out, double e);

struct AttentionGeometry {
  std::int64_t n = 1, heads = 8, queries = 1, keys = 1, head_dim = 32;
};
Cost attention_forward(const AttentionGeometry& g, double e);
/// Two and a half times the forward.
Cost attention_backward(const AttentionGeometry& g, double e);

/// Deformable attention: `slots` sampling points of each query and head, over all levels.
struct SamplerGeometry {
  std::int64_t n = 1, tokens = 1, queries = 1, heads = 8, slots = 1, head_dim = 32;
};
Cost sampler_forward(const SamplerGeometry& g, double e);
Cost sampler_backward(const SamplerGeometry& g, double e);

/// `passes` times a map of `elements` is read or written.
Cost passes_over(std::int64_t elements, double passes, double e);

/// Batch norm on a map of `elements`, plain form: statistics read once, then read and write. A residual is one more to read.
Cost batch_norm_forward(std::int64_t elements, double e, bool residual);
/// With given statistics: read and write.
Cost batch_norm_inference(std::int64_t elements, double e, bool residual);
/// Two passes over dy and x, or one with given statistics, `masks` further maps in each (the output of a ReLU, the residual of a SiLU); one
/// write for dx and one for dresidual where there is a residual. With given statistics x is not read.
Cost batch_norm_backward(std::int64_t elements, double e, bool batch_statistics, int masks, bool residual);

/// Layer norm of x + residual: the sum is written where there is one; mean and rstd of each row.
Cost layer_norm_forward(std::int64_t rows, std::int64_t width, double e, bool residual);
Cost layer_norm_backward(std::int64_t rows, std::int64_t width, double e);

/// Logits read and their gradient written, once: forward and backward together.
Cost detection_loss(std::int64_t n, std::int64_t queries, std::int64_t classes, double e);

/// Bytes of an optimised parameter in f32: its norm 4, AdamW 28 (g p m v in, p m v out), the average 12 (p, average in, average out). In one pass, with a
/// bf16 shadow written: g p m v average in, p m v average and shadow out, 38.
inline constexpr double kNormBytes = 4, kAdamwBytes = 28, kAverageBytes = 12, kOptimizerPassBytes = 38;

}  // namespace detr::bench

#pragma once
#include "kernels/activation.h"
#include "runtime/stream.h"

namespace detr::kernels {

/// Batch normalisation over all but the last dimension, with the residual and activation that follow it:
///   y = act( (x - mean) * rstd * weight + bias + residual ),   rstd = 1 / sqrt(var + eps)
///
/// x               (..., C)      a map (N, H, W, C) as a rule; R rows. CPU: f32, f64; CUDA: f32, bf16, up to 2^30 rows
/// weight, bias    (C)           wide, see Note [Element types]
/// residual        like x        or null
/// activation      none, relu or silu
/// running_mean, running_var (C)  wide, in and out: r = (1 - momentum) r + momentum * statistic of the batch; the
///                               variance that is stored is the unbiased one (R / (R - 1), and the biased one for R = 1)
/// y               like x        out
/// mean, rstd      (C)           out, wide; of the batch (biased variance), kept for backward
///
/// Sums over fixed blocks of rows, combined in a fixed order: same bits for any number of threads, and on every run. On the CPU in
/// double; on CUDA in float over short runs of rows, which are then combined, in the end in double. They are of deviations from a
/// value of the map (the first row; on CUDA the mean of eight), so that a mean far above the deviation costs no digits. On CUDA
/// everything after the sums is in float, and only what is stored is rounded to x's dtype. Fit for capture.
/// Throws InvalidArgument if a shape, dtype or device disagrees or R is 0.
/// Ioffe and Szegedy 2015, "Batch Normalization", arXiv:1502.03167, algorithm 1.
void batch_norm_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                        Activation activation, double eps, double momentum, Tensor& running_mean, Tensor& running_var, Tensor& y,
                        Tensor& mean, Tensor& rstd);

/// The same with given statistics (evaluation, and frozen batch norm in training): mean = running_mean, var = running_var.
/// mean, rstd (C): out, kept for backward. R may be 0.
void batch_norm_inference(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                          Activation activation, double eps, const Tensor& running_mean, const Tensor& running_var, Tensor& y,
                          Tensor& mean, Tensor& rstd);

/// Backward of both, for any subset of wanted gradients; null is neither computed nor written, others are overwritten.
///
/// x                 may be undefined where nothing of it is read: batch_statistics is false, the activation none or relu, and
///                   neither dweight nor dbias wanted
/// batch_statistics  true after batch_norm_forward (the statistics depend on x), false after batch_norm_inference
/// y                 the forward's output; read for relu only, may be undefined otherwise
/// residual          the forward's; read for silu only (null where there was none)
/// dx, dresidual     like dy
/// dweight, dbias    (C), wide; sums as above
///
/// The gradient before the activation is rounded to x's dtype, as in dresidual, before anything else is made of it: the same bits
/// for any subset.
void batch_norm_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                         const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                         bool batch_statistics, Tensor* dx, Tensor* dweight, Tensor* dbias, Tensor* dresidual);

/// Batch norm over the rows of W ranks, each of which has R of them: the steps between which the ranks exchange a few numbers, so that each
/// has those of all, by rank. The same numbers on every rank give the same bits there. Formulas, dtypes, activations, determinism and
/// errors as above, and fit for capture too; what is exchanged is f64 everywhere.
///   forward   moments - exchange - combine - apply
///   backward  backward_sums - exchange - backward_apply

/// What the ranks have exchanged: (W, 2, C), f64, by rank; or (W, K, 2, C), of K norms with as many channels that share an exchange.
struct Exchanged {
  Exchanged(const Tensor& all_, std::int64_t norm_ = 0) : all(all_), norm(norm_) {}   // an exchange of one norm is its tensor
  const Tensor& all;
  std::int64_t norm;   ///< which of the K is meant

  std::int64_t ranks() const { return all.dim(0); }
  /// The first rank's numbers of this norm, and how many lie between those of two ranks.
  const double* first() const { return all.data<double>() + norm * 2 * all.dim(-1); }
  std::int64_t stride() const { return all.numel() / ranks(); }
};

/// moments (2, C), f64, out: of each channel the mean of this rank's rows, and the sum of the squares of their deviations from it. R >= 1.
void batch_norm_moments(const Stream& stream, const Tensor& x, Tensor& moments);

/// The statistics of all W R rows from each rank's moments, and what batch_norm_forward makes of them. Ranks are added one by one in their
/// order, always by means and squared deviations, so that a mean far above the deviation costs no digits.
///
/// moments            of each rank
/// rows                          R >= 1
/// running_mean, running_var, mean, rstd (C)  as in batch_norm_forward; R there is W R here
///
/// Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance", doi:10.1080/00031305.1983.10483115, eq. 2.1.
void batch_norm_combine(const Stream& stream, const Exchanged& moments, std::int64_t rows, double eps, double momentum, Tensor& running_mean,
                        Tensor& running_var, Tensor& mean, Tensor& rstd);

/// y from the statistics. R may be 0.
void batch_norm_apply(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                      Activation activation, const Tensor& mean, const Tensor& rstd, Tensor& y);

/// With g the gradient before the activation, rounded as in batch_norm_backward, and sums over this rank's rows alone:
///
/// sums              (2, C)  f64, out or null: sum(g), sum(g (x - mean)); needed for dx only
/// dweight, dbias    (C)     out or null, wide: rstd sum(g (x - mean)), sum(g); those of all ranks are to be added like any parameter's
/// dresidual         like dy, out or null: g
///
/// Inputs as in batch_norm_backward; x may be undefined where only dresidual is wanted and the activation is none or relu.
void batch_norm_backward_sums(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                              const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                              Tensor* sums, Tensor* dweight, Tensor* dbias, Tensor* dresidual);

/// dx = weight rstd (g - sum(g) / (W R) - (x - mean) rstd^2 sum(g (x - mean)) / (W R)), with the sums of all ranks, added in their order.
///
/// sums  of each rank
/// dx    like dy    out
///
/// Other inputs as in batch_norm_backward_sums. Where that wrote dresidual, the same bits come sooner from dy = dresidual and activation none.
void batch_norm_backward_apply(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                               const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                               const Exchanged& sums, Tensor& dx);

namespace cpu {
extern decltype(kernels::batch_norm_forward) batch_norm_forward;
extern decltype(kernels::batch_norm_inference) batch_norm_inference;
extern decltype(kernels::batch_norm_backward) batch_norm_backward;
extern decltype(kernels::batch_norm_moments) batch_norm_moments;
extern decltype(kernels::batch_norm_combine) batch_norm_combine;
extern decltype(kernels::batch_norm_apply) batch_norm_apply;
extern decltype(kernels::batch_norm_backward_sums) batch_norm_backward_sums;
extern decltype(kernels::batch_norm_backward_apply) batch_norm_backward_apply;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::batch_norm_forward) batch_norm_forward;
extern decltype(kernels::batch_norm_inference) batch_norm_inference;
extern decltype(kernels::batch_norm_backward) batch_norm_backward;
extern decltype(kernels::batch_norm_moments) batch_norm_moments;
extern decltype(kernels::batch_norm_combine) batch_norm_combine;
extern decltype(kernels::batch_norm_apply) batch_norm_apply;
extern decltype(kernels::batch_norm_backward_sums) batch_norm_backward_sums;
extern decltype(kernels::batch_norm_backward_apply) batch_norm_backward_apply;
}  // namespace cuda
}  // namespace detr::kernels

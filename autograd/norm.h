#pragma once
#include "autograd/context.h"
#include "kernels/activation.h"

namespace detr {

/// Running statistics of a batch norm, updated in place in training.
struct RunningStats {
  Tensor mean, var;
};

/// Batch norm with the residual (may be undefined) and activation that follow it. `batch_statistics`: normalise with the
/// statistics of x and update `running`; otherwise with `running`. Shapes: kernels/batch_norm.h.
///
/// Where the context has SharedStatistics, the batch is that of all its ranks, each with as many rows as this one, and the result of each is
/// what it would be in one process with all rows, its gradients those of the sum of all ranks' losses: of x and the residual whole, of weight
/// and bias this rank's share, to be added up like any other parameter's.
Variable batch_norm(Context& ctx, const Variable& x, const Variable& weight, const Variable& bias, const Variable& residual,
                    kernels::Activation activation, double eps, double momentum, bool batch_statistics, RunningStats running);

/// One of two batch norms whose results are added.
struct NormBranch {
  Variable x, weight, bias;
  double eps, momentum;
  RunningStats running;
};

/// act(norm(a) + norm(b)) of maps of one shape, such as the branches of a RepVGG unit: what two batch_norm make, b's result being a's residual.
/// Where the context has SharedStatistics, one exchange serves both.
Variable batch_norm_sum(Context& ctx, const NormBranch& a, const NormBranch& b, kernels::Activation activation, bool batch_statistics);

/// Layer norm of x + residual (residual may be undefined). Shapes: kernels/layer_norm.h.
Variable layer_norm(Context& ctx, const Variable& x, const Variable& residual, const Variable& weight, const Variable& bias, double eps);

}  // namespace detr

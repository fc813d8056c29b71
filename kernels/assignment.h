#pragma once
#include "runtime/stream.h"

namespace detr::kernels {

/// Weights of the matching cost. Carion et al. 2020, "DETR", arXiv:2005.12872, eq. 1; focal class cost: Deformable DETR.
struct MatchCostOptions {
  double class_weight = 2, bbox_weight = 5, giou_weight = 2;
  double alpha = 0.25, gamma = 2;
};

/// Cost of giving true box g to query q, without gradient:
///   p = sigmoid(logits[n, begin + q, label g])
///   class = alpha (1 - p)^gamma (-ln(p + 1e-8)) - (1 - alpha) p^gamma (-ln(1 - p + 1e-8))
///   cost  = class_weight class + bbox_weight sum |b - t| + giou_weight (-GIoU(b, t))
///
/// logits  (N, T, C), boxes (N, T, 4) wide (cx, cy, w, h): queries [begin, begin + Q) are priced; see Note [Element types]
/// labels  (N, Gcap) i64 in [0, C), truth (N, Gcap, 4) wide, counts (N) i64
/// cost    (N, Gcap, Q) out, wide; rows g >= counts[n] are not written
///
/// Arithmetic in the dtype of cost. On CUDA a label out of range makes its row NaN, which assign reports. Fit for capture.
/// Throws InvalidArgument if a shape, dtype or device disagrees, or (on the CPU) a label or count is out of range.
void match_cost(const Stream& stream, const Tensor& logits, const Tensor& boxes, std::int64_t begin, const Tensor& labels,
                const Tensor& truth, const Tensor& counts, const MatchCostOptions& options, Tensor& cost);

/// Exact minimum-cost assignment of each image's true boxes to queries, index by index what SciPy's linear_sum_assignment
/// returns for the matrix with queries as rows and true boxes as columns, ties included. With more boxes than queries each
/// query gets a box; with no box nothing is matched.
///
/// cost    (N, Gcap, Q) f32, or f64 on the CPU, as match_cost writes it; counts (N) i64, on CUDA clamped to [0, Gcap]
/// match   (N, Q) i64 out: the true box of each query, -1 for none
/// status  (N) i64 out: -1, or g Q + q of the image's first cost that is not finite; then nothing of the image is matched.
///         Beyond 1e300 a cost counts as not finite, since sums of such costs could overflow.
///
/// Arithmetic in f64 for both dtypes and on both devices, as in SciPy; the same matching on both. Fit for capture. On CUDA Q and
/// Gcap are at most 65534; up to 320 of both is the fast case.
/// Throws InvalidArgument if a shape, dtype or device disagrees, or (on the CPU) a count is out of range.
/// Crouse 2016, "On implementing 2D rectangular assignment algorithms", IEEE TAES 52(4) (the shortest augmenting path method).
void assign(const Stream& stream, const Tensor& cost, const Tensor& counts, Tensor& match, Tensor& status);

/// Throws Diverged naming image (index in the batch), query and true box if a status says that a cost was not finite.
/// Reads the status on the host.
void expect_finite_costs(const Tensor& status, std::int64_t queries);

namespace cpu {
extern decltype(kernels::match_cost) match_cost;
extern decltype(kernels::assign) assign;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::match_cost) match_cost;
extern decltype(kernels::assign) assign;
}  // namespace cuda
}  // namespace detr::kernels

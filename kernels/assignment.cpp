#include "kernels/assignment.h"

#include "kernels/dispatch.h"
#include "runtime/error.h"

namespace detr::kernels {

void match_cost(const Stream& stream, const Tensor& logits, const Tensor& boxes, std::int64_t begin, const Tensor& labels,
                const Tensor& truth, const Tensor& counts, const MatchCostOptions& options, Tensor& cost) {
  DETR_CHECK(logits.rank() == 3, "match_cost: logits must be (N, T, C), got ", logits);
  const std::int64_t images = logits.dim(0), tokens = logits.dim(1);
  expect_wide(logits, "match_cost: boxes", boxes, {images, tokens, 4});
  DETR_CHECK(labels.rank() == 2, "match_cost: labels must be (N, Gcap), got ", labels);
  const std::int64_t capacity = labels.dim(1);
  expect_tensor(logits, "match_cost: labels", labels, {images, capacity}, DType::i64);
  expect_wide(logits, "match_cost: truth", truth, {images, capacity, 4});
  expect_tensor(logits, "match_cost: counts", counts, {images}, DType::i64);
  DETR_CHECK(cost.rank() == 3, "match_cost: cost must be (N, Gcap, Q), got ", cost);
  expect_wide(logits, "match_cost: cost", cost, {images, capacity, cost.dim(2)});
  DETR_CHECK(begin >= 0 && begin + cost.dim(2) <= tokens, "match_cost: queries [", begin, ", ", begin + cost.dim(2),
             ") do not lie in the ", tokens, " of logits");
  DETR_DISPATCH(logits.device(), match_cost, stream, logits, boxes, begin, labels, truth, counts, options, cost);
}

void assign(const Stream& stream, const Tensor& cost, const Tensor& counts, Tensor& match, Tensor& status) {
  DETR_CHECK(cost.rank() == 3, "assign: cost must be (N, Gcap, Q), got ", cost);
  const std::int64_t images = cost.dim(0);
  expect_tensor(cost, "assign: counts", counts, {images}, DType::i64);
  expect_tensor(cost, "assign: match", match, {images, cost.dim(2)}, DType::i64);
  expect_tensor(cost, "assign: status", status, {images}, DType::i64);
  DETR_DISPATCH(cost.device(), assign, stream, cost, counts, match, status);
}

void expect_finite_costs(const Tensor& status, std::int64_t queries) {
  DETR_CHECK(status.defined() && status.rank() == 1 && status.dtype() == DType::i64 && status.device().is_cpu(),
             "expect_finite_costs: status must be i64 (N) on the host");
  const auto values = status.span<std::int64_t>();
  for (std::size_t n = 0; n < values.size(); ++n) {
    if (values[n] < 0) continue;
    DETR_CHECK(queries > 0, "expect_finite_costs: queries must be >= 1, got ", queries);
    throw Diverged("matching: image ", n, " of the batch: the cost of query ", values[n] % queries, " for true box ",
                   values[n] / queries, " is not finite; the model has diverged");
  }
}

}  // namespace detr::kernels

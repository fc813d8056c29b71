#include "kernels/optimizer.h"

#include "kernels/dispatch.h"

namespace detr::kernels {
namespace {

void expect_segments(const char* op, const Segments& s, const Tensor& flat) {
  const Shape shape = s.begin.shape();
  DETR_CHECK(shape.rank() == 1, op, ": segments must be (S), got ", s.begin);
  expect_tensor(flat, op, s.begin, shape, DType::i64);
  expect_tensor(flat, op, s.count, shape, DType::i64);
  expect_tensor(flat, op, s.lr, shape, DType::f64);
  expect_tensor(flat, op, s.weight_decay, shape, DType::f64);
  expect_tensor(flat, op, s.steps, shape, DType::i64);
  expect_tensor(flat, op, s.used, shape, DType::f64);
}

}  // namespace

void squared_norms(const Stream& stream, const Segments& segments, const Tensor& grads, Tensor& norms) {
  expect_segments("squared_norms: segments", segments, grads);
  expect_tensor(grads, "squared_norms: norms", norms, segments.begin.shape(), DType::f64);
  DETR_DISPATCH(grads.device(), squared_norms, stream, segments, grads, norms);
}

void finish_norm(const Stream& stream, const Tensor& norms, double max_norm, Tensor& scalars) {
  expect_tensor(norms, "finish_norm: scalars", scalars, {kScalars}, DType::f64);
  DETR_CHECK(max_norm >= 0, "finish_norm: max_norm must be >= 0, got ", max_norm);
  DETR_DISPATCH(norms.device(), finish_norm, stream, norms, max_norm, scalars);
}

void check_step(const Stream& stream, const Tensor& total, std::span<const Tensor> statuses, Tensor& scalars) {
  expect_like(total, "check_step: total", total, {1});
  expect_tensor(total, "check_step: scalars", scalars, {kScalars}, DType::f64);
  DETR_CHECK(statuses.size() <= kMaxStatuses, "check_step: at most ", kMaxStatuses, " statuses, got ", statuses.size());
  for (const Tensor& status : statuses) expect_tensor(total, "check_step: status", status, status.shape(), DType::i64);
  DETR_DISPATCH(total.device(), check_step, stream, total, statuses, scalars);
}

void check_votes(const Stream& stream, const Tensor& votes, double wanted, Tensor& scalars) {
  DETR_CHECK(votes.rank() == 1 && votes.numel() > 0 && votes.dtype() == DType::f64, "check_votes: votes (n) f64, got ", votes);
  expect_tensor(votes, "check_votes: scalars", scalars, {kScalars}, DType::f64);
  DETR_DISPATCH(votes.device(), check_votes, stream, votes, wanted, scalars);
}

void restore_unless_applied(const Stream& stream, const Tensor& scalars, const Tensor& kept, Tensor& buffers) {
  expect_tensor(buffers, "restore_unless_applied: scalars", scalars, {kScalars}, DType::f64);
  expect_like(buffers, "restore_unless_applied: kept", kept, buffers.shape());
  DETR_DISPATCH(buffers.device(), restore_unless_applied, stream, scalars, kept, buffers);
}

void adamw(const Stream& stream, Segments& segments, const AdamWOptions& options, const Tensor& scalars, const Tensor& grads,
           Tensor& weights, Tensor& exp_avg, Tensor& exp_avg_sq) {
  expect_segments("adamw: segments", segments, grads);
  expect_tensor(grads, "adamw: scalars", scalars, {kScalars}, DType::f64);
  expect_like(grads, "adamw: weights", weights, grads.shape());
  expect_like(grads, "adamw: exp_avg", exp_avg, grads.shape());
  expect_like(grads, "adamw: exp_avg_sq", exp_avg_sq, grads.shape());
  DETR_DISPATCH(grads.device(), adamw, stream, segments, options, scalars, grads, weights, exp_avg, exp_avg_sq);
}

void update_ema(const Stream& stream, double decay, double ramp, Tensor& scalars, const Tensor& weights, Tensor& ema) {
  expect_tensor(weights, "update_ema: scalars", scalars, {kScalars}, DType::f64);
  expect_like(weights, "update_ema: ema", ema, weights.shape());
  DETR_CHECK(ramp > 0, "update_ema: ramp must be > 0, got ", ramp);
  DETR_DISPATCH(weights.device(), update_ema, stream, decay, ramp, scalars, weights, ema);
}

}  // namespace detr::kernels

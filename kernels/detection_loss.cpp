#include "kernels/detection_loss.h"

#include "kernels/dispatch.h"
#include "runtime/error.h"

namespace detr::kernels {
namespace {

void expect_arguments(const Tensor& logits, const Tensor& boxes, std::span<const PredictionSet> sets, const TrueBoxes& truth) {
  DETR_CHECK(logits.rank() == 3, "detection_loss: logits must be (N, T, C), got ", logits);
  const std::int64_t images = logits.dim(0), tokens = logits.dim(1);
  expect_wide(logits, "detection_loss: boxes", boxes, {images, tokens, 4});
  DETR_CHECK(truth.labels.rank() == 2, "detection_loss: true labels must be (N, Gcap), got ", truth.labels);
  const std::int64_t capacity = truth.labels.dim(1);
  expect_tensor(logits, "detection_loss: true labels", truth.labels, {images, capacity}, DType::i64);
  expect_wide(logits, "detection_loss: true boxes", truth.boxes, {images, capacity, 4});
  for (const PredictionSet& set : sets) {
    DETR_CHECK(set.match.rank() == 2, "detection_loss: match must be (N, Q), got ", set.match);
    const std::int64_t queries = set.match.dim(1);
    expect_tensor(logits, "detection_loss: match", set.match, {images, queries}, DType::i64);
    if (set.groups.defined()) expect_tensor(logits, "detection_loss: groups", set.groups, {queries}, DType::i64);
    expect_wide(logits, "detection_loss: normalizer", set.normalizer, {1});
    DETR_CHECK(set.begin >= 0 && set.begin + queries <= tokens, "detection_loss: queries [", set.begin, ", ", set.begin + queries,
               ") do not lie in the ", tokens, " of logits");
  }
}

}  // namespace

void detection_loss_forward(const Stream& stream, const Tensor& logits, const Tensor& boxes, std::span<const PredictionSet> sets,
                            const TrueBoxes& truth, const DetectionLossOptions& options, Tensor& terms) {
  expect_arguments(logits, boxes, sets, truth);
  expect_wide(logits, "detection_loss: terms", terms, {std::ssize(sets), 3});
  DETR_DISPATCH(logits.device(), detection_loss_forward, stream, logits, boxes, sets, truth, options, terms);
}

void detection_loss_backward(const Stream& stream, const Tensor& dterms, const Tensor& logits, const Tensor& boxes,
                             std::span<const PredictionSet> sets, const TrueBoxes& truth, const DetectionLossOptions& options,
                             Tensor* dlogits, Tensor* dboxes) {
  expect_arguments(logits, boxes, sets, truth);
  expect_wide(logits, "detection_loss: dterms", dterms, {std::ssize(sets), 3});
  expect_like(logits, "detection_loss: dlogits", dlogits, logits.shape());
  expect_like(boxes, "detection_loss: dboxes", dboxes, boxes.shape());
  DETR_DISPATCH(logits.device(), detection_loss_backward, stream, dterms, logits, boxes, sets, truth, options, dlogits, dboxes);
}

}  // namespace detr::kernels

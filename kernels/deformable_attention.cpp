#include "kernels/deformable_attention.h"

#include "kernels/dispatch.h"

namespace detr::kernels {
namespace {

void check_inputs(const Tensor& value, const Tensor& offsets, const Tensor& logits, const Tensor& reference,
                  const DeformableOptions& options) {
  const std::int64_t heads = options.heads;
  DETR_CHECK(heads >= 1, "deformable_attention: heads must be >= 1, got ", heads);
  DETR_CHECK(!options.levels.empty() && options.levels.size() == options.points.size(),
             "deformable_attention: there must be as many point counts as levels, at least one, got ", options.points.size(),
             " point counts for ", options.levels.size(), " levels");
  std::int64_t tokens = 0, points = 0;
  for (std::size_t i = 0; i < options.levels.size(); ++i) {
    const auto [h, w] = options.levels[i];
    DETR_CHECK(h >= 1 && w >= 1, "deformable_attention: level ", i, " must have cells, got ", h, " x ", w);
    DETR_CHECK(options.points[i] >= 1, "deformable_attention: level ", i, " must have points, got ", options.points[i]);
    tokens += h * w;
    points += options.points[i];
  }
  DETR_CHECK(value.rank() == 3 && value.dim(2) >= 1 && value.dim(2) % heads == 0,
             "deformable_attention: value must be (N, S, A d) with A = ", heads, ", got ", value);
  DETR_CHECK(offsets.rank() == 3, "deformable_attention: offsets must be (N, Q, A P 2), got ", offsets);
  const std::int64_t images = value.dim(0), queries = offsets.dim(1);
  expect_like(value, "deformable_attention: value", value, {images, tokens, value.dim(2)});
  expect_like(value, "deformable_attention: offsets", offsets, {images, queries, heads * points * 2});
  expect_like(value, "deformable_attention: logits", logits, {images, queries, heads * points});
  expect_wide(value, "deformable_attention: reference", reference, {images, queries, 4});
}

}  // namespace

void deformable_attention_forward(const Stream& stream, const Tensor& value, const Tensor& offsets, const Tensor& logits,
                                  const Tensor& reference, const DeformableOptions& options, Tensor& out) {
  check_inputs(value, offsets, logits, reference, options);
  expect_like(value, "deformable_attention: out", out, {value.dim(0), offsets.dim(1), value.dim(2)});
  DETR_DISPATCH(value.device(), deformable_attention_forward, stream, value, offsets, logits, reference, options, out);
}

void deformable_attention_backward(const Stream& stream, const Tensor& dout, const Tensor& value, const Tensor& offsets,
                                   const Tensor& logits, const Tensor& reference, const DeformableOptions& options, Tensor* dvalue,
                                   Tensor* doffsets, Tensor* dlogits) {
  check_inputs(value, offsets, logits, reference, options);
  expect_like(value, "deformable_attention: dout", dout, {value.dim(0), offsets.dim(1), value.dim(2)});
  expect_like(value, "deformable_attention: dvalue", dvalue, value.shape());
  expect_like(value, "deformable_attention: doffsets", doffsets, offsets.shape());
  expect_like(value, "deformable_attention: dlogits", dlogits, logits.shape());
  DETR_DISPATCH(value.device(), deformable_attention_backward, stream, dout, value, offsets, logits, reference, options, dvalue,
                doffsets, dlogits);
}

}  // namespace detr::kernels

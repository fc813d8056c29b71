#include "kernels/gather.h"

#include <vector>

#include "kernels/dispatch.h"

namespace detr::kernels {
namespace {

/// The shape with `size` in place of dimension `axis`.
Shape with_size(const Shape& shape, int axis, std::int64_t size) {
  std::vector<std::int64_t> dims(shape.dims().begin(), shape.dims().end());
  dims[static_cast<std::size_t>(axis)] = size;
  return Shape(dims);
}

/// `what` names y, which is the output or its gradient.
void check_gather_rows(const Tensor& x, const Tensor& index, const Tensor* valid, const char* what, const Tensor& y) {
  DETR_CHECK(x.rank() == 3, "gather_rows: x must be (N, T, D), got ", x);
  DETR_CHECK(index.rank() == 2, "gather_rows: index must be (N, Q), got ", index);
  expect_tensor(x, "gather_rows: index", index, {x.dim(0), index.dim(1)}, DType::i64);
  if (valid) expect_tensor(x, "gather_rows: valid", *valid, {x.dim(1)}, DType::u8);
  expect_like(x, what, y, {x.dim(0), index.dim(1), x.dim(2)});
}

void check_embedding(const Tensor& table, const Tensor& index, const char* what, const Tensor& y, DType dtype) {
  DETR_CHECK(table.rank() == 2, "embedding: table must be (K, D), got ", table);
  expect_tensor(table, "embedding: index", index, index.shape(), DType::i64);
  DETR_CHECK(index.rank() < Shape::kMaxRank, "embedding: index has too many dimensions: ", index);
  std::vector<std::int64_t> dims(index.shape().dims().begin(), index.shape().dims().end());
  dims.push_back(table.dim(1));
  expect_tensor(table, what, y, Shape(dims), dtype);
}

}  // namespace

void concat_forward(const Stream& stream, std::span<const Tensor> inputs, int axis, Tensor& y) {
  DETR_CHECK(!inputs.empty(), "concat: there must be at least one input");
  DETR_CHECK(axis >= 0 && axis < y.rank(), "concat: axis ", axis, " of ", y);
  std::int64_t total = 0;
  for (const Tensor& input : inputs) {
    DETR_CHECK(input.rank() == y.rank(), "concat: input must have ", y.rank(), " dimensions, got ", input);
    expect_like(y, "concat: input", input, with_size(y.shape(), axis, input.dim(axis)));
    total += input.dim(axis);
  }
  DETR_CHECK(total == y.dim(axis), "concat: the inputs have ", total, " along dimension ", axis, " of y, which is ", y);
  DETR_DISPATCH(y.device(), concat_forward, stream, inputs, axis, y);
}

void concat_backward(const Stream& stream, const Tensor& dy, int axis, std::span<const std::int64_t> sizes,
                     std::span<Tensor* const> dinputs) {
  DETR_CHECK(axis >= 0 && axis < dy.rank(), "concat: axis ", axis, " of ", dy);
  DETR_CHECK(sizes.size() == dinputs.size(), "concat: ", sizes.size(), " sizes for ", dinputs.size(), " gradients");
  std::int64_t total = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    DETR_CHECK(sizes[i] >= 0, "concat: size must be >= 0, got ", sizes[i]);
    if (dinputs[i]) expect_like(dy, "concat: dinput", dinputs[i], with_size(dy.shape(), axis, sizes[i]));
    total += sizes[i];
  }
  DETR_CHECK(total == dy.dim(axis), "concat: the sizes add up to ", total, " along dimension ", axis, " of dy, which is ", dy);
  DETR_DISPATCH(dy.device(), concat_backward, stream, dy, axis, sizes, dinputs);
}

void gather_rows_forward(const Stream& stream, const Tensor& x, const Tensor& index, const Tensor* valid, Tensor& y) {
  check_gather_rows(x, index, valid, "gather_rows: y", y);
  DETR_DISPATCH(x.device(), gather_rows_forward, stream, x, index, valid, y);
}

void gather_rows_backward(const Stream& stream, const Tensor& dy, const Tensor& index, const Tensor* valid, Tensor* dx) {
  if (!dx) return;
  check_gather_rows(*dx, index, valid, "gather_rows: dy", dy);
  DETR_DISPATCH(dy.device(), gather_rows_backward, stream, dy, index, valid, dx);
}

void embedding_forward(const Stream& stream, const Tensor& table, const Tensor& index, Tensor& y) {
  check_embedding(table, index, "embedding: y", y, table.dtype());
  DETR_DISPATCH(table.device(), embedding_forward, stream, table, index, y);
}

void embedding_backward(const Stream& stream, const Tensor& dy, const Tensor& index, std::int64_t padding_row, Tensor* dtable) {
  if (!dtable) return;
  check_embedding(*dtable, index, "embedding: dy", dy, dy.dtype());
  expect_wide(dy, "embedding: dtable", *dtable, dtable->shape());
  DETR_CHECK(padding_row >= -1 && padding_row < dtable->dim(0), "embedding: padding_row ", padding_row, " of ", *dtable);
  DETR_DISPATCH(dy.device(), embedding_backward, stream, dy, index, padding_row, dtable);
}

}  // namespace detr::kernels

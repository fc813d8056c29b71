#include "kernels/pointwise.h"

#include <algorithm>

#include "kernels/dispatch.h"

namespace detr::kernels {
namespace {

/// Whether `suffix` is the last dimensions of `shape`.
bool is_suffix(const Shape& suffix, std::span<const std::int64_t> shape) {
  const auto dims = suffix.dims();
  return dims.size() <= shape.size() && std::equal(dims.begin(), dims.end(), shape.end() - static_cast<std::ptrdiff_t>(dims.size()));
}

}  // namespace

void add_forward(const Stream& stream, const Tensor& a, const Tensor& b, Tensor& y) {
  DETR_CHECK(is_suffix(b.shape(), a.shape().dims()), "add: the shape of b must be that of a or a suffix of it, got ", a, " and ", b);
  expect_like(a, "add: b", b, b.shape());
  expect_like(a, "add: y", y, a.shape());
  DETR_DISPATCH(a.device(), add_forward, stream, a, b, y);
}

void add_backward(const Stream& stream, const Tensor& dy, Tensor* da, Tensor* db) {
  expect_like(dy, "add: da", da, dy.shape());
  if (db) {
    DETR_CHECK(is_suffix(db->shape(), dy.shape().dims()), "add: the shape of db must be that of dy or a suffix of it, got ", dy, " and ",
               *db);
    expect_like(dy, "add: db", db, db->shape());
  }
  DETR_DISPATCH(dy.device(), add_backward, stream, dy, da, db);
}

void accumulate(const Stream& stream, const Tensor& x, Tensor& into) {
  expect_like(x, "accumulate: into", into, x.shape());
  DETR_DISPATCH(x.device(), accumulate, stream, x, into);
}

void fill(const Stream& stream, double value, Tensor& into) { DETR_DISPATCH(into.device(), fill, stream, value, into); }

void scale(const Stream& stream, const Tensor& x, double factor, Tensor& y) {
  expect_like(x, "scale: y", y, x.shape());
  DETR_DISPATCH(x.device(), scale, stream, x, factor, y);
}

void sum_forward(const Stream& stream, std::span<const Tensor> inputs, Tensor& total) {
  DETR_CHECK(!inputs.empty(), "sum: there must be at least one input");
  for (const Tensor& input : inputs) expect_like(total, "sum: input", input, input.shape());
  expect_like(total, "sum: total", total, {1});
  DETR_DISPATCH(total.device(), sum_forward, stream, inputs, total);
}

void sum_backward(const Stream& stream, const Tensor& dtotal, std::span<Tensor* const> dinputs) {
  expect_like(dtotal, "sum: dtotal", dtotal, {1});
  for (const Tensor* dinput : dinputs)
    if (dinput) expect_like(dtotal, "sum: dinput", dinput, dinput->shape());
  DETR_DISPATCH(dtotal.device(), sum_backward, stream, dtotal, dinputs);
}

void cast(const Stream& stream, const Tensor& x, Tensor& y) {
  DETR_CHECK(x.defined(), "cast: x must be defined");
  expect_tensor(x, "cast: y", y, x.shape(), y.dtype());
  DETR_DISPATCH(x.device(), cast, stream, x, y);
}

void mask_rows(const Stream& stream, const Tensor& x, const Tensor& mask, Tensor& y) {
  DETR_CHECK(x.rank() >= 1 && is_suffix(mask.shape(), x.shape().dims().first(static_cast<std::size_t>(x.rank() - 1))),
             "mask_rows: the shape of mask must be a suffix of x's without the last dimension, got ", x, " and ", mask);
  expect_tensor(x, "mask_rows: mask", mask, mask.shape(), DType::u8);
  expect_like(x, "mask_rows: y", y, x.shape());
  DETR_DISPATCH(x.device(), mask_rows, stream, x, mask, y);
}

void images_to_float(const Stream& stream, const Tensor& images, Tensor& y) {
  DETR_CHECK(images.defined() && images.rank() == 4 && images.dtype() == DType::u8,
             "images_to_float: images must be u8(N, H, W, C), got ", images);
  DETR_CHECK(y.defined() && y.rank() == 4, "images_to_float: y must be (N, h, w, C), got ", y);
  expect_tensor(images, "images_to_float: y", y, {images.dim(0), y.dim(1), y.dim(2), images.dim(3)}, y.dtype());
  DETR_CHECK(y.numel() == 0 || images.numel() > 0, "images_to_float: no pixels to fill ", y, " from ", images);
  DETR_DISPATCH(images.device(), images_to_float, stream, images, y);
}

}  // namespace detr::kernels

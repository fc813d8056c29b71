#pragma once
#include <span>

#include "runtime/stream.h"

namespace detr::kernels {

// All of these are fit for capture and give the same bits on every run. Where no dtype is named, those of Note [Element types] are meant;
// on CUDA the arithmetic is in f32 and each result is rounded once.

/// y = a + b, where b's shape is a's or a suffix of it: (N, T, D) + (T, D) adds the same table to each image.
/// y out, like a. Throws InvalidArgument if shapes, dtypes or devices disagree.
void add_forward(const Stream& stream, const Tensor& a, const Tensor& b, Tensor& y);
/// da = dy; db = dy summed over the leading dimensions that b lacks, in double and in index order; on CUDA in f32, by chunks of rows that
/// depend on the shape alone. Null is not wanted.
void add_backward(const Stream& stream, const Tensor& dy, Tensor* da, Tensor* db);

/// into += x, element by element. The tape's addition of gradients.
void accumulate(const Stream& stream, const Tensor& x, Tensor& into);

/// into = value, rounded to nearest, for every element: f32 or f64, on CUDA bf16 as well. A zero is a memset there.
void fill(const Stream& stream, double value, Tensor& into);

/// y = scale * x, any shape. The factor is rounded to the dtype of the arithmetic.
void scale(const Stream& stream, const Tensor& x, double factor, Tensor& y);

/// total (1) = sum of all elements of all inputs, in double: in order, on CUDA in a fixed one. Meant there for scalars and small tensors: one
/// block, and one launch for 128 inputs.
void sum_forward(const Stream& stream, std::span<const Tensor> inputs, Tensor& total);
/// dinputs[i] = dtotal (1) in every element; null is not wanted.
void sum_backward(const Stream& stream, const Tensor& dtotal, std::span<Tensor* const> dinputs);

/// y = x in another dtype or the same (a copy): from any to f32 or f64, and from f32 to bf16, rounded to nearest. On CUDA to f32 from
/// any, to bf16 from f32 and bf16, to f64 from f32 and bf16.
void cast(const Stream& stream, const Tensor& x, Tensor& y);

/// y = x, bit by bit, with zeros where mask (a suffix of x's shape without the last dimension, u8) is 0: rows of invalid cells.
void mask_rows(const Stream& stream, const Tensor& x, const Tensor& mask, Tensor& y);

/// Pictures for the network: nearest resize, then / 255.
/// images (N, H, W, C) u8; y (N, h, w, C) out: y[n, i, j] = images[n, floor(i H / h), floor(j W / w)] / 255, rounded to nearest (from
/// the quotient in f32 where y is bf16).
void images_to_float(const Stream& stream, const Tensor& images, Tensor& y);

namespace cpu {
extern decltype(kernels::add_forward) add_forward;
extern decltype(kernels::add_backward) add_backward;
extern decltype(kernels::accumulate) accumulate;
extern decltype(kernels::fill) fill;
extern decltype(kernels::scale) scale;
extern decltype(kernels::sum_forward) sum_forward;
extern decltype(kernels::sum_backward) sum_backward;
extern decltype(kernels::cast) cast;
extern decltype(kernels::mask_rows) mask_rows;
extern decltype(kernels::images_to_float) images_to_float;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::add_forward) add_forward;
extern decltype(kernels::add_backward) add_backward;
extern decltype(kernels::accumulate) accumulate;
extern decltype(kernels::fill) fill;
extern decltype(kernels::scale) scale;
extern decltype(kernels::sum_forward) sum_forward;
extern decltype(kernels::sum_backward) sum_backward;
extern decltype(kernels::cast) cast;
extern decltype(kernels::mask_rows) mask_rows;
extern decltype(kernels::images_to_float) images_to_float;
}  // namespace cuda
}  // namespace detr::kernels

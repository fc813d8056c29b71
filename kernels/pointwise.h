#pragma once
#include <span>

#include "runtime/stream.h"

namespace detr::kernels {

/// y = a + b, where b's shape is a's or a suffix of it: (N, T, D) + (T, D) adds the same table to each image.
/// a, b f32 or f64; y out, like a. Throws InvalidArgument if shapes, dtypes or devices disagree.
void add_forward(const Stream& stream, const Tensor& a, const Tensor& b, Tensor& y);
/// da = dy; db = dy summed over the leading dimensions that b lacks, in double, in index order. Null is not wanted.
void add_backward(const Stream& stream, const Tensor& dy, Tensor* da, Tensor* db);

/// into += x, element by element; f32 or f64. The tape's addition of gradients.
void accumulate(const Stream& stream, const Tensor& x, Tensor& into);

/// into = value for every element of an f32 or f64 tensor.
void fill(const Stream& stream, double value, Tensor& into);

/// y = scale * x, any shape, f32 or f64.
void scale(const Stream& stream, const Tensor& x, double factor, Tensor& y);

/// total (1) = sum of all elements of all inputs, in order, in double. f32 or f64.
void sum_forward(const Stream& stream, std::span<const Tensor> inputs, Tensor& total);
/// dinputs[i] = dtotal (1) in every element; null is not wanted.
void sum_backward(const Stream& stream, const Tensor& dtotal, std::span<Tensor* const> dinputs);

/// y = x in another dtype or the same (a copy): from f32, f64, u8 or i64 to f32 or f64, rounded to nearest.
void cast(const Stream& stream, const Tensor& x, Tensor& y);

/// y = x with zeros where mask (a suffix of x's shape without the last dimension, u8) is 0: rows of invalid cells.
void mask_rows(const Stream& stream, const Tensor& x, const Tensor& mask, Tensor& y);

/// Pictures for the network: nearest resize, then / 255.
/// images (N, H, W, C) u8; y (N, h, w, C) out, f32 or f64: y[n, i, j] = images[n, floor(i H / h), floor(j W / w)] / 255.
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
}  // namespace detr::kernels

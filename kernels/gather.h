#pragma once
#include <span>

#include "runtime/stream.h"

namespace detr::kernels {

/// Concatenation along one dimension. inputs: at least one, of equal shapes but for `axis` (>= 0), of one dtype, any; y out. Copies
/// bytes; on CUDA one launch for every eight inputs. Throws InvalidArgument if shapes, dtypes or devices disagree.
void concat_forward(const Stream& stream, std::span<const Tensor> inputs, int axis, Tensor& y);
/// dinputs[i] is the part of dy that came from input i; null is not wanted. `sizes[i]` is input i's size along `axis`.
void concat_backward(const Stream& stream, const Tensor& dy, int axis, std::span<const std::int64_t> sizes,
                     std::span<Tensor* const> dinputs);

/// Rows of each image by index: y[n, q] = x[n, index[n, q]], or zeros where `valid` is given and valid[index[n, q]] is 0.
/// x (N, T, D), see Note [Element types]; index (N, Q) i64 in [0, T); valid (T) u8 or null; y (N, Q, D) out, like x.
/// Throws InvalidArgument if a shape, dtype or device disagrees, and on the CPU for an index out of range; CUDA gives it zeros.
void gather_rows_forward(const Stream& stream, const Tensor& x, const Tensor& index, const Tensor* valid, Tensor& y);
/// dx[n, t] = sum over q with index[n, q] = t (and valid) of dy[n, q], added in the order of q; zero elsewhere. dy and dx like x; the
/// sum is in f32 on CUDA and rounded once. An index out of range adds nothing there.
void gather_rows_backward(const Stream& stream, const Tensor& dy, const Tensor& index, const Tensor* valid, Tensor* dx);

/// Rows of one table: y[r] = table[index[r]]. table (K, D), see Note [Element types]; index any shape, i64 in [0, K); y (index shape, D)
/// out, like the table. Throws InvalidArgument naming an index out of range on the CPU; CUDA gives it zeros.
void embedding_forward(const Stream& stream, const Tensor& table, const Tensor& index, Tensor& y);
/// dy (index shape, D), like y; dtable (K, D) out, wide. Row `padding_row` stays zero (-1: no such row). Sums in the order of the index;
/// on CUDA 32 partial sums in f32, among which a row's entries are dealt out in order: the same bits on every run. There the time
/// grows with K times the number of indices: meant for a few hundred rows.
void embedding_backward(const Stream& stream, const Tensor& dy, const Tensor& index, std::int64_t padding_row, Tensor* dtable);

namespace cpu {
extern decltype(kernels::concat_forward) concat_forward;
extern decltype(kernels::concat_backward) concat_backward;
extern decltype(kernels::gather_rows_forward) gather_rows_forward;
extern decltype(kernels::gather_rows_backward) gather_rows_backward;
extern decltype(kernels::embedding_forward) embedding_forward;
extern decltype(kernels::embedding_backward) embedding_backward;
}  // namespace cpu
namespace cuda {
extern decltype(kernels::concat_forward) concat_forward;
extern decltype(kernels::concat_backward) concat_backward;
extern decltype(kernels::gather_rows_forward) gather_rows_forward;
extern decltype(kernels::gather_rows_backward) gather_rows_backward;
extern decltype(kernels::embedding_forward) embedding_forward;
extern decltype(kernels::embedding_backward) embedding_backward;
}  // namespace cuda
}  // namespace detr::kernels

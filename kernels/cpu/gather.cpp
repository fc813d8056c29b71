#include "kernels/gather.h"

#include <cstddef>

#include "kernels/cpu/blocks.h"
#include "kernels/dispatch.h"

namespace detr::kernels::cpu {
namespace {

/// A tensor as rows of bytes: one for each index before `axis`, each with all that lies behind such an index.
struct ByteRows {
  std::int64_t count = 1;
  std::int64_t unit = 1;   ///< bytes of one step along the axis

  ByteRows(const Tensor& tensor, int axis) : unit(size_of(tensor.dtype())) {
    for (int i = 0; i < axis; ++i) count *= tensor.dim(i);
    for (int i = axis + 1; i < tensor.rank(); ++i) unit *= tensor.dim(i);
  }
};

void check_index(const char* op, std::int64_t index, std::int64_t count) {
  DETR_CHECK(index >= 0 && index < count, op, ": index ", index, " of ", count, " rows");
}

}  // namespace

void concat_forward(const Stream& stream, std::span<const Tensor> inputs, int axis, Tensor& y) {
  const ByteRows rows(y, axis);
  const std::int64_t width = y.dim(axis) * rows.unit;
  std::int64_t offset = 0;
  for (const Tensor& input : inputs) {
    const std::int64_t part = input.dim(axis) * rows.unit;
    const auto* from = static_cast<const std::byte*>(input.raw());
    auto* to = static_cast<std::byte*>(y.raw());
    stream.parallel_blocks(rows.count, rows_per_block(part / 4), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) std::copy_n(from + r * part, part, to + r * width + offset);
    });
    offset += part;
  }
}

void concat_backward(const Stream& stream, const Tensor& dy, int axis, std::span<const std::int64_t> sizes,
                     std::span<Tensor* const> dinputs) {
  const ByteRows rows(dy, axis);
  const std::int64_t width = dy.dim(axis) * rows.unit;
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::int64_t part = sizes[i] * rows.unit;
    if (dinputs[i]) {
      const auto* from = static_cast<const std::byte*>(dy.raw());
      auto* to = static_cast<std::byte*>(dinputs[i]->raw());
      stream.parallel_blocks(rows.count, rows_per_block(part / 4), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) std::copy_n(from + r * width + offset, part, to + r * part);
      });
    }
    offset += part;
  }
}

void gather_rows_forward(const Stream& stream, const Tensor& x, const Tensor& index, const Tensor* valid, Tensor& y) {
  dispatch_float("gather_rows", x.dtype(), [&](auto tag) {
    using V = typename decltype(tag)::type;
    const std::int64_t T = x.dim(1), D = x.dim(2), Q = index.dim(1);
    const V* px = x.data<V>();
    V* py = y.data<V>();
    const std::int64_t* rows = index.data<std::int64_t>();
    const std::uint8_t* keep = valid ? valid->data<std::uint8_t>() : nullptr;
    stream.parallel_blocks(x.dim(0) * Q, rows_per_block(D), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        check_index("gather_rows", rows[r], T);
        if (keep && !keep[rows[r]]) std::fill_n(py + r * D, D, V(0));
        else std::copy_n(px + (r / Q * T + rows[r]) * D, D, py + r * D);
      }
    });
  });
}

void gather_rows_backward(const Stream& stream, const Tensor& dy, const Tensor& index, const Tensor* valid, Tensor* dx) {
  dispatch_float("gather_rows", dy.dtype(), [&](auto tag) {
    using V = typename decltype(tag)::type;
    const std::int64_t T = dx->dim(1), D = dx->dim(2), Q = index.dim(1);
    const V* pdy = dy.data<V>();
    V* pdx = dx->data<V>();
    const std::int64_t* rows = index.data<std::int64_t>();
    const std::uint8_t* keep = valid ? valid->data<std::uint8_t>() : nullptr;
    // An image a task: its rows may meet in one row of dx.
    stream.parallel_blocks(dx->dim(0), 1, [&](std::int64_t n, std::int64_t) {
      V* image = pdx + n * T * D;
      std::fill_n(image, T * D, V(0));
      for (std::int64_t r = n * Q; r < (n + 1) * Q; ++r) {
        check_index("gather_rows", rows[r], T);
        if (keep && !keep[rows[r]]) continue;
        V* to = image + rows[r] * D;
#pragma GCC ivdep
        for (std::int64_t d = 0; d < D; ++d) to[d] += pdy[r * D + d];
      }
    });
  });
}

void embedding_forward(const Stream& stream, const Tensor& table, const Tensor& index, Tensor& y) {
  dispatch_float("embedding", table.dtype(), [&](auto tag) {
    using V = typename decltype(tag)::type;
    const std::int64_t K = table.dim(0), D = table.dim(1);
    const V* from = table.data<V>();
    V* to = y.data<V>();
    const std::int64_t* rows = index.data<std::int64_t>();
    stream.parallel_blocks(index.numel(), rows_per_block(D), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        check_index("embedding", rows[r], K);
        std::copy_n(from + rows[r] * D, D, to + r * D);
      }
    });
  });
}

void embedding_backward(const Stream& stream, const Tensor& dy, const Tensor& index, std::int64_t padding_row, Tensor* dtable) {
  dispatch_float("embedding", dy.dtype(), [&](auto tag) {
    using V = typename decltype(tag)::type;
    const std::int64_t K = dtable->dim(0), D = dtable->dim(1), R = index.numel();
    const V* pdy = dy.data<V>();
    V* sums = dtable->data<V>();
    const std::int64_t* rows = index.data<std::int64_t>();
    // A range of columns a task: each goes through all indices in order.
    stream.parallel_blocks(D, 64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t k = 0; k < K; ++k) std::fill(sums + k * D + begin, sums + k * D + end, V(0));
      for (std::int64_t r = 0; r < R; ++r) {
        check_index("embedding", rows[r], K);
        if (rows[r] == padding_row) continue;
        V* to = sums + rows[r] * D;
#pragma GCC ivdep
        for (std::int64_t d = begin; d < end; ++d) to[d] += pdy[r * D + d];
      }
    });
  });
}

}  // namespace detr::kernels::cpu

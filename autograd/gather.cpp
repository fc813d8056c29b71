#include "autograd/gather.h"

#include <vector>

#include "kernels/gather.h"
#include "runtime/error.h"

namespace detr {

Variable gather_rows(Context& ctx, const Variable& x, const Tensor& index, const Tensor& valid) {
  DETR_CHECK(x.shape().rank() == 3 && index.rank() == 2, "gather_rows: x must be (N, T, D) and index (N, Q), got ", x.value(), " and ", index);
  Tensor y = ctx.empty({x.dim(0), index.dim(1), x.dim(2)}, x.value().dtype());
  kernels::gather_rows_forward(ctx.stream(), x.value(), index, valid.defined() ? &valid : nullptr, y);
  return ctx.record("gather_rows", {x}, y, [index, valid](Context& c, const Tensor& dy, Wanted want) {
    kernels::gather_rows_backward(c.stream(), dy, index, valid.defined() ? &valid : nullptr, want[0]);
  });
}

Variable embedding(Context& ctx, const Variable& table, const Tensor& index, std::int64_t padding_row) {
  std::vector<std::int64_t> dims(index.shape().dims().begin(), index.shape().dims().end());
  dims.push_back(table.dim(-1));
  Tensor y = ctx.empty(Shape(dims), table.value().dtype());
  kernels::embedding_forward(ctx.stream(), table.value(), index, y);
  return ctx.record("embedding", {table}, y, [index, padding_row](Context& c, const Tensor& dy, Wanted want) {
    kernels::embedding_backward(c.stream(), dy, index, padding_row, want[0]);
  });
}

}  // namespace detr

#include "models/detr/postprocess.h"

#include <algorithm>

#include "kernels/activation.h"
#include "kernels/pointwise.h"
#include "kernels/topk.h"
#include "runtime/error.h"
#include "runtime/host_value.h"

namespace detr::models {

std::vector<std::vector<ScoredBox>> postprocess(const Stream& stream, const Tensor& logits, const Tensor& boxes, const std::vector<std::int64_t>& widths,
                                                const std::vector<std::int64_t>& heights, std::int64_t top) {
  const std::int64_t n = logits.dim(0), q = logits.dim(1), c = logits.dim(2);
  DETR_CHECK(static_cast<std::int64_t>(widths.size()) == n && static_cast<std::int64_t>(heights.size()) == n, "postprocess: sizes of ", widths.size(), " pictures for ", n);
  const std::int64_t k = std::min(top, q * c);
  // Scores in f32 at least: in bf16 many would be equal.
  const DType wide = wide_dtype(logits.dtype());
  Tensor probabilities = stream.empty(logits.shape(), wide);
  kernels::cast(stream, logits, probabilities);
  kernels::activation_forward(stream, probabilities, kernels::Activation::sigmoid, probabilities);
  Tensor top_scores = stream.empty({n, k}, wide), top_indices = stream.empty({n, k}, DType::i64);
  kernels::topk(stream, probabilities.reshape({n, q * c}), top_scores, top_indices);
  const Tensor scores = stream.to_host(top_scores), indices = stream.to_host(top_indices), shown = stream.to_host(boxes);

  std::vector<std::vector<ScoredBox>> result(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    const auto w = static_cast<double>(widths[static_cast<std::size_t>(i)]), h = static_cast<double>(heights[static_cast<std::size_t>(i)]);
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int64_t index = indices.data<std::int64_t>()[i * k + j];
      double b[4];
      for (std::int64_t side = 0; side < 4; ++side) b[side] = host_value(shown, (i * q + index / c) * 4 + side);
      result[static_cast<std::size_t>(i)].push_back({index % c, host_value(scores, i * k + j),
                                                     {(b[0] - b[2] / 2) * w, (b[1] - b[3] / 2) * h, (b[0] + b[2] / 2) * w, (b[1] + b[3] / 2) * h}});
    }
  }
  return result;
}

}  // namespace detr::models

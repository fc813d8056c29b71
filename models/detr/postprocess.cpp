#include "models/detr/postprocess.h"

#include <algorithm>

#include "kernels/activation.h"
#include "kernels/pointwise.h"
#include "kernels/topk.h"
#include "runtime/error.h"

namespace detr::models {

std::vector<std::vector<ScoredBox>> postprocess(const Stream& stream, const Tensor& logits, const Tensor& boxes, const std::vector<std::int64_t>& widths,
                                                const std::vector<std::int64_t>& heights, std::int64_t top) {
  const std::int64_t n = logits.dim(0), q = logits.dim(1), c = logits.dim(2);
  DETR_CHECK(static_cast<std::int64_t>(widths.size()) == n && static_cast<std::int64_t>(heights.size()) == n, "postprocess: sizes of ", widths.size(), " pictures for ", n);
  const std::int64_t k = std::min(top, q * c);
  Tensor probabilities = stream.empty_like(logits);
  kernels::activation_forward(stream, logits, kernels::Activation::sigmoid, probabilities);
  Tensor values = stream.empty({n, k}, logits.dtype()), indices = stream.empty({n, k}, DType::i64);
  kernels::topk(stream, probabilities.reshape({n, q * c}), values, indices);
  Tensor scores = stream.empty({n, k}, DType::f64), wide = stream.empty(boxes.shape(), DType::f64);
  kernels::cast(stream, values, scores);
  kernels::cast(stream, boxes, wide);

  std::vector<std::vector<ScoredBox>> result(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    const auto w = static_cast<double>(widths[static_cast<std::size_t>(i)]), h = static_cast<double>(heights[static_cast<std::size_t>(i)]);
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int64_t index = indices.data<std::int64_t>()[i * k + j];
      const double* b = wide.data<double>() + (i * q + index / c) * 4;
      result[static_cast<std::size_t>(i)].push_back({index % c, scores.data<double>()[i * k + j],
                                                     {(b[0] - b[2] / 2) * w, (b[1] - b[3] / 2) * h, (b[0] + b[2] / 2) * w, (b[1] + b[3] / 2) * h}});
    }
  }
  return result;
}

}  // namespace detr::models

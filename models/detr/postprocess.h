#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "runtime/stream.h"

namespace detr::models {

/// One detection: dense label, score in (0, 1), box (x0, y0, x1, y1) in pixels of the original picture, not clipped.
struct ScoredBox {
  std::int64_t label = 0;
  double score = 0;
  std::array<double, 4> xyxy_px{};
};

/// Top detections of each picture: scores sigmoid(logits) over all (query, class) pairs, the `top` best in descending order; one
/// query may appear with several labels. logits (N, Q, C), boxes (N, Q, 4) (cx, cy, w, h); widths, heights (N) of the originals.
std::vector<std::vector<ScoredBox>> postprocess(const Stream& stream, const Tensor& logits, const Tensor& boxes, const std::vector<std::int64_t>& widths,
                                                const std::vector<std::int64_t>& heights, std::int64_t top = 300);

}  // namespace detr::models

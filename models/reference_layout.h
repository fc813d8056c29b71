#pragma once
#include "runtime/shape.h"

namespace detr::models {

/// The reference stores maps as (N, C, H, W) and convolution weights as (out, in, kh, kw); ours are (N, H, W, C) and
/// (out, kh, kw, in), the same permutation. Tensors of other ranks are alike in both.

/// Shape in the reference's layout of a tensor of ours.
inline Shape reference_shape(const Shape& shape) { return shape.rank() == 4 ? Shape{shape[0], shape[3], shape[1], shape[2]} : shape; }

/// Row-major index in the reference's layout of element i of a tensor of ours.
inline std::int64_t reference_index(const Shape& shape, std::int64_t i) {
  if (shape.rank() != 4) return i;
  const std::int64_t h = shape[1], w = shape[2], c = shape[3];
  const std::int64_t channel = i % c, x = i / c % w, y = i / c / w % h, n = i / c / w / h;
  return ((n * c + channel) * h + y) * w + x;
}

}  // namespace detr::models

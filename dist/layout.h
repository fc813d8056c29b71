#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/dtype.h"
#include "runtime/shape.h"

namespace detr::dist {

/// A trainable parameter, as far as its gradient goes.
struct ParameterSpec {
  std::string name;
  DType dtype = DType::f32;   ///< of the gradient
  Shape shape;
};

/// A bucket is closed once it holds this many bytes. The first is small, so that the first sum starts early.
struct BucketCaps {
  std::int64_t first_bytes = std::int64_t{1} << 20;
  std::int64_t bytes = std::int64_t{25} << 20;
};

/// Elements [begin, end) of the gradient buffer and the parameters that lie there, in the buffer's order.
struct Bucket {
  std::int64_t begin = 0, end = 0;
  std::vector<int> parameters;
};

/// Where each gradient lies in the flat buffer, and which slices are summed as one.
struct Layout {
  DType dtype = DType::f32;
  std::vector<ParameterSpec> parameters;   ///< in the buffer's order
  std::vector<std::int64_t> offsets;       ///< first element, by parameter
  std::vector<int> bucket_of;              ///< by parameter
  std::vector<Bucket> buckets;             ///< together the whole buffer, without gaps
  std::int64_t total = 0;                  ///< elements of the buffer
};

/// A pure function of its arguments: lays the parameters out in the order given (roughly that in which backward makes their gradients:
/// reverse order of registration), each from a multiple of 256 bytes on, whole, and closes a bucket once it has reached its cap.
/// Throws InvalidArgument if names repeat, dtypes differ or are not f32, f64 or bf16, or a cap is not positive.
Layout make_layout(std::vector<ParameterSpec> parameters, const BucketCaps& caps = {});

}  // namespace detr::dist

#pragma once
#include <map>
#include <vector>

#include "kernels/conv2d.h"
#include "kernels/cuda/cudnn_graph.h"

namespace detr::kernels::cuda {

enum class ConvPass { forward, data_gradient, weight_gradient };

/// All that fixes a convolution's plan.
struct ConvKey {
  ConvPass pass;
  DType dtype;
  std::vector<std::int64_t> x, weight;   ///< shapes (N, H, W, I), (O, kh, kw, I)
  std::int64_t stride, padding;
  bool add = false;                      ///< of a data gradient: to what dx holds
  auto operator<=>(const ConvKey&) const = default;
};

inline constexpr std::int64_t kConvX = 1, kConvWeight = 2, kConvY = 3;   // names of the tensors (or their gradients) in a plan
inline constexpr std::int64_t kConvWorkspaceLimit = std::int64_t{1} << 30;

/// A convolution as cuDNN's graph of one operation, with what it refers to. All tensors are of the key's dtype.
struct ConvOperation {
  CudnnDescriptor geometry, x, weight, y, operation;
  /// The result goes to `result` where that is given, else to y (dx, dweight).
  explicit ConvOperation(const ConvKey& key, const CudnnDescriptor* result = nullptr);
};

/// The library's handle on a stream and the plans made so far.
struct Convolutions {
  explicit Convolutions(const Stream& stream) : cudnn(stream) {}
  /// Null where no engine serves the key.
  const CudnnPlan* plan(const ConvKey& key);

  Cudnn cudnn;
  std::map<ConvKey, std::optional<CudnnPlan>> plans;
};

}  // namespace detr::kernels::cuda

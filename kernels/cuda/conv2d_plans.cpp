#include "kernels/cuda/conv2d_plans.h"

namespace detr::kernels::cuda {

ConvOperation::ConvOperation(const ConvKey& key, const CudnnDescriptor* result) : geometry(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR) {
  const Shape map{std::span<const std::int64_t>(key.x)}, filter{std::span<const std::int64_t>(key.weight)};
  const std::int64_t dims = 2;
  const std::array<std::int64_t, 2> padding = {key.padding, key.padding}, stride = {key.stride, key.stride}, dilation = {1, 1};
  const auto pair = [](const std::array<std::int64_t, 2>& values) { return std::span<const std::int64_t>(values); };
  geometry.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, dims)
      .set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT)
      .set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, CUDNN_CROSS_CORRELATION)
      .set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, pair(padding))
      .set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, pair(padding))
      .set(CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, pair(dilation))
      .set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, pair(stride))
      .finalize();
  x = cudnn_tensor(kConvX, key.dtype, map);
  y = cudnn_tensor(kConvY, key.dtype, conv2d_shape(map, filter, {key.stride, key.padding}));
  weight = cudnn_tensor(kConvWeight, key.dtype, filter);

  const float one = 1, zero = 0, kept = key.add ? 1 : 0;
  switch (key.pass) {
    case ConvPass::forward:
      operation = CudnnDescriptor(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, x).set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, weight);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, result ? *result : y).set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, geometry);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_TYPE_FLOAT, one).set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, CUDNN_TYPE_FLOAT, zero);
      break;
    case ConvPass::data_gradient:
      operation = CudnnDescriptor(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, result ? *result : x).set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, weight);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY, y).set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, geometry);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA, CUDNN_TYPE_FLOAT, one).set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA, CUDNN_TYPE_FLOAT, kept);
      break;
    case ConvPass::weight_gradient:
      operation = CudnnDescriptor(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, x).set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, result ? *result : weight);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, y).set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, geometry);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, CUDNN_TYPE_FLOAT, one).set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA, CUDNN_TYPE_FLOAT, zero);
      break;
  }
  operation.finalize();
}

const CudnnPlan* Convolutions::plan(const ConvKey& key) {
  const auto [found, is_new] = plans.try_emplace(key);
  std::optional<CudnnPlan>& plan = found->second;
  if (is_new) {
    const ConvOperation operation(key);
    const cudnnBackendDescriptor_t operations[] = {operation.operation.get()};
    for (const CudnnDescriptor& config : cudnn.configs(operations, key.dtype == DType::bf16)) {
      plan = cudnn.plan(config);
      if (plan && plan->workspace_bytes <= kConvWorkspaceLimit) break;
      plan.reset();
    }
  }
  return plan ? &*plan : nullptr;
}

}  // namespace detr::kernels::cuda

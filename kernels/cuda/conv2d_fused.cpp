#include "kernels/cuda/conv2d_fused.h"

#include <map>
#include <vector>

#include "kernels/cuda/channels.h"
#include "kernels/cuda/conv2d_plans.h"
#include "runtime/cuda/stream_state.h"

namespace detr::kernels::cuda {
namespace {

constexpr std::int64_t kShift = 4, kResidual = 5, kProduct = 10, kShifted = 11, kSum = 12;   // names of tensors; the last three have no memory

struct FusedKey {
  ConvKey convolution;
  bool with_residual, relu;
  auto operator<=>(const FusedKey&) const = default;
};

struct FusedConvolutions {
  explicit FusedConvolutions(const Stream& stream) : cudnn(stream) {}
  const CudnnPlan* plan(const FusedKey& key);

  Cudnn cudnn;
  std::map<FusedKey, std::optional<CudnnPlan>> plans;
};

/// y = mode(a, b), or mode(a) without b, in f32.
CudnnDescriptor pointwise(cudnnPointwiseMode_t mode, const CudnnDescriptor& a, const CudnnDescriptor* b, const CudnnDescriptor& y) {
  CudnnDescriptor kind(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  kind.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode).set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  // By its default the library's ReLU makes 0 of NaN, and a NaN weight would not be seen. No engine does this for a graph: no plan, and
  // the caller takes the convolution by itself.
  if (mode == CUDNN_POINTWISE_RELU_FWD) kind.set(CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, CUDNN_TYPE_NAN_PROPOGATION, CUDNN_PROPAGATE_NAN);
  kind.finalize();
  CudnnDescriptor operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind).set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, a).set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
  if (b) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *b);
  operation.finalize();
  return operation;
}

const CudnnPlan* FusedConvolutions::plan(const FusedKey& key) {
  const auto [found, is_new] = plans.try_emplace(key);
  std::optional<CudnnPlan>& plan = found->second;
  if (!is_new) return plan ? &*plan : nullptr;

  const ConvKey& c = key.convolution;
  const Shape y_shape = conv2d_shape(Shape(std::span<const std::int64_t>(c.x)), Shape(std::span<const std::int64_t>(c.weight)), {c.stride, c.padding});
  const CudnnDescriptor shift = cudnn_tensor(kShift, DType::f32, {1, 1, 1, y_shape[3]}), residual = cudnn_tensor(kResidual, c.dtype, y_shape);
  const CudnnDescriptor product = cudnn_virtual_tensor(kProduct, y_shape), shifted = cudnn_virtual_tensor(kShifted, y_shape), sum = cudnn_virtual_tensor(kSum, y_shape);
  const ConvOperation convolution(c, &product);
  std::vector<CudnnDescriptor> chain;
  const bool ends_shifted = !key.with_residual && !key.relu;
  chain.push_back(pointwise(CUDNN_POINTWISE_ADD, product, &shift, ends_shifted ? convolution.y : shifted));
  if (key.with_residual) chain.push_back(pointwise(CUDNN_POINTWISE_ADD, shifted, &residual, key.relu ? sum : convolution.y));
  if (key.relu) chain.push_back(pointwise(CUDNN_POINTWISE_RELU_FWD, key.with_residual ? sum : shifted, nullptr, convolution.y));
  std::vector<cudnnBackendDescriptor_t> operations = {convolution.operation.get()};
  for (const CudnnDescriptor& operation : chain) operations.push_back(operation.get());
  for (const CudnnDescriptor& config : cudnn.configs(operations, c.dtype == DType::bf16)) {
    plan = cudnn.plan(config);
    if (plan && plan->workspace_bytes <= kConvWorkspaceLimit) break;
    plan.reset();
  }
  return plan ? &*plan : nullptr;
}

}  // namespace

bool try_fused_forward(const Stream& stream, const Tensor& map, const Tensor& filter, const Tensor& shift, const Tensor* residual, Activation activation,
                       const Conv2dOptions& options, const Tensor& y) {
  if (map.dtype() != DType::bf16 || filter.dim(0) % 8 != 0) return false;
  const std::int64_t channels = in_eights(map.dim(3));
  const auto list = [&](const Shape& shape) { return std::vector<std::int64_t>{shape[0], shape[1], shape[2], channels}; };
  auto& fused = stream.cuda_state().get<FusedConvolutions>(stream);
  const CudnnPlan* plan = fused.plan({{ConvPass::forward, map.dtype(), list(map.shape()), list(filter.shape()), options.stride, options.padding}, residual != nullptr,
                                      activation == Activation::relu});
  if (!plan) return false;
  const Tensor x = widened(stream, map, channels), weight = widened(stream, filter, channels);
  std::vector<std::int64_t> ids = {kConvX, kConvWeight, kConvY, kShift};
  std::vector<void*> tensors = {x.raw(), weight.raw(), y.raw(), shift.raw()};
  if (residual) {
    ids.push_back(kResidual);
    tensors.push_back(residual->raw());
  }
  run_plan(stream, fused.cudnn, *plan, ids, tensors);
  return true;
}

}  // namespace detr::kernels::cuda

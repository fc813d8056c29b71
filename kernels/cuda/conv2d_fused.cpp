#include "kernels/cuda/conv2d_fused.h"

#include <algorithm>
#include <map>
#include <vector>

#include "kernels/cuda/channels.h"
#include "kernels/cuda/conv2d_plans.h"
#include "runtime/cuda/stream_state.h"

namespace detr::kernels::cuda {
namespace {

constexpr std::int64_t kShift = 4, kAddend = 5, kReluOutput = 6, kProduct = 10, kShifted = 11, kSum = 12;   // names of tensors; the last three have no memory

/// The library's heuristic puts this engine first for the stem's second layer (3 x 3, 32 channels), where the one behind it takes half the time.
constexpr std::int64_t kSlowEngine = 7;

struct FusedKey {
  ConvKey convolution;
  bool with_addend, relu;   // a data gradient goes back through the ReLU that made x
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

/// dx = y <= 0 ? 0 : dy for the output y of a ReLU, in f32.
CudnnDescriptor relu_backward(const CudnnDescriptor& dy, const CudnnDescriptor& y, const CudnnDescriptor& dx) {
  CudnnDescriptor kind(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  kind.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, CUDNN_POINTWISE_RELU_BWD).set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
  kind.finalize();
  CudnnDescriptor operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind).set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, y);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_DYDESC, dy).set(CUDNN_ATTR_OPERATION_POINTWISE_DXDESC, dx).finalize();
  return operation;
}

const CudnnPlan* FusedConvolutions::plan(const FusedKey& key) {
  const auto [found, is_new] = plans.try_emplace(key);
  std::optional<CudnnPlan>& plan = found->second;
  if (!is_new) return plan ? &*plan : nullptr;

  const ConvKey& c = key.convolution;
  const Shape x_shape{std::span<const std::int64_t>(c.x)}, y_shape = conv2d_shape(x_shape, Shape(std::span<const std::int64_t>(c.weight)), {c.stride, c.padding});
  const bool forward = c.pass == ConvPass::forward;
  const Shape& shape = forward ? y_shape : x_shape;
  const CudnnDescriptor shift = cudnn_tensor(kShift, DType::f32, {1, 1, 1, y_shape[3]}), addend = cudnn_tensor(kAddend, c.dtype, shape);
  const CudnnDescriptor product = cudnn_virtual_tensor(kProduct, shape), shifted = cudnn_virtual_tensor(kShifted, shape), sum = cudnn_virtual_tensor(kSum, shape);
  const ConvOperation convolution(c, &product);
  std::vector<CudnnDescriptor> chain;
  if (forward) {
    const bool ends_shifted = !key.with_addend && !key.relu;
    chain.push_back(pointwise(CUDNN_POINTWISE_ADD, product, &shift, ends_shifted ? convolution.y : shifted));
    if (key.with_addend) chain.push_back(pointwise(CUDNN_POINTWISE_ADD, shifted, &addend, key.relu ? sum : convolution.y));
    if (key.relu) chain.push_back(pointwise(CUDNN_POINTWISE_RELU_FWD, key.with_addend ? sum : shifted, nullptr, convolution.y));
  } else {
    if (key.with_addend) chain.push_back(pointwise(CUDNN_POINTWISE_ADD, product, &addend, sum));
    chain.push_back(relu_backward(key.with_addend ? sum : product, cudnn_tensor(kReluOutput, c.dtype, shape), convolution.x));
  }
  std::vector<cudnnBackendDescriptor_t> operations = {convolution.operation.get()};
  for (const CudnnDescriptor& operation : chain) operations.push_back(operation.get());
  std::vector<CudnnDescriptor> configs = cudnn.configs(operations, c.dtype == DType::bf16);
  std::ranges::stable_partition(configs, [](const CudnnDescriptor& config) { return engine_index(config) != kSlowEngine; });
  for (const CudnnDescriptor& config : configs) {
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
    ids.push_back(kAddend);
    tensors.push_back(residual->raw());
  }
  run_plan(stream, fused.cudnn, *plan, ids, tensors);
  return true;
}

bool try_fused_data_gradient(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, bool adds, const Conv2dOptions& options, const Tensor& dx) {
  // With strides the library's one engine takes longer than its plain convolution and a pass.
  if (x.dtype() != DType::bf16 || !channels_fit(x, weight) || options.stride != 1 || dy.numel() == 0) return false;
  const auto list = [](const Shape& shape) { return std::vector<std::int64_t>(shape.dims().begin(), shape.dims().end()); };
  auto& fused = stream.cuda_state().get<FusedConvolutions>(stream);
  const CudnnPlan* plan = fused.plan({{ConvPass::data_gradient, x.dtype(), list(x.shape()), list(weight.shape()), options.stride, options.padding}, adds, true});
  if (!plan) return false;
  std::vector<std::int64_t> ids = {kConvX, kConvWeight, kConvY, kReluOutput};
  std::vector<void*> tensors = {dx.raw(), weight.raw(), dy.raw(), x.raw()};
  if (adds) {   // in place, which was seen to give the bits of one into other memory for each engine of R50's layers
    ids.push_back(kAddend);
    tensors.push_back(dx.raw());
  }
  run_plan(stream, fused.cudnn, *plan, ids, tensors);
  return true;
}

}  // namespace detr::kernels::cuda

#include "kernels/conv2d.h"

#include <map>
#include <vector>

#include "kernels/cuda/channels.h"
#include "kernels/cuda/cudnn_graph.h"
#include "runtime/cuda/stream_state.h"

namespace detr::kernels::cuda {
namespace {

enum class Pass { forward, data_gradient, weight_gradient };

/// All that fixes a plan.
struct Key {
  Pass pass;
  DType dtype;
  std::vector<std::int64_t> x, weight;
  std::int64_t stride, padding;
  auto operator<=>(const Key&) const = default;
};

constexpr std::int64_t kX = 1, kWeight = 2, kY = 3;   // names of the tensors in a plan
constexpr std::int64_t kWorkspaceLimit = std::int64_t{1} << 30;

/// The library's handle and the plans made so far.
struct Convolutions {
  explicit Convolutions(const Stream& stream) : cudnn(stream) {}

  const CudnnPlan& plan(Pass pass, DType dtype, const Shape& x, const Shape& weight, const Conv2dOptions& options);

  Cudnn cudnn;
  std::map<Key, CudnnPlan> plans;
};

const CudnnPlan& Convolutions::plan(Pass pass, DType dtype, const Shape& x, const Shape& weight, const Conv2dOptions& options) {
  const auto list = [](const Shape& shape) { return std::vector<std::int64_t>(shape.dims().begin(), shape.dims().end()); };
  const Key key{pass, dtype, list(x), list(weight), options.stride, options.padding};
  if (const auto found = plans.find(key); found != plans.end()) return found->second;

  CudnnDescriptor geometry(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
  const std::int64_t dims = 2;
  const std::array<std::int64_t, 2> padding = {options.padding, options.padding}, stride = {options.stride, options.stride}, dilation = {1, 1};
  const auto pair = [](const std::array<std::int64_t, 2>& values) { return std::span<const std::int64_t>(values); };
  geometry.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, dims)
      .set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT)
      .set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, CUDNN_CROSS_CORRELATION)
      .set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, pair(padding))
      .set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, pair(padding))
      .set(CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, pair(dilation))
      .set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, pair(stride))
      .finalize();
  const CudnnDescriptor map = cudnn_tensor(kX, dtype, x), output = cudnn_tensor(kY, dtype, conv2d_shape(x, weight, options));
  const CudnnDescriptor filter = cudnn_tensor(kWeight, pass == Pass::weight_gradient ? wide_dtype(dtype) : dtype, weight);

  const float one = 1, zero = 0;
  CudnnDescriptor operation;
  switch (pass) {
    case Pass::forward:
      operation = CudnnDescriptor(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, map).set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, filter);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, output).set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, geometry);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, CUDNN_TYPE_FLOAT, one).set(CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, CUDNN_TYPE_FLOAT, zero);
      break;
    case Pass::data_gradient:
      operation = CudnnDescriptor(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, map).set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, filter);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY, output).set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC, geometry);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA, CUDNN_TYPE_FLOAT, one).set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA, CUDNN_TYPE_FLOAT, zero);
      break;
    case Pass::weight_gradient:
      operation = CudnnDescriptor(CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, map).set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, filter);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, output).set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, geometry);
      operation.set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, CUDNN_TYPE_FLOAT, one).set(CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA, CUDNN_TYPE_FLOAT, zero);
      break;
  }
  operation.finalize();
  const cudnnBackendDescriptor_t operations[] = {operation.get()};
  const std::string what = concat("conv2d ", x, " with ", weight, ", stride ", options.stride, ", padding ", options.padding, ", pass ", static_cast<int>(pass), ", ", dtype);
  return plans.emplace(key, cudnn.plan(operations, dtype == DType::bf16, kWorkspaceLimit, what)).first->second;
}

/// x, weight and y are the tensors or their gradients, as the pass has it.
void run(const Stream& stream, Pass pass, const Conv2dOptions& options, const Tensor& x, const Tensor& weight, const Tensor& y) {
  auto& convolutions = stream.cuda_state().get<Convolutions>(stream);
  const CudnnPlan& plan = convolutions.plan(pass, y.dtype(), x.shape(), weight.shape(), options);
  const std::int64_t ids[] = {kX, kWeight, kY};
  void* const tensors[] = {x.raw(), weight.raw(), y.raw()};
  run_plan(stream, convolutions.cudnn, plan, ids, tensors);
}

// Note [Channels in eights]
// cuDNN's bf16 engines want channels in multiples of 8, and some passes have no other. Where a layer has others (the pictures' 3),
// its tensors are copied with channels of zeros beside them, which add nothing to any sum, and results are cut.

std::int64_t in_eights(std::int64_t channels) { return (channels + 7) / 8 * 8; }

bool fits(const Tensor& x, const Tensor& weight) { return x.dtype() != DType::bf16 || (weight.dim(0) % 8 == 0 && weight.dim(3) % 8 == 0); }

Shape with_channels(const Shape& shape, std::int64_t channels) { return {shape[0], shape[1], shape[2], channels}; }

Tensor widened(const Stream& stream, const Tensor& x, std::int64_t channels) {
  if (x.dim(3) == channels) return x;
  Tensor y = stream.empty(with_channels(x.shape(), channels), x.dtype());
  copy_channels(stream, x, y);
  return y;
}

/// A weight (O, kh, kw, I) with both numbers of channels in eights.
Tensor widened_weight(const Stream& stream, const Tensor& weight) {
  const Tensor rows = widened(stream, weight, in_eights(weight.dim(3)));
  if (weight.dim(0) % 8 == 0) return rows;
  Tensor y = stream.zeros({in_eights(weight.dim(0)), rows.dim(1), rows.dim(2), rows.dim(3)}, weight.dtype());
  Tensor real = y.slice(0, weight.dim(0));
  stream.copy(rows, real);
  return y;
}

}  // namespace

void conv2d_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Conv2dOptions& options, Tensor& y) {
  if (y.numel() == 0) return;
  DETR_CHECK(x.numel() > 0, "conv2d: no input channels on CUDA: ", x);
  if (fits(x, weight)) return run(stream, Pass::forward, options, x, weight, y);
  Tensor wide_y = y.dim(3) % 8 == 0 ? y : stream.empty(with_channels(y.shape(), in_eights(y.dim(3))), y.dtype());
  run(stream, Pass::forward, options, widened(stream, x, in_eights(x.dim(3))), widened_weight(stream, weight), wide_y);
  if (wide_y.raw() != y.raw()) copy_channels(stream, wide_y, y);
}

void conv2d_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Conv2dOptions& options,
                     Tensor* dx, Tensor* dweight) {
  const bool empty = dy.numel() == 0 || x.numel() == 0;
  for (Tensor* gradient : {dx, dweight}) {
    if (empty && gradient && gradient->bytes()) DETR_TRY(cudaMemsetAsync(gradient->raw(), 0, static_cast<std::size_t>(gradient->bytes()), detr::cuda::native(stream)));
  }
  if (empty) return;
  if (fits(x, weight)) {
    if (dx) run(stream, Pass::data_gradient, options, *dx, weight, dy);
    if (dweight) run(stream, Pass::weight_gradient, options, x, *dweight, dy);
    return;
  }
  const std::int64_t in = in_eights(x.dim(3)), out = in_eights(dy.dim(3));
  const Tensor wide_dy = widened(stream, dy, out);
  if (dx) {
    Tensor wide_dx = stream.empty(with_channels(x.shape(), in), x.dtype());
    run(stream, Pass::data_gradient, options, wide_dx, widened_weight(stream, weight), wide_dy);
    copy_channels(stream, wide_dx, *dx);
  }
  if (dweight) {
    Tensor wide_dweight = stream.empty({out, weight.dim(1), weight.dim(2), in}, dweight->dtype());
    run(stream, Pass::weight_gradient, options, widened(stream, x, in), wide_dweight, wide_dy);
    copy_channels(stream, wide_dweight.slice(0, weight.dim(0)), *dweight);
  }
}

}  // namespace detr::kernels::cuda

#include "kernels/conv2d.h"

#include <vector>

#include "kernels/activation.h"
#include "kernels/cuda/channels.h"
#include "kernels/cuda/conv2d_fused.h"
#include "kernels/cuda/conv2d_pictures.h"
#include "kernels/cuda/conv2d_plans.h"
#include "kernels/cuda/gemm.h"
#include "kernels/pointwise.h"
#include "runtime/cuda/stream_state.h"

namespace detr::kernels::cuda {
namespace {

/// Enqueues one pass; x, weight and y are the tensors or their gradients, as the pass has it. False where cuDNN has no engine for it.
bool try_pass(const Stream& stream, ConvPass pass, const Conv2dOptions& options, const Tensor& x, const Tensor& weight, const Tensor& y, bool add) {
  const auto list = [](const Shape& shape) { return std::vector<std::int64_t>(shape.dims().begin(), shape.dims().end()); };
  auto& convolutions = stream.cuda_state().get<Convolutions>(stream);
  const CudnnPlan* plan = convolutions.plan({pass, y.dtype(), list(x.shape()), list(weight.shape()), options.stride, options.padding, add});
  if (!plan) return false;
  const std::int64_t ids[] = {kConvX, kConvWeight, kConvY};
  void* const tensors[] = {x.raw(), weight.raw(), y.raw()};
  run_plan(stream, convolutions.cudnn, *plan, ids, tensors);
  return true;
}

void run(const Stream& stream, ConvPass pass, const Conv2dOptions& options, const Tensor& x, const Tensor& weight, const Tensor& y) {
  if (!try_pass(stream, pass, options, x, weight, y, false))
    throw DeviceError("cuDNN ", cudnnGetVersion(), " has no deterministic engine for conv2d ", x, " with ", weight, ", stride ", options.stride, ", padding ", options.padding,
                      ", pass ", static_cast<int>(pass));
}

void data_gradient(const Stream& stream, const Conv2dOptions& options, const Tensor& dy, const Tensor& weight, Tensor& dx, bool add) {
  if (try_pass(stream, ConvPass::data_gradient, options, dx, weight, dy, add)) return;
  Tensor part = add ? stream.empty_like(dx) : dx;
  run(stream, ConvPass::data_gradient, options, part, weight, dy);
  if (add) accumulate(stream, part, dx);
}

/// dweight is f32. A 1 x 1 kernel's is a product over all pixels, which cuBLASLt writes in f32. Others come from cuDNN in bf16 and are
/// converted: the one deterministic engine that writes f32 takes about nine times as long.
void weight_gradient(const Stream& stream, const Conv2dOptions& options, const Tensor& dy, const Tensor& x, Tensor& dweight) {
  if (x.dtype() == DType::f32) return run(stream, ConvPass::weight_gradient, options, x, dweight, dy);
  if (dweight.dim(1) == 1 && dweight.dim(2) == 1 && options.stride == 1 && options.padding == 0)
    return gemm(stream, x.dtype(), {dy.raw(), true}, {x.raw(), false}, dweight.dim(0), dweight.dim(3), dy.rows(), nullptr, DType::f32, dweight.raw());
  Tensor rounded = stream.empty(dweight.shape(), x.dtype());
  run(stream, ConvPass::weight_gradient, options, x, rounded, dy);
  cast(stream, rounded, dweight);
}

}  // namespace

void conv2d_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Conv2dOptions& options, Tensor& y) {
  if (y.numel() == 0) return;
  DETR_CHECK(x.numel() > 0, "conv2d: no input channels on CUDA: ", x);
  if (try_pictures_forward(stream, x, weight, nullptr, Activation::none, options, y)) return;
  if (channels_fit(x, weight)) return run(stream, ConvPass::forward, options, x, weight, y);
  Tensor wide_y = y.dim(3) % 8 == 0 ? y : stream.empty(with_channels(y.shape(), in_eights(y.dim(3))), y.dtype());
  run(stream, ConvPass::forward, options, widened(stream, x, in_eights(x.dim(3))), widened_weight(stream, weight), wide_y);
  if (wide_y.raw() != y.raw()) copy_channels(stream, wide_y, y);
}

void conv2d_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Conv2dOptions& options,
                     Tensor* dx, Tensor* dweight, bool add_dx, bool relu_x) {
  if (dx && relu_x) {
    if (!try_fused_data_gradient(stream, dy, x, weight, add_dx, options, *dx)) {
      cuda::conv2d_backward(stream, dy, x, weight, options, dx, nullptr, add_dx, false);
      cuda::activation_backward(stream, *dx, Tensor(), x, Activation::relu, dx);
    }
    dx = nullptr;   // it is there
  }
  const bool empty = dy.numel() == 0 || x.numel() == 0;
  for (Tensor* gradient : {dx, dweight}) {
    if (empty && gradient && gradient->bytes() && !(gradient == dx && add_dx)) DETR_TRY(cudaMemsetAsync(gradient->raw(), 0, static_cast<std::size_t>(gradient->bytes()), detr::cuda::native(stream)));
  }
  if (empty) return;
  if (channels_fit(x, weight)) {
    if (dx) data_gradient(stream, options, dy, weight, *dx, add_dx);
    if (dweight) weight_gradient(stream, options, dy, x, *dweight);
    return;
  }
  const std::int64_t in = in_eights(x.dim(3)), out = in_eights(dy.dim(3));
  const Tensor wide_dy = widened(stream, dy, out);
  if (dx) {
    Tensor wide_dx = stream.empty(with_channels(x.shape(), in), x.dtype());
    run(stream, ConvPass::data_gradient, options, wide_dx, widened_weight(stream, weight), wide_dy);
    Tensor part = add_dx ? stream.empty_like(*dx) : *dx;
    copy_channels(stream, wide_dx, part);
    if (add_dx) accumulate(stream, part, *dx);
  }
  if (dweight) {
    Tensor wide_dweight = stream.empty({out, weight.dim(1), weight.dim(2), in}, dweight->dtype());
    weight_gradient(stream, options, wide_dy, widened(stream, x, in), wide_dweight);
    copy_channels(stream, wide_dweight.slice(0, weight.dim(0)), *dweight);
  }
}

}  // namespace detr::kernels::cuda

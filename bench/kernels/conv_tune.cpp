// Times every deterministic engine that cuDNN offers for the convolutions of a training step.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "bench/scene.h"
#include "kernels/cuda/conv2d_plans.h"
#include "models/detr/rtdetr.h"
#include "runtime/cuda/stream_state.h"
#include "runtime/random.h"
#include "train/step.h"

using namespace detr;
using namespace detr::kernels::cuda;

namespace {

Tensor random_bytes(const Stream& stream, std::int64_t bytes) {
  constexpr std::int64_t kChunk = std::int64_t{32} << 20;
  Tensor host = host_zeros({kChunk / 2}, DType::bf16), device = stream.empty({(bytes + kChunk) / 2}, DType::bf16);
  for (std::int64_t i = 0; i < host.numel(); ++i) host.data<BFloat16>()[i] = to_bf16(static_cast<float>(2 * uniform(RandomKey(1), static_cast<std::uint64_t>(i)) - 1));
  for (std::int64_t at = 0; at < device.numel(); at += host.numel()) {
    const std::int64_t count = std::min(host.numel(), device.numel() - at);
    Tensor part = device.slice(at, at + count);
    stream.copy(host.slice(0, count), part);
  }
  stream.wait();
  return device;
}

double time_plan(const Stream& stream, const Cudnn& cudnn, const CudnnPlan& plan, void* x, void* w, void* y) {
  const std::int64_t ids[] = {kConvX, kConvWeight, kConvY};
  void* const tensors[] = {x, w, y};
  const auto run = [&](int count) {
    for (int i = 0; i < count; ++i) run_plan(stream, cudnn, plan, ids, tensors);
  };
  run(2);
  const Event begin = stream.record();
  run(6);
  const Event end = stream.record();
  end.wait();
  return end.milliseconds_since(begin) / 6;
}

/// A batch of noise with random truth.
data::Batch random_batch(std::int64_t n, std::int64_t side) {
  const bench::Scene scene = bench::make_scene(n, 0, 1);
  data::Batch batch;
  batch.images = host_zeros({n, side, side, 3}, DType::u8);
  std::uint64_t counter = 0;
  for (std::uint8_t& value : batch.images.span<std::uint8_t>()) value = static_cast<std::uint8_t>(random_bits(RandomKey(2), counter++));
  batch.size_h = batch.size_w = side;
  batch.targets = scene.targets;
  batch.denoising = scene.denoising;
  for (std::int64_t i = 0; i < n; ++i) batch.image_ids.push_back(i);
  batch.orig_width = batch.orig_height = std::vector<std::int64_t>(static_cast<std::size_t>(n), side);
  return batch;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string variant = argc > 1 ? argv[1] : "r50";
  const std::int64_t batch_size = argc > 2 ? std::atoll(argv[2]) : 16;
  const Stream stream = Stream::cuda(0, 8);
  models::ModelConfig config = models::variant_config(variant);
  models::RtDetr model(config);
  std::vector<ConvKey> keys;
  {
    train::ParameterStore store(model.parameters(), stream, DType::f32, DType::bf16);
    store.initialise(0);
    train::Optimizer optimizer(store, stream, {});
    train::Step step(model, store, optimizer, stream, false);
    step.run(random_batch(batch_size, 640), 1e-3);
    for (const auto& [key, plan] : stream.cuda_state().get<Convolutions>(stream).plans) keys.push_back(key);
  }
  Convolutions& convolutions = stream.cuda_state().get<Convolutions>(stream);
  const std::int64_t bytes = std::int64_t{3} << 30;
  const Tensor x = random_bytes(stream, bytes), y = random_bytes(stream, bytes), w = random_bytes(stream, std::int64_t{64} << 20);
  double sums[3] = {}, best_sums[3] = {};
  for (const ConvKey& key : keys) {
    {
      const ConvOperation operation(key);
      const cudnnBackendDescriptor_t operations[] = {operation.operation.get()};
      std::string line;
      double first = -1, best = 1e9;
      int index = 0, best_index = -1;
      for (const CudnnDescriptor& one : convolutions.cudnn.configs(operations, true)) {
        const auto plan = convolutions.cudnn.plan(one);
        if (plan && plan->workspace_bytes <= kConvWorkspaceLimit) {
          const double ms = time_plan(stream, convolutions.cudnn, *plan, x.raw(), w.raw(), y.raw());
          if (first < 0) first = ms;
          if (ms < best) best = ms, best_index = index;
          char text[80];
          std::snprintf(text, sizeof text, " %lld:%.3f", static_cast<long long>(engine_of(one)), ms);
          line += text;
        }
        ++index;
      }
      sums[static_cast<int>(key.pass)] += first;
      best_sums[static_cast<int>(key.pass)] += best;
      const auto& X = key.x;
      const auto& W = key.weight;
      std::printf("%s x %lldx%lldx%lldx%lld w %lldx%lldx%lld s%lld first %.3f best %.3f (#%d):%s\n", key.pass == ConvPass::forward ? "fwd" : key.pass == ConvPass::data_gradient ? "dgrad" : "wgrad",
                  (long long)X[0], (long long)X[1], (long long)X[2], (long long)X[3], (long long)W[0], (long long)W[1], (long long)W[3], (long long)key.stride, first, best, best_index,
                  line.c_str());
    }
  }
  std::printf("sums over distinct shapes: first %.2f %.2f %.2f  best %.2f %.2f %.2f\n", sums[0], sums[1], sums[2], best_sums[0], best_sums[1], best_sums[2]);
}

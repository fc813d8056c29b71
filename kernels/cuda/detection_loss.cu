#include "kernels/detection_loss.h"

#include <array>

#include "kernels/attention.h"
#include "kernels/box_math.h"
#include "kernels/cuda/launch.cuh"

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 32;                       // queries of a block, a lane each where boxes are compared
constexpr int kRowsPerWarp = kRows / kWarps;    // and where logits are read, several loads in flight for each lane
constexpr int kMaxSets = kWarps;                // backward gives each set a warp
constexpr int kUnmatched = -1, kAbsent = -2;    // instead of the label of a query's match

/// A PredictionSet. first_block, blocks: its part of the grid of forward.
struct SetView {
  const std::int64_t *match, *groups;
  const float* normalizer;
  std::int64_t begin, queries;
  unsigned first_block, blocks;
};
struct Sets {
  SetView set[kMaxSets];
  int count;
};

/// The tensors of a layer: logits (N, T, C), boxes (N, T, 4), labels (N, Gcap), truth (N, Gcap, 4).
template <class T>
struct Layer {
  const T* logits;
  const float* boxes;
  const std::int64_t* labels;
  const float* truth;
  std::int64_t images, tokens, capacity;
  int classes;
};

struct Focus {
  float alpha, gamma;
};

/// Weights of the three terms.
struct Weights {
  double of[3];
};

/// The match of query q of image n in a set: its label, with its box in `target`, or kUnmatched, or kAbsent for padding. What
/// points outside its tensor counts as no match.
template <class T>
__device__ int find_match(const Layer<T>& layer, const SetView& set, std::int64_t n, std::int64_t q, const float*& target) {
  if (set.groups && set.groups[q] == kPaddingSlot) return kAbsent;
  const std::int64_t match = set.match[n * set.queries + q];
  if (match < 0 || match >= layer.capacity) return kUnmatched;
  const std::int64_t g = n * layer.capacity + match, label = layer.labels[g];
  if (label < 0 || label >= layer.classes) return kUnmatched;
  target = layer.truth + g * 4;
  return static_cast<int>(label);
}

/// Weight of a negative: alpha p^gamma.
__device__ float negative_weight(float p, Focus focus) { return focus.alpha * (focus.gamma == 2 ? p * p : powf(p, focus.gamma)); }

/// Varifocal loss of one logit. sigmoid and softplus are from one exponential that cannot overflow.
__device__ float varifocal(float x, bool is_match, float iou, Focus focus) {
  const float e = expf(-fabsf(x)), softplus = (x >= 0 ? x : 0.0F) + log1pf(e);
  if (is_match) return iou * (softplus - iou * x);
  return negative_weight((x >= 0 ? 1.0F : e) / (1 + e), focus) * softplus;
}

/// Sums of a block's kRows queries of one set before weights and normaliser. partial (blocks, 3): varifocal, L1 and GIoU.
template <class T>
__global__ void __launch_bounds__(kThreads)
detection_loss_forward_kernel(Layer<T> layer, const __grid_constant__ Sets sets, Focus focus, double* __restrict__ partial) {
  __shared__ int row_of[kRows], label_of[kRows];   // row in (N T), -1 for none
  __shared__ float iou_of[kRows];
  __shared__ double scratch[32];
  int s = 0;
  while (s + 1 < sets.count && blockIdx.x >= sets.set[s + 1].first_block) ++s;
  const SetView& set = sets.set[s];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;

  double l1 = 0, giou = 0;
  if (warp == 0) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x - set.first_block) * kRows + lane;
    int label = kAbsent;
    float iou = 0;
    std::int64_t row = -1;
    if (i < layer.images * set.queries) {
      const std::int64_t n = i / set.queries, q = i % set.queries;
      const float* target = nullptr;
      label = find_match(layer, set, n, q, target);
      if (label != kAbsent) row = n * layer.tokens + set.begin + q;
      if (label >= 0) {
        const float* box = layer.boxes + row * 4;
        const BoxOverlap<double> overlap(box, target);
        iou = static_cast<float>(overlap.iou());
        l1 = box_distance<double>(box, target);
        giou = 1 - overlap.giou();
      }
    }
    row_of[lane] = static_cast<int>(row);
    label_of[lane] = label;
    iou_of[lane] = iou;
  }
  __syncthreads();

  const int first = warp * kRowsPerWarp;
  float sums[kRowsPerWarp] = {};
  for (int c = lane; c < layer.classes; c += 32) {
    float x[kRowsPerWarp];
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      const std::int64_t row = row_of[first + r];
      x[r] = row >= 0 ? to_float(layer.logits[row * layer.classes + c]) : 0.0F;
    }
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      if (row_of[first + r] >= 0) sums[r] += varifocal(x[r], c == label_of[first + r], iou_of[first + r], focus);
    }
  }
  double vfl = 0;
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) vfl += static_cast<double>(warp_sum(sums[r]));
  vfl = block_sum(lane == 0 ? vfl : 0.0, scratch);
  l1 = block_sum(l1, scratch);
  giou = block_sum(giou, scratch);
  if (threadIdx.x == 0) {
    double* out = partial + static_cast<std::int64_t>(blockIdx.x) * 3;
    out[0] = vfl;
    out[1] = l1;
    out[2] = giou;
  }
}

/// A block adds up one set's sums. partial (blocks, 3), terms (sets, 3).
__global__ void __launch_bounds__(kThreads)
detection_loss_terms_kernel(const double* __restrict__ partial, const __grid_constant__ Sets sets, Weights weights, float* __restrict__ terms) {
  __shared__ double scratch[32];
  const SetView& set = sets.set[blockIdx.x];
  double sums[3] = {};
  for (unsigned b = threadIdx.x; b < set.blocks; b += kThreads) {
    const double* in = partial + (static_cast<std::int64_t>(set.first_block) + b) * 3;
#pragma unroll
    for (int k = 0; k < 3; ++k) sums[k] += in[k];
  }
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const double total = block_sum(sums[k], scratch);
    if (threadIdx.x == 0) {
      terms[blockIdx.x * 3 + static_cast<unsigned>(k)] = static_cast<float>(weights.of[k] * total / static_cast<double>(*set.normalizer));
    }
  }
}

/// Gradients of a block's kRows rows of (N T), added up over the sets in their order. dlogits and dboxes may be null.
template <class T>
__global__ void __launch_bounds__(kThreads, 3)
detection_loss_backward_kernel(const float* __restrict__ dterms, Layer<T> layer, const __grid_constant__ Sets sets, Weights weights,
                               Focus focus, T* __restrict__ dlogits, float* __restrict__ dboxes) {
  __shared__ int label_of[kMaxSets][kRows];
  __shared__ float iou_of[kMaxSets][kRows], dbox_of[kMaxSets][kRows][4], dvfl_of[kMaxSets];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t rows = layer.images * layer.tokens, first_row = static_cast<std::int64_t>(blockIdx.x) * kRows;

  if (warp < sets.count) {   // a warp for each set, a lane for each row
    const SetView& set = sets.set[warp];
    double scale[3];
#pragma unroll
    for (int k = 0; k < 3; ++k) scale[k] = weights.of[k] * static_cast<double>(dterms[warp * 3 + k]) / static_cast<double>(*set.normalizer);
    const std::int64_t row = first_row + lane, n = row / layer.tokens, q = row % layer.tokens - set.begin;
    int label = kAbsent;
    float iou = 0, dbox[4] = {};
    const float* target = nullptr;
    if (row < rows && q >= 0 && q < set.queries) label = find_match(layer, set, n, q, target);
    if (label >= 0) {
      const float* box = layer.boxes + row * 4;
      const BoxOverlap<double> overlap(box, target);
      iou = static_cast<float>(overlap.iou());
      if (dboxes) {
        const std::array<double, 4> dgiou = overlap.giou_gradient();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const double sign = box[k] > target[k] ? 1 : box[k] < target[k] ? -1 : 0;
          dbox[k] = static_cast<float>(scale[1] * sign - scale[2] * dgiou[static_cast<std::size_t>(k)]);
        }
      }
    }
    label_of[warp][lane] = label;
    iou_of[warp][lane] = iou;
#pragma unroll
    for (int k = 0; k < 4; ++k) dbox_of[warp][lane][k] = dbox[k];
    if (lane == 0) dvfl_of[warp] = static_cast<float>(scale[0]);
  }
  __syncthreads();

  if (dboxes && threadIdx.x < kRows * 4) {
    const auto r = static_cast<int>(threadIdx.x) / 4, k = static_cast<int>(threadIdx.x) % 4;
    float sum = 0;
    for (int s = 0; s < sets.count; ++s) sum += dbox_of[s][r][k];
    if (first_row + r < rows) dboxes[(first_row + r) * 4 + k] = sum;
  }
  if (!dlogits) return;
  const int first = warp * kRowsPerWarp;
  for (int c = lane; c < layer.classes; c += 32) {
    const std::int64_t place = (first_row + first) * layer.classes + c;
    float x[kRowsPerWarp];
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      x[r] = first_row + first + r < rows ? to_float(layer.logits[place + static_cast<std::int64_t>(r) * layer.classes]) : 0.0F;
    }
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      const float e = expf(-fabsf(x[r])), p = (x[r] >= 0 ? 1.0F : e) / (1 + e), negative = negative_weight(p, focus) * p;
      float sum = 0;
      for (int s = 0; s < sets.count; ++s) {
        const int label = label_of[s][first + r];
        const float iou = iou_of[s][first + r];
        if (label != kAbsent) sum += dvfl_of[s] * (c == label ? iou * (p - iou) : negative);
      }
      if (first_row + first + r < rows) dlogits[place + static_cast<std::int64_t>(r) * layer.classes] = from_float<T>(sum);
    }
  }
}

template <class T>
Layer<T> layer_of(const Tensor& logits, const Tensor& boxes, const TrueBoxes& truth) {
  DETR_CHECK(logits.rows() <= 0x7fffffff && logits.dim(2) <= 0x7fffffff, "detection_loss: CUDA takes fewer rows than ", logits);
  return {logits.data<T>(), boxes.data<float>(), truth.labels.data<std::int64_t>(), truth.boxes.data<float>(), logits.dim(0), logits.dim(1),
          truth.labels.dim(1), static_cast<int>(logits.dim(2))};
}

/// The sets as the kernels take them, and the blocks that forward needs for all.
struct Plan {
  Sets sets{};
  unsigned blocks = 0;

  explicit Plan(std::span<const PredictionSet> from) {
    DETR_CHECK(from.size() <= kMaxSets, "detection_loss: CUDA takes at most ", kMaxSets, " prediction sets a call, got ", from.size());
    for (const PredictionSet& set : from) {
      const unsigned count = blocks_for(set.match.numel(), kRows);
      sets.set[sets.count++] = {set.match.data<std::int64_t>(), set.groups.defined() ? set.groups.data<std::int64_t>() : nullptr,
                                set.normalizer.data<float>(), set.begin, set.match.dim(1), blocks, count};
      blocks += count;
    }
  }
};

Weights weights_of(const DetectionLossOptions& options) { return {{options.vfl_weight, options.bbox_weight, options.giou_weight}}; }
Focus focus_of(const DetectionLossOptions& options) { return {static_cast<float>(options.alpha), static_cast<float>(options.gamma)}; }

}  // namespace

void detection_loss_forward(const Stream& stream, const Tensor& logits, const Tensor& boxes, std::span<const PredictionSet> sets,
                            const TrueBoxes& truth, const DetectionLossOptions& options, Tensor& terms) {
  const Plan plan(sets);
  const Tensor partial = stream.empty({plan.blocks, 3}, DType::f64);
  dispatch_float("detection_loss", logits.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(stream, detection_loss_forward_kernel<T>, plan.blocks, kThreads, 0, layer_of<T>(logits, boxes, truth), plan.sets, focus_of(options),
           partial.data<double>());
  });
  launch(stream, detection_loss_terms_kernel, static_cast<unsigned>(plan.sets.count), kThreads, 0, partial.data<double>(), plan.sets,
         weights_of(options), terms.data<float>());
}

void detection_loss_backward(const Stream& stream, const Tensor& dterms, const Tensor& logits, const Tensor& boxes,
                             std::span<const PredictionSet> sets, const TrueBoxes& truth, const DetectionLossOptions& options,
                             Tensor* dlogits, Tensor* dboxes) {
  if (!dlogits && !dboxes) return;
  const Plan plan(sets);
  dispatch_float("detection_loss", logits.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch(stream, detection_loss_backward_kernel<T>, blocks_for(logits.rows(), kRows), kThreads, 0, dterms.data<float>(),
           layer_of<T>(logits, boxes, truth), plan.sets, weights_of(options), focus_of(options), dlogits ? dlogits->data<T>() : nullptr,
           dboxes ? dboxes->data<float>() : nullptr);
  });
}

}  // namespace detr::kernels::cuda

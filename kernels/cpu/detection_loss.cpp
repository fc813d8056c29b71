#include "kernels/detection_loss.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/attention.h"
#include "kernels/box_math.h"
#include "kernels/dispatch.h"
#include "runtime/error.h"

namespace detr::kernels::cpu {
namespace {

constexpr std::int64_t kGrain = 16;   // queries of a block

/// The tensors of a layer as pointers.
template <class T>
struct Layer {
  const T *logits, *boxes;
  const std::int64_t* labels;
  const T* truth;
  std::int64_t images, tokens, classes, capacity;

  Layer(const Tensor& logits_, const Tensor& boxes_, const TrueBoxes& truth_)
      : logits(logits_.data<T>()),
        boxes(boxes_.data<T>()),
        labels(truth_.labels.data<std::int64_t>()),
        truth(truth_.boxes.data<T>()),
        images(logits_.dim(0)),
        tokens(logits_.dim(1)),
        classes(logits_.dim(2)),
        capacity(truth_.labels.dim(1)) {}
};

/// One query of a set: where its predictions are and what it was matched with.
template <class T>
struct Query {
  std::int64_t row;                // in (N T) rows
  const T* target = nullptr;       // (cx, cy, w, h), null where unmatched
  std::int64_t label = -1;         // class of the match, -1 where unmatched
};

/// The queries [begin, end) of the (N Q) of a set that take part, one after the other, to fn.
template <class T, class F>
void for_queries(const Layer<T>& layer, const PredictionSet& set, std::int64_t begin, std::int64_t end, F&& fn) {
  const std::int64_t queries = set.match.dim(1);
  const std::int64_t* groups = set.groups.defined() ? set.groups.data<std::int64_t>() : nullptr;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t n = i / queries, q = i % queries;
    if (groups && groups[q] == kPaddingSlot) continue;
    Query<T> query{n * layer.tokens + set.begin + q};
    const std::int64_t match = set.match.data<std::int64_t>()[i];
    DETR_CHECK(match >= -1 && match < layer.capacity, "detection_loss: match[", n, ", ", q, "] must be in [-1, ", layer.capacity,
               "), got ", match);
    if (match >= 0) {
      const std::int64_t g = n * layer.capacity + match;
      query.target = layer.truth + g * 4;
      query.label = layer.labels[g];
      DETR_CHECK(query.label >= 0 && query.label < layer.classes, "detection_loss: labels[", n, ", ", match, "] must be in [0, ",
                 layer.classes, "), got ", query.label);
    }
    fn(query);
  }
}

template <class T>
double normalizer_of(const PredictionSet& set) {
  const double normalizer = static_cast<double>(set.normalizer.data<T>()[0]);
  DETR_CHECK(normalizer > 0, "detection_loss: normalizer must be > 0, got ", normalizer);
  return normalizer;
}

/// sigmoid(x) and softplus(x) = ln(1 + e^x) from one exponential that cannot overflow.
template <class T>
struct Logistic {
  T probability, softplus;
};
template <class T>
T probability_of(T x) {
  const T e = std::exp(-std::abs(x));
  return (x >= 0 ? T(1) : e) / (1 + e);
}
template <class T>
Logistic<T> logistic(T x) {
  const T e = std::exp(-std::abs(x));
  return {(x >= 0 ? T(1) : e) / (1 + e), (x >= 0 ? x : T(0)) + std::log1p(e)};
}

/// Weight of a negative: alpha p^gamma.
template <class T>
T negative_weight(T p, const DetectionLossOptions& options) {
  return T(options.alpha) * (options.gamma == 2 ? p * p : std::pow(p, T(options.gamma)));
}

/// Sums of a block before weights and normaliser: varifocal, L1 and GIoU.
using Sums = std::array<double, 3>;

template <class T>
void add_query(const Layer<T>& layer, const Query<T>& query, const DetectionLossOptions& options, Sums& sums) {
  const T* logits = layer.logits + query.row * layer.classes;
  const T* box = layer.boxes + query.row * 4;
  for (std::int64_t c = 0; c < layer.classes; ++c) {
    if (c == query.label) continue;
    const auto [p, softplus] = logistic(logits[c]);
    sums[0] += static_cast<double>(negative_weight(p, options) * softplus);
  }
  if (!query.target) return;
  const BoxOverlap<double> overlap(box, query.target);
  const T s = static_cast<T>(overlap.iou()), x = logits[query.label];
  sums[0] += static_cast<double>(s * (logistic(x).softplus - s * x));
  sums[1] += box_distance<double>(box, query.target);
  sums[2] += 1 - overlap.giou();
}

/// Adds the gradient of one query to its rows of dlogits and dboxes; either may be null. scale: weight * dterm / normalizer.
template <class T>
void add_query_gradient(const Layer<T>& layer, const Query<T>& query, const DetectionLossOptions& options, const Sums& scale, T* dlogits,
                        T* dboxes) {
  const T* logits = layer.logits + query.row * layer.classes;
  const T* box = layer.boxes + query.row * 4;
  if (dlogits) {
    T* dlogit = dlogits + query.row * layer.classes;
    const T dvfl = static_cast<T>(scale[0]);
    for (std::int64_t c = 0; c < layer.classes; ++c) {
      if (c == query.label) continue;
      const T p = probability_of(logits[c]);
      dlogit[c] += dvfl * negative_weight(p, options) * p;
    }
    if (query.target) {
      const T s = static_cast<T>(BoxOverlap<double>(box, query.target).iou());
      dlogit[query.label] += dvfl * s * (probability_of(logits[query.label]) - s);
    }
  }
  if (dboxes && query.target) {
    T* dbox = dboxes + query.row * 4;
    const std::array<double, 4> dgiou = BoxOverlap<double>(box, query.target).giou_gradient();
    for (std::size_t k = 0; k < 4; ++k) {
      const T b = box[k], t = query.target[k];
      const double sign = b > t ? 1 : b < t ? -1 : 0;
      dbox[k] += static_cast<T>(scale[1] * sign - scale[2] * dgiou[k]);
    }
  }
}

}  // namespace

void detection_loss_forward(const Stream& stream, const Tensor& logits, const Tensor& boxes, std::span<const PredictionSet> sets,
                            const TrueBoxes& truth, const DetectionLossOptions& options, Tensor& terms) {
  dispatch_float("detection_loss", logits.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Layer<T> layer(logits, boxes, truth);
    const Sums weights = {options.vfl_weight, options.bbox_weight, options.giou_weight};
    T* out = terms.data<T>();
    for (const PredictionSet& set : sets) {
      const double normalizer = normalizer_of<T>(set);
      const std::int64_t count = set.match.numel();
      std::vector<Sums> partial(static_cast<std::size_t>((count + kGrain - 1) / kGrain), Sums{});
      stream.parallel_blocks(count, kGrain, [&](std::int64_t begin, std::int64_t end) {
        Sums sums{};   // its own, so that threads do not write to one cache line
        for_queries(layer, set, begin, end, [&](const Query<T>& query) { add_query(layer, query, options, sums); });
        partial[static_cast<std::size_t>(begin / kGrain)] = sums;
      });
      Sums total{};
      for (const Sums& sums : partial) {
        for (std::size_t k = 0; k < 3; ++k) total[k] += sums[k];
      }
      for (std::size_t k = 0; k < 3; ++k) *out++ = static_cast<T>(weights[k] * total[k] / normalizer);
    }
  });
}

void detection_loss_backward(const Stream& stream, const Tensor& dterms, const Tensor& logits, const Tensor& boxes,
                             std::span<const PredictionSet> sets, const TrueBoxes& truth, const DetectionLossOptions& options,
                             Tensor* dlogits, Tensor* dboxes) {
  dispatch_float("detection_loss", logits.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Layer<T> layer(logits, boxes, truth);
    T* dlogit = dlogits ? dlogits->data<T>() : nullptr;
    T* dbox = dboxes ? dboxes->data<T>() : nullptr;
    // Sets need not cover all queries, and may share some.
    if (dlogit) std::fill(dlogit, dlogit + dlogits->numel(), T(0));
    if (dbox) std::fill(dbox, dbox + dboxes->numel(), T(0));
    const Sums weights = {options.vfl_weight, options.bbox_weight, options.giou_weight};
    const T* dterm = dterms.data<T>();
    for (const PredictionSet& set : sets) {
      const double normalizer = normalizer_of<T>(set);
      Sums scale{};
      for (std::size_t k = 0; k < 3; ++k) scale[k] = weights[k] * static_cast<double>(*dterm++) / normalizer;
      stream.parallel_blocks(set.match.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
        for_queries(layer, set, begin, end,
                    [&](const Query<T>& query) { add_query_gradient(layer, query, options, scale, dlogit, dbox); });
      });
    }
  });
}

}  // namespace detr::kernels::cpu

#include "kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/cpu/exp.h"
#include "kernels/cpu/gemm.h"
#include "kernels/dispatch.h"

namespace detr::kernels::cpu {
namespace {

constexpr std::int64_t kQueriesPerBlock = 64;   // rows of scores that exist at a time
constexpr std::int64_t kLanes = 16;             // partial sums and maxima of a row; its length is a multiple

/// Keys of one head, rounded up to whole lanes; those beyond the end are zero and never allowed.
std::int64_t padded_keys(std::int64_t keys) { return (keys + kLanes - 1) / kLanes * kLanes; }

/// Which keys a query may look at.
template <class T>
class AllowedKeys {
 public:
  AllowedKeys(const Tensor* groups, std::int64_t keys)
      : groups_(groups ? groups->data<std::int64_t>() : nullptr), keys_(keys), allowed_(static_cast<std::size_t>(padded_keys(keys)), 0) {
    if (groups_ && keys > 0) fill(groups_[0]);
    if (!groups_) std::fill_n(allowed_.begin(), keys, T(1));
  }

  /// 1 for each key that the query may look at, else 0; null if there is none. Cheap for neighbours in one group.
  const T* row(std::int64_t query) {
    if (keys_ == 0 || is_padding(query)) return nullptr;
    if (groups_ && groups_[query] != group_) fill(groups_[query]);
    return allowed_.data();
  }
  bool is_padding(std::int64_t slot) const { return groups_ && groups_[slot] == kPaddingSlot; }

 private:
  void fill(std::int64_t group) {
    group_ = group;
    for (std::int64_t j = 0; j < keys_; ++j) {
      const bool look = groups_[j] == kOrdinaryQuery || (groups_[j] == group && group != kPaddingSlot);
      allowed_[static_cast<std::size_t>(j)] = look ? T(1) : T(0);
    }
  }

  const std::int64_t* groups_;
  std::int64_t keys_;
  std::int64_t group_ = kOrdinaryQuery;
  std::vector<T> allowed_;
};

/// The rows of one head of one image inside (N, T, A d).
template <class T>
struct Head {
  std::int64_t image, head, tokens, depth, width;

  Matrix<T> rows(const Tensor& x) const { return {x.data<T>() + image * tokens * width + head * depth, tokens, depth, width}; }

  /// A copy, times `scale`, with zero rows up to `count`. Rows of padding slots are zero: whatever lies there takes no part.
  Tensor copy(const Stream& stream, const Tensor& x, const AllowedKeys<T>& allowed, std::int64_t count, T scale = 1) const {
    Tensor result = stream.zeros({count, depth}, x.dtype());
    const Matrix<T> from = rows(x);
    for (std::int64_t t = 0; t < tokens; ++t) {
      T* to = result.data<T>() + t * depth;
      if (!allowed.is_padding(t)) std::transform(from.row(t), from.row(t) + depth, to, [scale](T value) { return value * scale; });
    }
    return result;
  }
};

template <class T>
Matrix<T> matrix(const Tensor& x) {
  return {x.data<T>(), x.dim(0), x.dim(1)};
}
template <class T>
Matrix<const T> constant(Matrix<T> m) {
  return {m.data, m.rows, m.cols, m.stride};
}

/// Scores of one query to softmax weights, in place; returns the log of the denominator.
template <class T>
T softmax_row(T* scores, std::int64_t count, const T* allowed) {
  T maxima[kLanes], sums[kLanes] = {};
  std::fill_n(maxima, kLanes, -std::numeric_limits<T>::infinity());
  for (std::int64_t j = 0; j < count; j += kLanes) {
#pragma GCC unroll 1   // unrolled here, it is no longer seen as a loop to vectorise
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const T score = allowed[j + lane] != 0 ? scores[j + lane] : -std::numeric_limits<T>::infinity();
      maxima[lane] = score > maxima[lane] ? score : maxima[lane];
    }
  }
  const T largest = *std::max_element(maxima, maxima + kLanes);
  for (std::int64_t j = 0; j < count; j += kLanes) {
#pragma GCC unroll 1   // unrolled here, it is no longer seen as a loop to vectorise
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const T weight = allowed[j + lane] != 0 ? fast_exp(scores[j + lane] - largest) : T(0);
      scores[j + lane] = weight;
      sums[lane] += weight;
    }
  }
  T sum = 0;
  for (const T part : sums) sum += part;
  const T inverse = 1 / sum;
  for (std::int64_t j = 0; j < count; ++j) scores[j] *= inverse;
  return largest + std::log(sum);
}

template <class T>
void forward_head(const Stream& stream, const Head<T>& queries, const Head<T>& keys, const Tensor& q, const Tensor& k, const Tensor& v,
                  const Tensor* groups, Tensor& out, T* lse) {
  const std::int64_t padded = padded_keys(keys.tokens);
  AllowedKeys<T> allowed(groups, keys.tokens);
  const Tensor q_copy = queries.copy(stream, q, allowed, queries.tokens, 1 / std::sqrt(static_cast<T>(queries.depth)));
  const Tensor k_copy = keys.copy(stream, k, allowed, padded), v_copy = keys.copy(stream, v, allowed, padded);
  const Tensor scratch = stream.empty({std::min(kQueriesPerBlock, queries.tokens), padded}, q.dtype());
  for (std::int64_t begin = 0; begin < queries.tokens; begin += kQueriesPerBlock) {
    const std::int64_t end = std::min(begin + kQueriesPerBlock, queries.tokens);
    const Matrix<T> p = matrix<T>(scratch).rows_in(0, end - begin);
    multiply_nt(constant(matrix<T>(q_copy).rows_in(begin, end)), constant(matrix<T>(k_copy)), p, Write::overwrite);
    for (std::int64_t i = begin; i < end; ++i) {
      if (const T* row_allowed = allowed.row(i)) {
        lse[i] = softmax_row(p.row(i - begin), padded, row_allowed);
      } else {
        std::fill_n(p.row(i - begin), padded, T(0));
        lse[i] = 0;
      }
    }
    multiply(constant(p), constant(matrix<T>(v_copy)), queries.rows(out).rows_in(begin, end), Write::overwrite);
  }
}

/// Scores of one query to softmax weights by the log of the denominator.
template <class T>
void weights_row(T* scores, std::int64_t count, const T* allowed, T lse) {
  for (std::int64_t j = 0; j < count; ++j) scores[j] = allowed[j] != 0 ? fast_exp(scores[j] - lse) : T(0);
}

/// Gradients of the weights of one query to gradients of its scores; `mean` is the sum over keys of weight times gradient.
template <class T>
void dscores_row(T* dweights, std::int64_t count, const T* allowed, const T* weights, T mean) {
  for (std::int64_t j = 0; j < count; ++j) dweights[j] = allowed[j] != 0 ? weights[j] * (dweights[j] - mean) : T(0);
}

template <class T>
void store(Matrix<T> to, const Tensor& from, T scale) {
  for (std::int64_t i = 0; i < to.rows; ++i) {
    const T* row = from.data<T>() + i * to.cols;
    std::transform(row, row + to.cols, to.row(i), [scale](T value) { return value * scale; });
  }
}

template <class T>
void backward_head(const Stream& stream, const Head<T>& queries, const Head<T>& keys, const Tensor& dout, const Tensor& q,
                   const Tensor& k, const Tensor& v, const Tensor& out, const T* lse, const Tensor* groups, Tensor* dq, Tensor* dk,
                   Tensor* dv) {
  const std::int64_t padded = padded_keys(keys.tokens);
  const T scale = 1 / std::sqrt(static_cast<T>(queries.depth));
  AllowedKeys<T> allowed(groups, keys.tokens);
  const Tensor q_copy = queries.copy(stream, q, allowed, queries.tokens, scale);
  const Tensor dout_copy = queries.copy(stream, dout, allowed, queries.tokens);
  const Tensor k_copy = keys.copy(stream, k, allowed, padded), v_copy = keys.copy(stream, v, allowed, padded);
  const Tensor dk_sum = stream.zeros({dk ? padded : 0, keys.depth}, q.dtype()), dv_sum = stream.zeros({dv ? padded : 0, keys.depth}, q.dtype());
  const Shape block{std::min(kQueriesPerBlock, queries.tokens), padded};
  const Tensor weights = stream.empty(block, q.dtype()), dscores = stream.empty(block, q.dtype());
  const Tensor dq_block = stream.empty({block[0], queries.depth}, q.dtype());
  for (std::int64_t begin = 0; begin < queries.tokens; begin += kQueriesPerBlock) {
    const std::int64_t end = std::min(begin + kQueriesPerBlock, queries.tokens);
    const Matrix<T> q_rows = matrix<T>(q_copy).rows_in(begin, end), dout_rows = matrix<T>(dout_copy).rows_in(begin, end);
    const Matrix<T> p = matrix<T>(weights).rows_in(0, end - begin), ds = matrix<T>(dscores).rows_in(0, end - begin);
    multiply_nt(constant(q_rows), constant(matrix<T>(k_copy)), p, Write::overwrite);
    for (std::int64_t i = begin; i < end; ++i) {
      if (const T* row_allowed = allowed.row(i)) weights_row(p.row(i - begin), padded, row_allowed, lse[i]);
      else std::fill_n(p.row(i - begin), padded, T(0));
    }
    if (dv) multiply_tn(constant(p), constant(dout_rows), matrix<T>(dv_sum), Write::add);
    if (!dq && !dk) continue;
    multiply_nt(constant(dout_rows), constant(matrix<T>(v_copy)), ds, Write::overwrite);
    for (std::int64_t i = begin; i < end; ++i) {
      T* row = ds.row(i - begin);
      if (const T* row_allowed = allowed.row(i)) {
        const T* dout_row = dout_rows.row(i - begin);
        const T mean = std::inner_product(dout_row, dout_row + queries.depth, queries.rows(out).row(i), T(0));   // since out = p v
        dscores_row(row, padded, row_allowed, p.row(i - begin), mean);
      } else {
        std::fill_n(row, padded, T(0));
      }
    }
    if (dk) multiply_tn(constant(ds), constant(q_rows), matrix<T>(dk_sum), Write::add);
    if (!dq) continue;
    multiply(constant(ds), constant(matrix<T>(k_copy)), matrix<T>(dq_block).rows_in(0, end - begin), Write::overwrite);
    store(queries.rows(*dq).rows_in(begin, end), dq_block, scale);
  }
  if (dk) store(keys.rows(*dk), dk_sum, T(1));
  if (dv) store(keys.rows(*dv), dv_sum, T(1));
}

/// Calls task(queries, keys, first row of lse) for each head of each image.
template <class T, class F>
void for_each_head(const Stream& stream, const Tensor& q, const Tensor& k, std::int64_t heads, F&& task) {
  const std::int64_t width = q.dim(2), depth = width / heads;
  stream.parallel_blocks(q.dim(0) * heads, 1, [&](std::int64_t i, std::int64_t) {
    task(Head<T>{i / heads, i % heads, q.dim(1), depth, width}, Head<T>{i / heads, i % heads, k.dim(1), depth, width}, i * q.dim(1));
  });
}

}  // namespace

void attention_forward(const Stream& stream, const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t heads,
                       const Tensor* groups, Tensor& out, Tensor& lse) {
  dispatch_float("attention", q.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_head<T>(stream, q, k, heads, [&](const Head<T>& queries, const Head<T>& keys, std::int64_t row) {
      forward_head(stream, queries, keys, q, k, v, groups, out, lse.data<T>() + row);
    });
  });
}

void attention_backward(const Stream& stream, const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& lse, std::int64_t heads, const Tensor* groups, Tensor* dq, Tensor* dk, Tensor* dv) {
  dispatch_float("attention", q.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_head<T>(stream, q, k, heads, [&](const Head<T>& queries, const Head<T>& keys, std::int64_t row) {
      backward_head(stream, queries, keys, dout, q, k, v, out, lse.data<T>() + row, groups, dq, dk, dv);
    });
  });
}

}  // namespace detr::kernels::cpu

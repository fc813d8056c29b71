#include "kernels/batch_norm.h"

#include <initializer_list>

#include "kernels/cuda/batch_norm_kernels.cuh"

namespace detr::kernels::cuda {
namespace {

constexpr int kApplyBlocks = 2 * kTileBlocks;   // normalise_kernel fits twice on a multiprocessor
constexpr int kSmallBlocks = 8 * kTileBlocks;   // for passes without sums: shorter parts even out the multiprocessors

/// Calls fn with the activation as a constant; the contract lets only these three through.
template <class F>
void dispatch_norm_activation(Activation activation, F&& fn) {
  switch (activation) {
    case Activation::relu: fn(ActivationTag<Activation::relu>{}); return;
    case Activation::silu: fn(ActivationTag<Activation::silu>{}); return;
    default: fn(ActivationTag<Activation::none>{}); return;
  }
}

/// The raw pointer, null for a null tensor.
template <class T>
T* pointer(const Tensor* tensor) {
  return tensor ? tensor->data<T>() : nullptr;
}

/// Whether all of these may be read V at a time; null ones may.
template <class T>
bool all_fit(std::int64_t C, std::initializer_list<const void*> places) {
  return std::all_of(places.begin(), places.end(), [C](const void* place) { return fits_vectors<T>(place, C); });
}

/// normalise_kernel for the dtypes, widths and activation of its arguments.
template <class T, int V>
void normalise(const Stream& stream, const ColumnTiles& tiles, const Statistics& statistics, const Tensor& x, const Tensor& weight,
               const Tensor& bias, const Tensor* residual, Activation activation, Tensor& y) {
  dispatch_norm_activation(activation, [&](auto kind) {
    constexpr Activation kKind = decltype(kind)::value;
    const auto kernel = residual ? normalise_kernel<T, V, kKind, true> : normalise_kernel<T, V, kKind, false>;
    launch(stream, kernel, tiles.grid(), kTileThreads, 0, tiles, statistics, x.data<T>(), weight.data<float>(), bias.data<float>(),
           pointer<T>(residual), y.data<T>());
  });
}

/// What the backwards read; x is left out where nothing of it is read. Nothing is wanted yet.
template <class T>
Backward<T> backward_inputs(const Tensor& dy, const Tensor* x, const Tensor& weight, const Tensor& bias, const Tensor* residual, const Tensor& y,
                            const Tensor& mean, const Tensor& rstd, Activation activation) {
  const Tensor* other = activation == Activation::relu ? &y : activation == Activation::silu ? residual : nullptr;
  return {dy.data<T>(), pointer<T>(x), pointer<T>(other), weight.data<float>(), bias.data<float>(), mean.data<float>(), rstd.data<float>(),
          nullptr, nullptr, nullptr, nullptr};
}

/// Calls pass(kind, has_residual) with both as constants; of a residual only SiLU reads.
template <class T, class Pass>
void dispatch_backward(Activation activation, const Backward<T>& in, const Pass& pass) {
  dispatch_norm_activation(activation, [&](auto kind) {
    if constexpr (decltype(kind)::value == Activation::silu) {
      if (in.other) return pass(kind, std::true_type{});
    }
    pass(kind, std::false_type{});
  });
}

/// gradient_sums_kernel, with sums where `partial` is not null.
template <class T, int V>
void first_pass(const Stream& stream, const ColumnTiles& tiles, Activation activation, const Backward<T>& in, float2* partial) {
  dispatch_backward(activation, in, [&](auto kind, auto has_residual) {
    constexpr Activation kKind = decltype(kind)::value;
    constexpr bool kResidual = decltype(has_residual)::value;
    const auto kernel = partial ? gradient_sums_kernel<T, V, kKind, kResidual, true> : gradient_sums_kernel<T, V, kKind, kResidual, false>;
    launch(stream, kernel, tiles.grid(), kTileThreads, 0, tiles, in, partial);
  });
}

/// input_gradient_kernel.
template <class T, int V>
void second_pass(const Stream& stream, const ColumnTiles& tiles, Activation activation, const Backward<T>& in, const GradientSums& sums) {
  dispatch_backward(activation, in, [&](auto kind, auto has_residual) {
    constexpr Activation kKind = decltype(kind)::value;
    constexpr bool kResidual = decltype(has_residual)::value;
    launch(stream, input_gradient_kernel<T, V, kKind, kResidual>, tiles.grid(), kTileThreads, 0, tiles, in, sums);
  });
}

}  // namespace

void batch_norm_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                        Activation activation, double eps, double momentum, Tensor& running_mean, Tensor& running_var, Tensor& y,
                        Tensor& mean, Tensor& rstd) {
  const std::int64_t C = x.dim(-1);
  if (C == 0) return;
  dispatch_float("batch_norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_vectors<T>(all_fit<T>(C, {x.raw(), y.raw(), residual ? residual->raw() : nullptr}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const ColumnTiles tiles = column_tiles<V>(x.rows(), C, kTileBlocks);
      const Tensor partial = stream.empty({tiles.parts, C, 2}, DType::f32);
      auto* sums = static_cast<float2*>(partial.raw());
      launch(stream, batch_sums_kernel<T, V>, tiles.grid(), kTileThreads, 0, tiles, x.data<T>(), sums);
      const Statistics statistics{sums, tiles.parts, eps, momentum, running_mean.data<float>(), running_var.data<float>(),
                                  mean.data<float>(), rstd.data<float>()};
      normalise<T, V>(stream, column_tiles<V>(x.rows(), C, kApplyBlocks), statistics, x, weight, bias, residual, activation, y);
    });
  });
}

void batch_norm_inference(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                          Activation activation, double eps, const Tensor& running_mean, const Tensor& running_var, Tensor& y,
                          Tensor& mean, Tensor& rstd) {
  const std::int64_t C = x.dim(-1);
  if (C == 0) return;
  dispatch_float("batch_norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_vectors<T>(all_fit<T>(C, {x.raw(), y.raw(), residual ? residual->raw() : nullptr}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const Statistics statistics{nullptr, 0, eps, 0, running_mean.data<float>(), running_var.data<float>(), mean.data<float>(),
                                  rstd.data<float>()};
      normalise<T, V>(stream, column_tiles<V>(x.rows(), C, kSmallBlocks), statistics, x, weight, bias, residual, activation, y);
    });
  });
}

void batch_norm_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                         const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                         bool batch_statistics, Tensor* dx, Tensor* dweight, Tensor* dbias, Tensor* dresidual) {
  const std::int64_t C = dy.dim(-1), R = dy.rows();
  if (C == 0 || !(dx || dweight || dbias || dresidual)) return;
  const bool wants_sums = dweight || dbias || (dx && batch_statistics);
  const bool reads_x = wants_sums || activation == Activation::silu;
  dispatch_float("batch_norm", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Backward<T> in = backward_inputs<T>(dy, reads_x ? &x : nullptr, weight, bias, residual, y, mean, rstd, activation);
    in.dx = pointer<T>(batch_statistics ? nullptr : dx);
    in.dresidual = pointer<T>(dresidual);
    in.dweight = pointer<float>(dweight);
    in.dbias = pointer<float>(dbias);
    const bool fit = all_fit<T>(C, {in.dy, in.x, in.other, pointer<T>(dx), in.dresidual});
    dispatch_vectors<T>(fit, [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const ColumnTiles tiles = column_tiles<V>(R, C, wants_sums ? kTileBlocks : kSmallBlocks);
      const Tensor memory = stream.empty({wants_sums ? tiles.parts : 0, C, 2}, DType::f32);
      auto* partial = wants_sums ? static_cast<float2*>(memory.raw()) : nullptr;
      first_pass<T, V>(stream, tiles, activation, in, partial);
      if (!wants_sums) return;
      in.dx = pointer<T>(batch_statistics ? dx : nullptr);
      if (dresidual) in.dy = in.dresidual;   // what the first pass left there is g
      second_pass<T, V>(stream, in.dx ? tiles : column_tiles<V>(R, C, 1), dresidual || !in.dx ? Activation::none : activation, in,
                        {partial, tiles.parts, nullptr, 1, 0, static_cast<double>(R)});
    });
  });
}

void batch_norm_moments(const Stream& stream, const Tensor& x, Tensor& moments) {
  const std::int64_t C = x.dim(-1);
  if (C == 0) return;
  dispatch_float("batch_norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_vectors<T>(fits_vectors<T>(x.raw(), C), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const ColumnTiles tiles = column_tiles<V>(x.rows(), C, kTileBlocks);
      const Tensor memory = stream.empty({tiles.parts, C, 2}, DType::f32);
      auto* partial = static_cast<float2*>(memory.raw());
      launch(stream, batch_sums_kernel<T, V>, tiles.grid(), kTileThreads, 0, tiles, x.data<T>(), partial);
      launch(stream, moments_kernel<T>, blocks_for(C, kTileWidth), kTileThreads, 0, x.data<T>(), tiles.rows, tiles.columns, partial, tiles.parts,
             moments.data<double>());
    });
  });
}

void batch_norm_combine(const Stream& stream, const Exchanged& moments, std::int64_t rows, double eps, double momentum, Tensor& running_mean,
                        Tensor& running_var, Tensor& mean, Tensor& rstd) {
  constexpr int kThreads = 128;
  const std::int64_t C = mean.dim(0);
  const Statistics statistics{nullptr, 0, eps, momentum, running_mean.data<float>(), running_var.data<float>(), mean.data<float>(),
                              rstd.data<float>()};
  launch(stream, combine_kernel, blocks_for(C, kThreads), kThreads, 0, moments.first(), static_cast<int>(moments.ranks()), moments.stride(),
         static_cast<int>(C), static_cast<double>(rows), statistics);
}

void batch_norm_apply(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor* residual,
                      Activation activation, const Tensor& mean, const Tensor& rstd, Tensor& y) {
  const std::int64_t C = x.dim(-1);
  if (C == 0) return;
  dispatch_float("batch_norm", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_vectors<T>(all_fit<T>(C, {x.raw(), y.raw(), residual ? residual->raw() : nullptr}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const Statistics statistics{nullptr, 0, 0, 0, nullptr, nullptr, mean.data<float>(), rstd.data<float>()};
      normalise<T, V>(stream, column_tiles<V>(x.rows(), C, kSmallBlocks), statistics, x, weight, bias, residual, activation, y);
    });
  });
}

void batch_norm_backward_sums(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                              const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                              Tensor* sums, Tensor* dweight, Tensor* dbias, Tensor* dresidual) {
  const std::int64_t C = dy.dim(-1);
  const bool wants_sums = sums || dweight || dbias;
  if (C == 0 || !(wants_sums || dresidual)) return;
  const bool reads_x = wants_sums || activation == Activation::silu;
  dispatch_float("batch_norm", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Backward<T> in = backward_inputs<T>(dy, reads_x ? &x : nullptr, weight, bias, residual, y, mean, rstd, activation);
    in.dresidual = pointer<T>(dresidual);
    dispatch_vectors<T>(all_fit<T>(C, {in.dy, in.x, in.other, in.dresidual}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const ColumnTiles tiles = column_tiles<V>(dy.rows(), C, wants_sums ? kTileBlocks : kSmallBlocks);
      const Tensor memory = stream.empty({wants_sums ? tiles.parts : 0, C, 2}, DType::f32);
      auto* partial = wants_sums ? static_cast<float2*>(memory.raw()) : nullptr;
      first_pass<T, V>(stream, tiles, activation, in, partial);
      if (!wants_sums) return;
      launch(stream, gradient_totals_kernel, blocks_for(C, kTileWidth), kTileThreads, 0, partial, tiles.parts, tiles.columns, rstd.data<float>(),
             pointer<double>(sums), pointer<float>(dweight), pointer<float>(dbias));
    });
  });
}

void batch_norm_backward_apply(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                               const Tensor* residual, const Tensor& y, const Tensor& mean, const Tensor& rstd, Activation activation,
                               const Exchanged& sums, Tensor& dx) {
  const std::int64_t C = dy.dim(-1), R = dy.rows(), ranks = sums.ranks();
  if (C == 0) return;
  dispatch_float("batch_norm", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    Backward<T> in = backward_inputs<T>(dy, &x, weight, bias, residual, y, mean, rstd, activation);
    in.dx = dx.data<T>();
    dispatch_vectors<T>(all_fit<T>(C, {in.dy, in.x, in.other, in.dx}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      second_pass<T, V>(stream, column_tiles<V>(R, C, kTileBlocks), activation, in,
                        {nullptr, 0, sums.first(), static_cast<int>(ranks), sums.stride(), static_cast<double>(R) * static_cast<double>(ranks)});
    });
  });
}

}  // namespace detr::kernels::cuda

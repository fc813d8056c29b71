#include "kernels/pool.h"

#include <type_traits>
#include <vector>

#include "kernels/cpu/blocks.h"
#include "kernels/dispatch.h"

namespace detr::kernels::cpu {
namespace {

/// The cells [begin, end) of a 3 x 3 window's dimension that lie in a map of `size`: output o looks at 2 o - 1, 2 o, 2 o + 1.
struct WindowRange {
  std::int64_t begin, end;
  WindowRange(std::int64_t o, std::int64_t size) : begin(std::max<std::int64_t>(0, 2 * o - 1)), end(std::min(size, 2 * o + 2)) {}
};

/// The first maximum so far stays; a NaN beats every number, and the first NaN stays.
template <class T>
bool beats(T value, T best) {
  return (best == best) & !(value <= best);
}

/// Integers as wide as T, so that they and T fill vectors of one length.
template <class T>
using Place = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;

// The loops over channels below are functions of their own, since a store of bytes may alias all that a lambda captures, and
// then its loops do not vectorise.

/// best = max(best, cell), and at = here where the cell won.
template <class T>
void take_maximum(std::int64_t C, const T* cell, Place<T> here, T* best, Place<T>* at) {
#pragma GCC ivdep
  for (std::int64_t c = 0; c < C; ++c) {
    const bool better = beats(cell[c], best[c]);
    at[c] = better ? here : at[c];
    best[c] = better ? cell[c] : best[c];
  }
}

template <class P>
void to_bytes(std::int64_t C, const P* from, std::uint8_t* to) {
#pragma GCC ivdep
  for (std::int64_t c = 0; c < C; ++c) to[c] = static_cast<std::uint8_t>(from[c]);
}

/// out += dy where the maximum lies here.
template <class T>
void add_where(std::int64_t C, const std::uint8_t* place, Place<T> here, const T* dy, T* out) {
#pragma GCC ivdep
  for (std::int64_t c = 0; c < C; ++c) {
    const T share = dy[c];
    out[c] += static_cast<Place<T>>(place[c]) == here ? share : T(0);
  }
}

}  // namespace

void max_pool_forward(const Stream& stream, const Tensor& x, Tensor& y) {
  dispatch_float("max_pool", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t H = x.dim(1), W = x.dim(2), C = x.dim(3), h = y.dim(1), w = y.dim(2);
    const T* px = x.data<T>();
    T* py = y.data<T>();
    stream.parallel_blocks(y.dim(0) * h, rows_per_block(w * C), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const T* image = px + row / h * H * W * C;
        const WindowRange is(row % h, H);
        for (std::int64_t j = 0; j < w; ++j) {
          const WindowRange js(j, W);
          T* best = py + (row * w + j) * C;
          std::copy_n(image + (is.begin * W + js.begin) * C, C, best);
          for (std::int64_t i = is.begin; i < is.end; ++i) {
            for (std::int64_t k = js.begin; k < js.end; ++k) {
              const T* cell = image + (i * W + k) * C;
#pragma GCC ivdep
              for (std::int64_t c = 0; c < C; ++c) best[c] = beats(cell[c], best[c]) ? cell[c] : best[c];
            }
          }
        }
      }
    });
  });
}

void max_pool_backward(const Stream& stream, const Tensor& dy, const Tensor& x, Tensor* dx) {
  dispatch_float("max_pool", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t H = x.dim(1), W = x.dim(2), C = x.dim(3), h = dy.dim(1), w = dy.dim(2);
    const T *px = x.data<T>(), *pdy = dy.data<T>();
    T* pdx = dx->data<T>();

    // Where each window has its first maximum: 3 row + column, counted from cell (2 i - 1, 2 j - 1).
    const Tensor places = stream.empty(dy.shape(), DType::u8);
    std::uint8_t* place = places.data<std::uint8_t>();
    stream.parallel_blocks(dy.dim(0) * h, rows_per_block(w * C), [&](std::int64_t begin, std::int64_t end) {
      std::vector<T> best(static_cast<std::size_t>(C));
      std::vector<Place<T>> at(static_cast<std::size_t>(C));
      for (std::int64_t row = begin; row < end; ++row) {
        const T* image = px + row / h * H * W * C;
        const WindowRange is(row % h, H);
        for (std::int64_t j = 0; j < w; ++j) {
          const WindowRange js(j, W);
          const std::int64_t top = 2 * (row % h) - 1, left = 2 * j - 1;
          const auto number = [=](std::int64_t i, std::int64_t k) { return static_cast<Place<T>>(3 * (i - top) + k - left); };
          std::copy_n(image + (is.begin * W + js.begin) * C, C, best.data());
          std::fill(at.begin(), at.end(), number(is.begin, js.begin));
          for (std::int64_t i = is.begin; i < is.end; ++i) {
            for (std::int64_t k = js.begin; k < js.end; ++k)
              take_maximum(C, image + (i * W + k) * C, number(i, k), best.data(), at.data());
          }
          to_bytes(C, at.data(), place + (row * w + j) * C);
        }
      }
    });

    // Each cell gathers from the at most four windows that hold it: i or (i + 1) / 2 and likewise for columns.
    stream.parallel_blocks(x.dim(0) * H, rows_per_block(W * C), [&](std::int64_t begin, std::int64_t end) {
      std::fill(pdx + begin * W * C, pdx + end * W * C, T(0));
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t n = row / H, i = row % H;
        for (std::int64_t k = 0; k < W; ++k) {
          T* out = pdx + (row * W + k) * C;
          for (std::int64_t oi = i / 2; oi < std::min(h, (i + 1) / 2 + 1); ++oi) {
            for (std::int64_t oj = k / 2; oj < std::min(w, (k + 1) / 2 + 1); ++oj) {
              const std::int64_t from = ((n * h + oi) * w + oj) * C;
              add_where(C, place + from, static_cast<Place<T>>(3 * (i - 2 * oi + 1) + k - 2 * oj + 1), pdy + from, out);
            }
          }
        }
      }
    });
  });
}

void avg_pool_forward(const Stream& stream, const Tensor& x, Tensor& y) {
  dispatch_float("avg_pool", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t H = x.dim(1), W = x.dim(2), C = x.dim(3), h = y.dim(1), w = y.dim(2);
    const T* px = x.data<T>();
    T* py = y.data<T>();
    stream.parallel_blocks(y.dim(0) * h, rows_per_block(w * C), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t i = row % h;
        const std::int64_t down = 2 * i + 1 < H ? W * C : 0;   // 0: the cell itself stands in for one outside the map
        for (std::int64_t j = 0; j < w; ++j) {
          const std::int64_t right = 2 * j + 1 < W ? C : 0;
          const T* cell = px + ((row / h * H + 2 * i) * W + 2 * j) * C;
          T* out = py + (row * w + j) * C;
          // A partial window sums each real element twice or four times, so that a quarter is its mean, too.
#pragma GCC ivdep
          for (std::int64_t c = 0; c < C; ++c)
            out[c] = T(0.25) * ((cell[c] + cell[right + c]) + (cell[down + c] + cell[down + right + c]));
        }
      }
    });
  });
}

void avg_pool_backward(const Stream& stream, const Tensor& dy, Tensor* dx) {
  dispatch_float("avg_pool", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t H = dx->dim(1), W = dx->dim(2), C = dx->dim(3), h = dy.dim(1), w = dy.dim(2);
    const T* pdy = dy.data<T>();
    T* pdx = dx->data<T>();
    stream.parallel_blocks(dx->dim(0) * H, rows_per_block(W * C), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t i = row % H, height = (i | 1) < H ? 2 : 1;
        for (std::int64_t j = 0; j < W; ++j) {
          const std::int64_t width = (j | 1) < W ? 2 : 1;
          const T share = T(1) / static_cast<T>(height * width);
          const T* from = pdy + ((row / H * h + i / 2) * w + j / 2) * C;
          T* out = pdx + (row * W + j) * C;
#pragma GCC ivdep
          for (std::int64_t c = 0; c < C; ++c) out[c] = share * from[c];
        }
      }
    });
  });
}

void upsample_forward(const Stream& stream, const Tensor& x, Tensor& y) {
  dispatch_float("upsample", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t W = x.dim(2), C = x.dim(3);
    const T* px = x.data<T>();
    T* py = y.data<T>();
    stream.parallel_blocks(x.dim(0) * x.dim(1), rows_per_block(4 * W * C), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {   // one row of x becomes two equal rows of y
        T* out = py + 4 * row * W * C;
        for (std::int64_t j = 0; j < W; ++j) {
          const T* cell = px + (row * W + j) * C;
          std::copy_n(cell, C, out + 2 * j * C);
          std::copy_n(cell, C, out + (2 * j + 1) * C);
        }
        std::copy_n(out, 2 * W * C, out + 2 * W * C);
      }
    });
  });
}

void upsample_backward(const Stream& stream, const Tensor& dy, Tensor* dx) {
  dispatch_float("upsample", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::int64_t W = dx->dim(2), C = dx->dim(3);
    const T* pdy = dy.data<T>();
    T* pdx = dx->data<T>();
    stream.parallel_blocks(dx->dim(0) * dx->dim(1), rows_per_block(4 * W * C), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t j = 0; j < W; ++j) {
          const T *upper = pdy + (4 * row * W + 2 * j) * C, *lower = upper + 2 * W * C;
          T* out = pdx + (row * W + j) * C;
#pragma GCC ivdep
          for (std::int64_t c = 0; c < C; ++c) out[c] = (upper[c] + upper[C + c]) + (lower[c] + lower[C + c]);
        }
      }
    });
  });
}

}  // namespace detr::kernels::cpu

#include "kernels/conv2d.h"

#include <algorithm>

#include "kernels/activation.h"
#include "kernels/cpu/gemm.h"
#include "kernels/dispatch.h"
#include "kernels/linear.h"
#include "kernels/pointwise.h"

namespace detr::kernels::cpu {
namespace {

/// Windows that slide over a map (N, H, W, C): that of position (n, a, b) covers rows a * stride + top + i, i < kh, and columns
/// b * stride + left + j, j < kw, zeros where they leave the map. Positions are numbered row by row, image by image.
template <class T>
struct Windows {
  const T* map = nullptr;
  std::int64_t images = 0, height = 0, width = 0, channels = 0;
  std::int64_t kh = 0, kw = 0, stride = 1, top = 0, left = 0;
  std::int64_t rows = 0, cols = 0;   // positions of each image

  std::int64_t count() const { return images * rows * cols; }
  std::int64_t size() const { return kh * kw * channels; }
};

/// The windows of x that make the pixels of y.
template <class T>
Windows<T> windows_of(const Tensor& x, const Shape& weight, const Shape& y, const Conv2dOptions& options) {
  return {.map = x.data<T>(), .images = x.dim(0), .height = x.dim(1), .width = x.dim(2), .channels = x.dim(3),
          .kh = weight[1], .kw = weight[2], .stride = options.stride, .top = -options.padding, .left = -options.padding,
          .rows = y[1], .cols = y[2]};
}

/// im2col: windows [begin, end), each flattened to a row (kh, kw, C).
template <class T>
void copy_windows(const Windows<T>& w, std::int64_t begin, std::int64_t end, T* out) {
  const std::int64_t run = w.kw * w.channels;
  for (std::int64_t index = begin; index < end; ++index) {
    const std::int64_t image = index / (w.rows * w.cols), a = index / w.cols % w.rows, b = index % w.cols;
    const std::int64_t x = b * w.stride + w.left;
    // Columns [first, last) of the window lie on the map.
    const std::int64_t first = std::clamp<std::int64_t>(-x, 0, w.kw), last = std::clamp(w.width - x, first, w.kw);
    for (std::int64_t i = 0; i < w.kh; ++i, out += run) {
      const std::int64_t y = a * w.stride + w.top + i;
      if (y < 0 || y >= w.height || first == last) {
        std::fill_n(out, run, T{0});
        continue;
      }
      const T* in = w.map + ((image * w.height + y) * w.width + x + first) * w.channels;
      std::fill_n(out, first * w.channels, T{0});
      std::copy_n(in, (last - first) * w.channels, out + first * w.channels);
      std::fill_n(out + last * w.channels, (w.kw - last) * w.channels, T{0});
    }
  }
}

/// A convolution that is `linear` on the pixels.
bool is_pointwise(const Shape& weight, const Conv2dOptions& options) {
  return weight[1] == 1 && weight[2] == 1 && options.stride == 1 && options.padding == 0;
}

/// One direction of the gradient by x. The rows (or columns) first + stride a, a < count, of dx are reached by the taps
/// first_tap + stride t, t < taps, of the kernel alone, each from row a + shift - t of dy. So with the rows of one phase, one of
/// `stride`, the gradient is a convolution of stride 1 with a part of the kernel, flipped: no product with an inserted zero.
struct Phase {
  std::int64_t first_tap, taps, first, count, shift;

  Phase(std::int64_t residue, std::int64_t size, std::int64_t kernel, const Conv2dOptions& options) : first_tap(residue) {
    const std::int64_t s = options.stride;
    taps = residue < kernel ? (kernel - residue + s - 1) / s : 0;
    first = ((residue - options.padding) % s + s) % s;
    count = first < size ? (size - first + s - 1) / s : 0;
    shift = (first + options.padding - residue) / s;
  }
  /// Where the window of a = 0 begins on dy, and which tap of the kernel its element i meets.
  std::int64_t window_begin() const { return shift - (taps - 1); }
  std::int64_t tap(std::int64_t i, std::int64_t stride) const { return first_tap + stride * (taps - 1 - i); }
};

/// The taps of a vertical and a horizontal phase, flipped, as (taps, taps, O, I): runs of I elements move, nothing is transposed.
template <class T>
Tensor flipped_part(const Stream& stream, const Tensor& weight, std::int64_t stride, const Phase& v, const Phase& h) {
  const std::int64_t out_channels = weight.dim(0), in_channels = weight.dim(3);
  const Tensor part = stream.empty({v.taps, h.taps, out_channels, in_channels}, weight.dtype());
  stream.parallel_blocks(v.taps * h.taps, 1, [&](std::int64_t index, std::int64_t) {
    const std::int64_t ky = v.tap(index / h.taps, stride), kx = h.tap(index % h.taps, stride);
    const T* from = weight.data<T>() + (ky * weight.dim(2) + kx) * in_channels;
    T* to = part.data<T>() + index * out_channels * in_channels;
    for (std::int64_t o = 0; o < out_channels; ++o)
      std::copy_n(from + o * weight.dim(1) * weight.dim(2) * in_channels, in_channels, to + o * in_channels);
  });
  return part;
}

/// dx at the pixels of one vertical and one horizontal phase; every pixel belongs to one pair.
template <class T>
void input_gradient(const Stream& stream, const Tensor& dy, const Tensor& weight, std::int64_t stride, const Phase& v, const Phase& h,
                    Tensor& dx) {
  const std::int64_t in_channels = weight.dim(3);
  const Windows<T> windows{.map = dy.data<T>(), .images = dy.dim(0), .height = dy.dim(1), .width = dy.dim(2), .channels = dy.dim(3),
                           .kh = v.taps, .kw = h.taps, .stride = 1, .top = v.window_begin(), .left = h.window_begin(),
                           .rows = v.count, .cols = h.count};
  const std::int64_t size = windows.size();
  const Tensor part = flipped_part<T>(stream, weight, stride, v, h);
  const Matrix<const T> factor(part.data<T>(), size, in_channels);
  stream.parallel_blocks(windows.count(), row_grain(windows.count(), size * size_of(dx.dtype())), [&](std::int64_t begin, std::int64_t end) {
    const Tensor scratch = stream.empty({end - begin, size}, dx.dtype());
    copy_windows(windows, begin, end, scratch.data<T>());
    const Matrix<const T> columns(scratch.data<T>(), end - begin, size);
    if (stride == 1) {
      multiply(columns, factor, Matrix<T>(dx.data<T>() + begin * in_channels, end - begin, in_channels), Write::overwrite);
      return;
    }
    const Tensor pixels = stream.empty({end - begin, in_channels}, dx.dtype());
    multiply(columns, factor, Matrix<T>(pixels.data<T>(), end - begin, in_channels), Write::overwrite);
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t image = index / (v.count * h.count);
      const std::int64_t y = v.first + stride * (index / h.count % v.count), x = h.first + stride * (index % h.count);
      std::copy_n(pixels.data<T>() + (index - begin) * in_channels, in_channels,
                  dx.data<T>() + ((image * dx.dim(1) + y) * dx.dim(2) + x) * in_channels);
    }
  });
}

template <class T>
void weight_gradient(const Stream& stream, const Tensor& dy, const Windows<T>& windows, Tensor& dweight) {
  // A task makes the part of the windows that one kernel row covers, if that is wide enough for a good product, else all.
  constexpr std::int64_t kMinColumns = 192;
  const std::int64_t run = windows.kw * windows.channels, out_channels = dweight.dim(0);
  const std::int64_t kernel_rows = run >= kMinColumns ? 1 : windows.kh;
  const BlockOf<T> columns = [&](std::int64_t row_begin, std::int64_t row_end, std::int64_t col_begin, std::int64_t col_end,
                                 Tensor& scratch) {
    const std::int64_t rows = row_end - row_begin, cols = col_end - col_begin;
    if (!scratch.defined()) scratch = stream.empty({rows, cols}, dweight.dtype());   // a task's first block is its largest
    Windows<T> part = windows;
    part.top += col_begin / run;
    part.kh = kernel_rows;
    copy_windows(part, row_begin, row_end, scratch.data<T>());
    return Matrix<const T>(scratch.data<T>(), rows, cols);
  };
  sum_of_row_products(stream, Matrix<const T>(dy.data<T>(), windows.count(), out_channels), columns, kernel_rows * run,
                      Matrix<T>(dweight.data<T>(), out_channels, windows.size()));
}

}  // namespace

void conv2d_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Conv2dOptions& options, Tensor& y) {
  if (is_pointwise(weight.shape(), options)) {
    linear_forward(stream, x, weight.reshape({weight.dim(0), weight.dim(3)}), nullptr, y);
    return;
  }
  dispatch_float("conv2d", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Windows<T> windows = windows_of<T>(x, weight.shape(), y.shape(), options);
    const std::int64_t size = windows.size(), out_channels = weight.dim(0);
    const Matrix<const T> factor(weight.data<T>(), out_channels, size);
    stream.parallel_blocks(windows.count(), row_grain(windows.count(), size * size_of(x.dtype())), [&](std::int64_t begin, std::int64_t end) {
      const Tensor scratch = stream.empty({end - begin, size}, x.dtype());
      copy_windows(windows, begin, end, scratch.data<T>());
      multiply_nt(Matrix<const T>(scratch.data<T>(), end - begin, size), factor,
                  Matrix<T>(y.data<T>() + begin * out_channels, end - begin, out_channels), Write::overwrite);
    });
  });
}

void conv2d_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Conv2dOptions& options,
                     Tensor* dx, Tensor* dweight, bool add_dx, bool relu_x) {
  if (dx && relu_x) {
    cpu::conv2d_backward(stream, dy, x, weight, options, dx, dweight, add_dx, false);
    return cpu::activation_backward(stream, *dx, Tensor(), x, Activation::relu, dx);
  }
  if (dx && add_dx) {
    Tensor part = stream.empty_like(*dx);
    cpu::conv2d_backward(stream, dy, x, weight, options, &part, dweight, false, false);
    return accumulate(stream, part, *dx);
  }
  if (is_pointwise(weight.shape(), options)) {
    const Shape matrix{weight.dim(0), weight.dim(3)};
    Tensor dmatrix = dweight ? dweight->reshape(matrix) : Tensor();
    linear_backward(stream, dy, x, weight.reshape(matrix), dx, dweight ? &dmatrix : nullptr, nullptr, false);
    return;
  }
  dispatch_float("conv2d", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (std::int64_t pair = 0; dx && pair < options.stride * options.stride; ++pair) {
      const Phase v(pair / options.stride, x.dim(1), weight.dim(1), options), h(pair % options.stride, x.dim(2), weight.dim(2), options);
      input_gradient<T>(stream, dy, weight, options.stride, v, h, *dx);
    }
    if (dweight) weight_gradient<T>(stream, dy, windows_of<T>(x, weight.shape(), dy.shape(), options), *dweight);
  });
}

}  // namespace detr::kernels::cpu

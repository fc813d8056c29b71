#include "kernels/conv2d.h"

#include "kernels/cpu/gemm.h"
#include "kernels/dispatch.h"
#include "kernels/linear.h"

namespace detr::kernels::cpu {
namespace {

/// Windows that slide over a map (N, H, W, C): that of position (n, a, b) covers rows a * stride + top + i, i < kh, and columns
/// b * stride + left + j, j < kw, zeros where they leave the map. Numbered row by row, image by image.
template <class T>
struct Windows {
  const T* map = nullptr;
  std::int64_t images = 0, height = 0, width = 0, channels = 0;
  std::int64_t kh = 0, kw = 0, stride = 1, top = 0, left = 0;
  std::int64_t rows = 0, cols = 0;   // positions of each image

  std::int64_t count() const { return images * rows * cols; }
  std::int64_t size() const { return kh * kw * channels; }
};

/// im2col: windows [begin, end), each flattened to a row (kh, kw, C).
template <class T>
void copy_windows(const Windows<T>& w, std::int64_t begin, std::int64_t end, T* out) {
  const std::int64_t run = w.kw * w.channels;
  for (std::int64_t index = begin; index < end; ++index) {
    const std::int64_t a = index / w.cols % w.rows, b = index % w.cols, image = index / (w.rows * w.cols);
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

/// The windows of x that make the pixels of y.
template <class T>
Windows<T> windows_of(const Tensor& x, const Shape& weight, const Shape& y, const Conv2dOptions& options) {
  return {x.data<T>(), x.dim(0), x.dim(1), x.dim(2), x.dim(3), weight[1], weight[2], options.stride, -options.padding, -options.padding,
          y[1], y[2]};
}

bool is_pointwise(const Shape& weight, const Conv2dOptions& options) {
  return weight[1] == 1 && weight[2] == 1 && options.stride == 1 && options.padding == 0;
}

/// One direction of the gradient by x. The rows (or columns) h of dx with (h + padding) mod stride = phase are
/// h = first + stride a; only the taps phase + stride t reach them, each from row a + shift - t of dy. So each phase is a
/// convolution of dy with stride 1 and a flipped part of the weight, and no product with an inserted zero is made.
struct Phase {
  std::int64_t phase, first, count, taps, shift;

  Phase(std::int64_t phase_, std::int64_t size, std::int64_t kernel, const Conv2dOptions& options) : phase(phase_) {
    const std::int64_t s = options.stride;
    first = ((phase - options.padding) % s + s) % s;
    count = first < size ? (size - first + s - 1) / s : 0;
    taps = phase < kernel ? (kernel - phase + s - 1) / s : 0;
    shift = (first + options.padding - phase) / s;
  }
  /// Of tap i counted from the low end of the window on dy.
  std::int64_t kernel_index(std::int64_t i, std::int64_t stride) const { return phase + stride * (taps - 1 - i); }
  std::int64_t window_begin() const { return shift - (taps - 1); }
};

/// Pixels of dx of one vertical and one horizontal phase; every pixel belongs to one pair.
template <class T>
void input_gradient(const Stream& stream, const Tensor& dy, const Tensor& weight, const Conv2dOptions& options, const Phase& v, const Phase& h,
                    Tensor& dx) {
  const std::int64_t in_channels = weight.dim(3), out_channels = weight.dim(0), s = options.stride;
  const Windows<T> windows{dy.data<T>(),     dy.dim(0), dy.dim(1), dy.dim(2), out_channels, v.taps, h.taps, 1, v.window_begin(),
                           h.window_begin(), v.count,   h.count};
  // The taps of this phase, flipped, as (taps, taps, O, I): rows of I elements move, nothing is transposed.
  const Tensor part = stream.empty({windows.size(), in_channels}, dx.dtype());
  stream.parallel_blocks(v.taps * h.taps, 1, [&](std::int64_t tap, std::int64_t) {
    const std::int64_t ky = v.kernel_index(tap / h.taps, s), kx = h.kernel_index(tap % h.taps, s);
    for (std::int64_t o = 0; o < out_channels; ++o)
      std::copy_n(weight.data<T>() + ((o * weight.dim(1) + ky) * weight.dim(2) + kx) * in_channels, in_channels,
                  part.data<T>() + (tap * out_channels + o) * in_channels);
  });
  const Matrix<const T> factor(part.data<T>(), windows.size(), in_channels);
  stream.parallel_blocks(windows.count(), row_grain(windows.count(), windows.size(), sizeof(T)), [&](std::int64_t begin, std::int64_t end) {
    const Tensor columns = stream.empty({end - begin, windows.size()}, dx.dtype());
    copy_windows(windows, begin, end, columns.data<T>());
    const Matrix<const T> rows(columns.data<T>(), end - begin, windows.size());
    if (s == 1) {
      multiply(rows, factor, Matrix<T>(dx.data<T>() + begin * in_channels, end - begin, in_channels), Write::overwrite);
      return;
    }
    const Tensor pixels = stream.empty({end - begin, in_channels}, dx.dtype());
    multiply(rows, factor, Matrix<T>(pixels.data<T>(), end - begin, in_channels), Write::overwrite);
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t image = index / (v.count * h.count);
      const std::int64_t y = v.first + s * (index / h.count % v.count), x = h.first + s * (index % h.count);
      std::copy_n(pixels.data<T>() + (index - begin) * in_channels, in_channels,
                  dx.data<T>() + ((image * dx.dim(1) + y) * dx.dim(2) + x) * in_channels);
    }
  });
}

template <class T>
void weight_gradient(const Stream& stream, const Tensor& dy, const Windows<T>& windows, Tensor& dweight) {
  // Each task makes the windows of whole kernel rows; one row at a time where that leaves enough columns for a product.
  constexpr std::int64_t kMinColumns = 192;
  const std::int64_t run = windows.kw * windows.channels;
  const std::int64_t kernel_rows = run >= kMinColumns ? 1 : windows.kh;
  const BlockOf<T> block = [&](std::int64_t row_begin, std::int64_t row_end, std::int64_t col_begin, std::int64_t col_end, Tensor& scratch) {
    const std::int64_t rows = row_end - row_begin, cols = col_end - col_begin;
    if (!scratch.defined()) scratch = stream.empty({rows, cols}, dweight.dtype());   // the first block is the largest
    Windows<T> part = windows;
    part.top += col_begin / run;
    part.kh = kernel_rows;
    copy_windows(part, row_begin, row_end, scratch.data<T>());
    return Matrix<const T>(scratch.data<T>(), rows, cols);
  };
  const std::int64_t out_channels = dweight.dim(0);
  sum_of_row_products(stream, Matrix<const T>(dy.data<T>(), windows.count(), out_channels), block, kernel_rows * run,
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
    stream.parallel_blocks(windows.count(), row_grain(windows.count(), size, sizeof(T)), [&](std::int64_t begin, std::int64_t end) {
      const Tensor columns = stream.empty({end - begin, size}, x.dtype());
      copy_windows(windows, begin, end, columns.data<T>());
      multiply_nt(Matrix<const T>(columns.data<T>(), end - begin, size), factor,
                  Matrix<T>(y.data<T>() + begin * out_channels, end - begin, out_channels), Write::overwrite);
    });
  });
}

void conv2d_backward(const Stream& stream, const Tensor& dy, const Tensor& x, const Tensor& weight, const Conv2dOptions& options,
                     Tensor* dx, Tensor* dweight) {
  if (is_pointwise(weight.shape(), options)) {
    const Shape matrix{weight.dim(0), weight.dim(3)};
    Tensor flat = dweight ? dweight->reshape(matrix) : Tensor();
    linear_backward(stream, dy, x, weight.reshape(matrix), dx, dweight ? &flat : nullptr, nullptr);
    return;
  }
  dispatch_float("conv2d", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (dx)
      for (std::int64_t v = 0; v < options.stride; ++v)
        for (std::int64_t h = 0; h < options.stride; ++h)
          input_gradient<T>(stream, dy, weight, options, Phase(v, x.dim(1), weight.dim(1), options), Phase(h, x.dim(2), weight.dim(2), options),
                            *dx);
    if (dweight) weight_gradient<T>(stream, dy, windows_of<T>(x, weight.shape(), dy.shape(), options), *dweight);
  });
}

}  // namespace detr::kernels::cpu

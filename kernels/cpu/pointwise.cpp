#include "kernels/pointwise.h"

#include <array>

#include "kernels/cpu/blocks.h"
#include "kernels/dispatch.h"

namespace detr::kernels::cpu {

void add_forward(const Stream& stream, const Tensor& a, const Tensor& b, Tensor& y) {
  dispatch_float("add", a.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *pa = a.data<T>(), *pb = b.data<T>();
    T* py = y.data<T>();
    const std::int64_t period = b.numel();
    stream.parallel_blocks(a.numel(), kBlockElements, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t from = begin; from < end;) {   // runs that do not wrap around in b
        const std::int64_t offset = from % period, length = std::min(end - from, period - offset);
#pragma GCC ivdep
        for (std::int64_t i = 0; i < length; ++i) py[from + i] = pa[from + i] + pb[offset + i];
        from += length;
      }
    });
  });
}

void add_backward(const Stream& stream, const Tensor& dy, Tensor* da, Tensor* db) {
  if (da) cast(stream, dy, *da);
  if (!db) return;
  if (db->numel() == dy.numel()) {
    cast(stream, dy, *db);
    return;
  }
  dispatch_float("add", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* pdy = dy.data<T>();
    T* pdb = db->data<T>();
    const std::int64_t period = db->numel(), repeats = period ? dy.numel() / period : 0;
    constexpr std::int64_t kColumns = 256;
    stream.parallel_blocks(period, kColumns, [&](std::int64_t begin, std::int64_t end) {
      std::array<double, kColumns> sums{};
      for (std::int64_t r = 0; r < repeats; ++r) {
#pragma GCC ivdep
        for (std::int64_t i = begin; i < end; ++i) sums[static_cast<std::size_t>(i - begin)] += pdy[r * period + i];
      }
      for (std::int64_t i = begin; i < end; ++i) pdb[i] = static_cast<T>(sums[static_cast<std::size_t>(i - begin)]);
    });
  });
}

void accumulate(const Stream& stream, const Tensor& x, Tensor& into) {
  dispatch_float("accumulate", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = x.data<T>();
    T* to = into.data<T>();
    stream.parallel_blocks(x.numel(), kBlockElements, [&](std::int64_t begin, std::int64_t end) {
#pragma GCC ivdep
      for (std::int64_t i = begin; i < end; ++i) to[i] += from[i];
    });
  });
}

void fill(const Stream& stream, double value, Tensor& into) {
  dispatch_float("fill", into.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    T* to = into.data<T>();
    stream.parallel_blocks(into.numel(), kBlockElements,
                           [&](std::int64_t begin, std::int64_t end) { std::fill(to + begin, to + end, static_cast<T>(value)); });
  });
}

void scale(const Stream& stream, const Tensor& x, double factor, Tensor& y) {
  dispatch_float("scale", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* from = x.data<T>();
    T* to = y.data<T>();
    const T f = static_cast<T>(factor);
    stream.parallel_blocks(x.numel(), kBlockElements, [&](std::int64_t begin, std::int64_t end) {
#pragma GCC ivdep
      for (std::int64_t i = begin; i < end; ++i) to[i] = f * from[i];
    });
  });
}

void sum_forward(const Stream&, std::span<const Tensor> inputs, Tensor& total) {
  dispatch_float("sum", total.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    double sum = 0;
    for (const Tensor& input : inputs)
      for (const T value : input.span<T>()) sum += value;
    total.data<T>()[0] = static_cast<T>(sum);
  });
}

void sum_backward(const Stream& stream, const Tensor& dtotal, std::span<Tensor* const> dinputs) {
  dispatch_float("sum", dtotal.dtype(), [&](auto tag) {
    const double value = dtotal.data<typename decltype(tag)::type>()[0];
    for (Tensor* dinput : dinputs)
      if (dinput) fill(stream, value, *dinput);
  });
}

void cast(const Stream& stream, const Tensor& x, Tensor& y) {
  const auto convert = [&](auto* to, const auto* from, const auto& one) {
    stream.parallel_blocks(x.numel(), kBlockElements, [&](std::int64_t begin, std::int64_t end) {
#pragma GCC ivdep
      for (std::int64_t i = begin; i < end; ++i) to[i] = one(from[i]);
    });
  };
  if (y.dtype() == DType::bf16) {
    DETR_CHECK(x.dtype() == DType::f32, "cast: to bf16 from f32 alone, got ", x);
    return convert(y.data<BFloat16>(), x.data<float>(), to_bf16);
  }
  dispatch_float("cast", y.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto plain = [](auto value) { return static_cast<T>(value); };
    switch (x.dtype()) {
      case DType::f32: convert(y.data<T>(), x.data<float>(), plain); break;
      case DType::f64: convert(y.data<T>(), x.data<double>(), plain); break;
      case DType::bf16: convert(y.data<T>(), x.data<BFloat16>(), [](BFloat16 value) { return static_cast<T>(to_float(value)); }); break;
      case DType::u8: convert(y.data<T>(), x.data<std::uint8_t>(), plain); break;
      case DType::i64: convert(y.data<T>(), x.data<std::int64_t>(), plain); break;
    }
  });
}

void mask_rows(const Stream& stream, const Tensor& x, const Tensor& mask, Tensor& y) {
  dispatch_float("mask_rows", x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* px = x.data<T>();
    T* py = y.data<T>();
    const std::uint8_t* keep = mask.data<std::uint8_t>();
    const std::int64_t width = x.dim(-1), period = mask.numel();
    stream.parallel_blocks(x.rows(), rows_per_block(width), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        if (keep[r % period]) std::copy_n(px + r * width, width, py + r * width);
        else std::fill_n(py + r * width, width, T(0));
      }
    });
  });
}

void images_to_float(const Stream& stream, const Tensor& images, Tensor& y) {
  dispatch_float("images_to_float", y.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::array<T, 256> level{};   // a division for each element would cost more than the rest
    for (std::size_t i = 0; i < level.size(); ++i) level[i] = static_cast<T>(i) / T(255);
    const std::int64_t H = images.dim(1), W = images.dim(2), C = images.dim(3), h = y.dim(1), w = y.dim(2);
    const std::uint8_t* from = images.data<std::uint8_t>();
    T* to = y.data<T>();
    stream.parallel_blocks(y.dim(0) * h, rows_per_block(w * C), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t n = row / h, i = row % h;
        const std::uint8_t* source = from + (n * H + i * H / h) * W * C;
        T* target = to + row * w * C;
        for (std::int64_t j = 0; j < w; ++j)
          for (std::int64_t c = 0; c < C; ++c) target[j * C + c] = level[source[j * W / w * C + c]];
      }
    });
  });
}

}  // namespace detr::kernels::cpu

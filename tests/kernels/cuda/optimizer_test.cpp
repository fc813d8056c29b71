#include "kernels/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;
using namespace detr::kernels;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

const Stream& host() {
  static const Stream stream = Stream::cpu(2);
  return stream;
}

/// The tensor on the GPU with its dtype and bits.
Tensor same_on_gpu(const Tensor& x) {
  const Tensor y = gpu().to_device(x);
  gpu().wait();
  return y;
}

/// The values in f32 memory of the GPU, `shift` elements behind an aligned address, between guard words.
struct Buffer {
  Guarded memory;
  Tensor tensor;

  Buffer(const Tensor& values, std::int64_t shift) : memory({values.numel() + shift}, DType::f32), tensor(memory.tensor.view(shift, values.shape())) {
    if (values.numel()) gpu().copy(on_gpu(values, DType::f32), tensor);
  }
  Tensor values() const {
    const Tensor all = memory.values();
    return all.view(all.numel() - tensor.numel(), tensor.shape());
  }
};

/// Segments of the given sizes with `gap` elements before each, and the flat buffers, in which all between segments counts too.
struct Flat {
  Segments segments, segments_gpu;
  std::int64_t size = 0;
  Tensor grads, weights, exp_avg, exp_avg_sq;   // f64, rounded to f32
  Tensor inside;                                // u8: in a used segment

  Flat(const std::vector<std::int64_t>& sizes, std::int64_t gap) {
    std::vector<std::int64_t> begin, steps;
    std::vector<double> lr, decay;
    std::vector<double> used;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      size += gap;
      begin.push_back(size);
      size += sizes[i];
      lr.push_back(0.001 * static_cast<double>(i + 1));
      decay.push_back(i % 2 ? 0.01 : 0);
      steps.push_back(static_cast<std::int64_t>(i * i % 7));
      used.push_back(i % 5 == 3 ? 0 : static_cast<double>(1 + i % 3));
    }
    size += gap;
    const Shape shape{std::ssize(sizes)};
    segments = {host_tensor(shape, begin), host_tensor(shape, sizes), host_tensor(shape, lr), host_tensor(shape, decay), host_tensor(shape, steps), host_tensor(shape, used)};
    segments_gpu = {same_on_gpu(segments.begin), same_on_gpu(segments.count), same_on_gpu(segments.lr), same_on_gpu(segments.weight_decay),
                    same_on_gpu(segments.steps), same_on_gpu(segments.used)};
    inside = host_zeros({size}, DType::u8);
    for (std::size_t i = 0; i < sizes.size(); ++i) std::fill_n(inside.data<std::uint8_t>() + begin[i], sizes[i], static_cast<std::uint8_t>(used[i] != 0));
    grads = rounded(random({size}, DType::f64, 1), DType::f32);
    weights = rounded(random({size}, DType::f64, 2), DType::f32);
    exp_avg = rounded(random({size}, DType::f64, 3), DType::f32);
    exp_avg_sq = rounded(random({size}, DType::f64, 4), DType::f32);
    for (double& v : exp_avg_sq.span<double>()) v = std::abs(v);
    // What belongs to no used segment must reach no result.
    for (std::int64_t i = 0; i < size; ++i) {
      if (!inside.data<std::uint8_t>()[i]) grads.data<double>()[i] = kNaN;
    }
  }
};

Tensor scalars_with(double lr_factor, double clip, double apply, double ema_updates) {
  Tensor s = host_zeros({kScalars}, DType::f64);
  s.data<double>()[kLrFactor] = lr_factor;
  s.data<double>()[kClip] = clip;
  s.data<double>()[kApply] = apply;
  s.data<double>()[kEmaUpdates] = ema_updates;
  return s;
}

Tensor clone(const Tensor& x) { return host_tensor<double>(x.shape(), std::vector<double>(x.span<double>().begin(), x.span<double>().end())); }

void check_norms(const Flat& flat, std::int64_t shift) {
  Tensor norms = host_zeros(flat.segments.begin.shape(), DType::f64);
  squared_norms(host(), flat.segments, flat.grads, norms);
  const Buffer grads(flat.grads, shift);
  Guarded first(norms.shape(), DType::f64), again(norms.shape(), DType::f64);
  squared_norms(gpu(), flat.segments_gpu, grads.tensor, first.tensor);
  squared_norms(gpu(), flat.segments_gpu, grads.tensor, again.tensor);
  // Sums of positive terms in f64, each sum a relative error of 2^-53 for each of its additions.
  expect_near(first.values(), norms, 1e-16 * static_cast<double>(flat.size + 1), 0);
  expect_same_bits(again.values(), first.values());

  for (const double max_norm : {0.0, 0.1, 1e9}) {
    Tensor scalars = scalars_with(1, 7, 1, 3), scalars_gpu = same_on_gpu(scalars);
    finish_norm(host(), norms, max_norm, scalars);
    finish_norm(gpu(), first.tensor, max_norm, scalars_gpu);
    expect_close(from_gpu(scalars_gpu), scalars, 1e-16 * static_cast<double>(flat.size + 1000));
  }
}

/// Two updates against the oracle; the weights after them.
Tensor check_adamw(const Flat& flat, std::int64_t shift, double apply) {
  Segments segments = flat.segments, segments_gpu = flat.segments_gpu;
  segments.steps = host_tensor(flat.segments.steps.shape(), std::vector<std::int64_t>(flat.segments.steps.span<std::int64_t>().begin(), flat.segments.steps.span<std::int64_t>().end()));
  segments_gpu.steps = same_on_gpu(segments.steps);
  Tensor weights = clone(flat.weights), exp_avg = clone(flat.exp_avg), exp_avg_sq = clone(flat.exp_avg_sq);
  const Tensor scalars = scalars_with(0.5, 0.25, apply, 0);
  const Buffer grads(flat.grads, shift);
  Buffer w(weights, shift), m(exp_avg, shift), v(exp_avg_sq, shift);
  // Two updates: the second sees what the first has counted.
  for (int i = 0; i < 2; ++i) {
    adamw(host(), segments, AdamWOptions(), scalars, flat.grads, weights, exp_avg, exp_avg_sq);
    adamw(gpu(), segments_gpu, AdamWOptions(), same_on_gpu(scalars), grads.tensor, w.tensor, m.tensor, v.tensor);
  }
  // A dozen f32 roundings in each of two updates, relative to the largest operand.
  const double tolerance = 32 * roundoff(DType::f32);
  expect_near(w.values(), weights, tolerance);
  expect_near(m.values(), exp_avg, tolerance);
  expect_near(v.values(), exp_avg_sq, tolerance);
  expect_same_bits(from_gpu(segments_gpu.steps), segments.steps);
  std::int64_t touched = 0;
  const Tensor got = w.values(), got_m = m.values(), got_v = v.values();
  for (std::int64_t i = 0; i < flat.size; ++i) {
    if (apply == 1 && flat.inside.data<std::uint8_t>()[i]) continue;
    touched += got.data<double>()[i] != flat.weights.data<double>()[i] || got_m.data<double>()[i] != flat.exp_avg.data<double>()[i] ||
               got_v.data<double>()[i] != flat.exp_avg_sq.data<double>()[i];
  }
  CHECK(touched == 0);
  return got;
}

/// Sizes that end before, at and behind the borders of vectors and tiles.
const std::vector<std::vector<std::int64_t>> kSizes = {
    {}, {0}, {1}, {31}, {33}, {3, 0, 1, 31, 33, 1, 0, 2}, {1024}, {1023, 1, 1025}, {4096, 0, 7, 5000, 511, 513}, std::vector<std::int64_t>(700, 3), std::vector<std::int64_t>(33, 64)};

}  // namespace

TEST_CASE("optimizer: norms on CUDA agree with the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const auto& sizes : kSizes) {
    for (const std::int64_t gap : {0, 1, 64}) {
      const Flat flat(sizes, gap);
      for (const std::int64_t shift : {0, 1}) check_norms(flat, shift);
    }
  }
  check_norms(Flat({589824, 512, 512, 262144, 256, 1000001}, 64), 0);
}

TEST_CASE("optimizer: a gradient that is not finite stops the step on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const double bad : {kNaN, kInf, 3e38}) {
    Flat flat({40, 2000, 7}, 5);
    flat.grads.data<double>()[60] = bad;
    const Buffer grads(rounded(flat.grads, DType::f32), 0);
    Guarded norms({3}, DType::f64);
    squared_norms(gpu(), flat.segments_gpu, grads.tensor, norms.tensor);
    const std::vector<double> values = values_of(norms.values());
    CHECK(std::isfinite(values[0]));
    CHECK(std::isfinite(values[1]) == std::isfinite(bad));   // squares of large values fit f64
    CHECK(std::isfinite(values[2]));
    Tensor scalars = same_on_gpu(scalars_with(1, 7, 1, 3));
    finish_norm(gpu(), norms.tensor, 0.1, scalars);
    CHECK(values_of(from_gpu(scalars))[kApply] == (std::isfinite(bad) ? 1 : 0));
  }
}

TEST_CASE("optimizer: adamw on CUDA agrees with the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const auto& sizes : kSizes) {
    for (const std::int64_t gap : {0, 1, 64}) {
      const Flat flat(sizes, gap);
      for (const std::int64_t shift : {0, 1}) {
        for (const double apply : {0.0, 1.0}) check_adamw(flat, shift, apply);
      }
    }
  }
  const Flat real({589824, 512, 512, 262144, 256, 100001}, 64);
  const Tensor first = check_adamw(real, 0, 1), again = check_adamw(real, 0, 1);
  expect_same_bits(again, first);
}

TEST_CASE("optimizer: the moving average on CUDA agrees with the CPU", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const std::int64_t size : {0, 1, 3, 31, 33, 1024, 1027, 1000003}) {
    for (const std::int64_t shift : {0, 1}) {
      for (const double apply : {0.0, 1.0}) {
        INFO("size " << size << " shift " << shift << " apply " << apply);
        const Tensor weights = rounded(random({size}, DType::f64, 1), DType::f32);
        Tensor ema = rounded(random({size}, DType::f64, 2), DType::f32), scalars = scalars_with(1, 1, apply, 1999), scalars_gpu = same_on_gpu(scalars);
        const Buffer weights_gpu(weights, shift);
        Buffer ema_gpu(ema, shift);
        for (int i = 0; i < 2; ++i) {
          update_ema(host(), 0.9999, 2000, scalars, weights, ema);
          update_ema(gpu(), 0.9999, 2000, scalars_gpu, weights_gpu.tensor, ema_gpu.tensor);
        }
        expect_near(ema_gpu.values(), ema, 8 * roundoff(DType::f32));   // two updates of four roundings
        expect_same_bits(from_gpu(scalars_gpu), scalars);
      }
    }
  }
}

TEST_CASE("optimizer: check_step on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const auto applied = [](DType dtype, double total, const std::vector<std::vector<std::int64_t>>& statuses, double apply) {
    std::vector<Tensor> tensors;
    for (const auto& status : statuses) tensors.push_back(same_on_gpu(host_tensor(Shape{std::ssize(status)}, status)));
    Tensor scalars = same_on_gpu(scalars_with(2, 3, apply, 4));
    check_step(gpu(), on_gpu(host_tensor<double>({1}, {total}), dtype), tensors, scalars);
    const std::vector<double> values = values_of(from_gpu(scalars));
    CHECK((values[kLrFactor] == 2 && values[kClip] == 3 && values[kEmaUpdates] == 4));
    return values[kApply];
  };
  std::vector<std::int64_t> healthy(777, -1), ill = healthy;
  ill.back() = 3;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    CHECK(applied(dtype, 5, {}, 1) == 1);
    CHECK(applied(dtype, 5, {healthy, {}, {-1}}, 1) == 1);
    CHECK(applied(dtype, 5, {healthy}, 0) == 0);   // never back to 1
    CHECK(applied(dtype, 5, {healthy, ill}, 1) == 0);
    CHECK(applied(dtype, 5, {{-1, 0}}, 1) == 0);
    for (const double bad : {kNaN, kInf, -kInf}) CHECK(applied(dtype, bad, {healthy}, 1) == 0);
    CHECK(applied(dtype, 5, std::vector<std::vector<std::int64_t>>(kMaxStatuses, {-1}), 1) == 1);
  }
}

TEST_CASE("optimizer: check_votes on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const auto applied = [](const std::vector<double>& votes, double apply) {
    Tensor scalars = same_on_gpu(scalars_with(2, 3, apply, 4));
    check_votes(gpu(), same_on_gpu(host_tensor(Shape{std::ssize(votes)}, votes)), 3, scalars);
    const std::vector<double> values = values_of(from_gpu(scalars));
    CHECK((values[kLrFactor] == 2 && values[kClip] == 3 && values[kEmaUpdates] == 4));
    return values[kApply];
  };
  CHECK(applied({3, 3}, 1) == 1);
  CHECK(applied({3}, 0) == 0);   // never back to 1
  CHECK(applied({3, 2}, 1) == 0);
  CHECK(applied({kNaN, 3}, 1) == 0);
}

TEST_CASE("optimizer: restore_unless_applied on CUDA", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const std::int64_t size : {0, 1, 31, 33, 1024, 500000}) {
    for (const std::int64_t shift : {0, 1}) {
      for (const double apply : {0.0, 1.0}) {
        INFO("size " << size << " shift " << shift << " apply " << apply);
        const Tensor kept = rounded(random({size}, DType::f64, 1), DType::f32), changed = rounded(random({size}, DType::f64, 2), DType::f32);
        const Buffer kept_gpu(kept, shift);
        Buffer buffers(changed, shift);
        restore_unless_applied(gpu(), same_on_gpu(scalars_with(1, 1, apply, 0)), kept_gpu.tensor, buffers.tensor);
        expect_same_bits(buffers.values(), apply == 1 ? changed : kept);
      }
    }
  }
}

#include "kernels/deformable_attention.h"

#include <cmath>
#include <limits>

#include "runtime/random.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;
using kernels::deformable_attention_backward;
using kernels::deformable_attention_forward;
using kernels::DeformableOptions;
using kernels::Sampling;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Case {
  Tensor value, offsets, logits, reference, dout;
  DeformableOptions options;
};

struct Result {
  Tensor out, dvalue, doffsets, dlogits;
};

Result run(const Case& c, int threads = 1) {
  const Stream stream = Stream::cpu(threads);
  const DType dtype = c.value.dtype();
  Result r{host_zeros(c.dout.shape(), dtype), host_zeros(c.value.shape(), dtype), host_zeros(c.offsets.shape(), dtype),
           host_zeros(c.logits.shape(), dtype)};
  deformable_attention_forward(stream, c.value, c.offsets, c.logits, c.reference, c.options, r.out);
  deformable_attention_backward(stream, c.dout, c.value, c.offsets, c.logits, c.reference, c.options, &r.dvalue, &r.doffsets, &r.dlogits);
  return r;
}

/// Numbers on a grid that any language repeats exactly.
Tensor ramp(const Shape& shape, std::int64_t step, double low, double high) {
  Tensor x = host_zeros(shape, DType::f64);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<double>()[i] = low + (high - low) * static_cast<double>(i * step % 23) / 23;
  return x;
}

template <class T>
Tensor cast(const Tensor& x) {
  const std::vector<double> values = values_of(x);
  return host_tensor<T>(x.shape(), std::vector<T>(values.begin(), values.end()));
}

Tensor random(const Shape& shape, double low, double high, std::uint64_t seed) {
  Tensor x = host_zeros(shape, DType::f64);
  for (std::int64_t i = 0; i < x.numel(); ++i)
    x.data<double>()[i] = low + (high - low) * uniform(RandomKey(seed), static_cast<std::uint64_t>(i));
  return x;
}

std::int64_t total(const std::vector<std::int64_t>& counts) {
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) sum += count;
  return sum;
}

/// Values, offsets and boxes such that some points fall outside the maps.
Case random_case(std::int64_t images, std::int64_t queries, std::int64_t depth, const DeformableOptions& options) {
  std::int64_t tokens = 0;
  for (const auto& [h, w] : options.levels) tokens += h * w;
  const std::int64_t heads = options.heads, points = total(options.points);
  return {random({images, tokens, heads * depth}, -1, 1, 1), random({images, queries, heads * points * 2}, -4, 4, 2),
          random({images, queries, heads * points}, -2, 2, 3), random({images, queries, 4}, 0.05, 0.95, 4),
          random({images, queries, heads * depth}, -1, 1, 5), options};
}

/// A map whose channels are its own coordinates (column, row), sampled by one point at `x`, `y`.
template <class T>
std::vector<double> sample_coordinates(std::int64_t h, std::int64_t w, T x, T y, Sampling sampling) {
  Tensor value = host_zeros({1, h * w, 2}, dtype_of<T>);
  for (std::int64_t i = 0; i < h * w; ++i) {
    value.data<T>()[2 * i] = static_cast<T>(i % w);
    value.data<T>()[2 * i + 1] = static_cast<T>(i / w);
  }
  const Case c{value, host_tensor<T>({1, 1, 2}, {0, 0}), host_tensor<T>({1, 1, 1}, {0}), host_tensor<T>({1, 1, 4}, {x, y, T(0.5), T(0.5)}),
               host_tensor<T>({1, 1, 2}, {1, 1}), {1, {{h, w}}, {1}, 0.5, sampling}};
  return values_of(run(c).out);
}

/// The formula in f64, corner by corner.
Tensor plain_forward(const Case& c) {
  const std::int64_t images = c.value.dim(0), queries = c.offsets.dim(1), heads = c.options.heads, points = total(c.options.points);
  const std::int64_t tokens = c.value.dim(1), width = c.value.dim(2), depth = width / heads;
  const std::vector<double> value = values_of(c.value), offsets = values_of(c.offsets), logits = values_of(c.logits), reference = values_of(c.reference);
  Tensor out = host_zeros({images, queries, width}, DType::f64);
  for (std::int64_t row = 0; row < images * queries; ++row) {
    const double* box = &reference[static_cast<std::size_t>(row * 4)];
    for (std::int64_t a = 0; a < heads; ++a) {
      double sum = 0;
      for (std::int64_t k = 0; k < points; ++k) sum += std::exp(logits[static_cast<std::size_t>((row * heads + a) * points + k)]);
      std::int64_t k = 0, first = 0;
      for (std::size_t level = 0; level < c.options.levels.size(); ++level) {
        const auto [h, w] = c.options.levels[level];
        for (std::int64_t point = 0; point < c.options.points[level]; ++point, ++k) {
          const auto slot = static_cast<std::size_t>((row * heads + a) * points + k);
          const double weight = std::exp(logits[slot]) / sum, scale = c.options.offset_scale / static_cast<double>(c.options.points[level]);
          const double u = (box[0] + offsets[2 * slot] * box[2] * scale) * static_cast<double>(w) - 0.5;
          const double t = (box[1] + offsets[2 * slot + 1] * box[3] * scale) * static_cast<double>(h) - 0.5;
          for (std::int64_t i = 0; i < h; ++i) {
            for (std::int64_t j = 0; j < w; ++j) {   // a hat function over each cell
              const double hat = std::max(0.0, 1 - std::abs(u - static_cast<double>(j))) * std::max(0.0, 1 - std::abs(t - static_cast<double>(i)));
              const std::int64_t token = row / queries * tokens + first + i * w + j;
              for (std::int64_t e = 0; e < depth; ++e)
                out.data<double>()[row * width + a * depth + e] += weight * hat * value[static_cast<std::size_t>(token * width + a * depth + e)];
            }
          }
        }
        first += h * w;
      }
    }
  }
  return out;
}

void expect_same_result(const Result& a, const Result& b) {
  expect_same_bits(a.out, b.out);
  expect_same_bits(a.dvalue, b.dvalue);
  expect_same_bits(a.doffsets, b.doffsets);
  expect_same_bits(a.dlogits, b.dlogits);
}

Case recorded_case(Sampling sampling) {
  return {ramp({1, 16, 6}, 7, -1, 1), ramp({1, 2, 12}, 5, -2.5, 2.5), ramp({1, 2, 6}, 9, -1, 1),
          host_tensor<double>({1, 2, 4}, {0.45, 0.55, 0.5, 0.3, 0.9, 0.2, 0.35, 0.8}), ramp({1, 2, 6}, 11, -1, 1),
          {2, {{3, 4}, {2, 2}}, {2, 1}, 0.5, sampling}};
}

void expect_recorded(const Tensor& got, const std::vector<double>& wanted) {
  expect_close(got, host_tensor<double>(got.shape(), wanted), 1e-7, 1e-9);
}

/// Sum of squares, and sum of products with a ramp: all elements in two numbers.
void expect_sums(const Tensor& x, double squares, double products) {
  const Tensor r = ramp(x.shape(), 13, -1, 1);
  double s = 0, p = 0;
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    s += x.data<double>()[i] * x.data<double>()[i];
    p += x.data<double>()[i] * r.data<double>()[i];
  }
  expect_close(s, squares, 1e-10);
  expect_close(p, products, 1e-10);
}

}  // namespace

TEST_CASE("deformable_attention: worked by hand", "[cpu]") {
  // A 2 x 2 map 1 2 / 3 4. Point 0 lies in its middle: 2.5. Point 1, with an offset of 1, lies at x = 0.5 + 1 * 1 * 0.5 / 2 =
  // 0.75, the middle of column 1, and between the rows: 3. The weights are 1/4 and 3/4.
  Case c{host_tensor<double>({1, 4, 1}, {1, 2, 3, 4}), host_tensor<double>({1, 1, 4}, {0, 0, 1, 0}),
         host_tensor<double>({1, 1, 2}, {0, std::log(3.0)}), host_tensor<double>({1, 1, 4}, {0.5, 0.5, 1, 1}), host_tensor<double>({1, 1, 1}, {1}),
         {1, {{2, 2}}, {2}, 0.5, Sampling::bilinear}};
  const Result r = run(c);
  expect_close(r.out.data<double>()[0], 0.25 * 2.5 + 0.75 * 3, 1e-14);
  // dw = (2.5, 3), mean 2.875
  expect_close(r.dlogits, host_tensor<double>({1, 1, 2}, {0.25 * -0.375, 0.75 * 0.125}), 1e-13);
  expect_close(r.dvalue, host_tensor<double>({1, 4, 1}, {0.0625, 0.0625 + 0.375, 0.0625, 0.0625 + 0.375}), 1e-14);
  // One unit of offset moves a point by 2 / 2 * 0.5 = 0.5 cells. At point 0 the slope is 1 in x and 2 in y. At point 1, on a grid
  // line, the cell to the right counts: it is outside, so the slope in x is 0 - 3.
  expect_close(r.doffsets, host_tensor<double>({1, 1, 4}, {0.25 * 0.5, 0.25 * 1, 0.75 * 0.5 * -3, 0.75 * 1}), 1e-13);
}

TEST_CASE("deformable_attention: locations of the initial offsets", "[cpu]") {
  // Head 1 points along (1, 1); slot j is j + 1 steps away. Box (.5, .5, .2, .4), four points on an 80 x 80 map.
  const double wanted_bilinear[4][2] = {{41.5, 43.5}, {43.5, 47.5}, {45.5, 51.5}, {47.5, 55.5}};
  const double wanted_discrete[4][2] = {{42, 44}, {44, 48}, {46, 52}, {48, 56}};
  Tensor value = host_zeros({1, 6400, 2}, DType::f64);
  for (std::int64_t i = 0; i < 6400; ++i) {
    value.data<double>()[2 * i] = static_cast<double>(i % 80);
    value.data<double>()[2 * i + 1] = static_cast<double>(i / 80);
  }
  for (std::int64_t slot = 0; slot < 4; ++slot) {
    Tensor logits = host_zeros({1, 1, 4}, DType::f64);
    for (std::int64_t k = 0; k < 4; ++k) logits.data<double>()[k] = k == slot ? 0 : -1e30;   // one slot alone
    Case c{value, host_tensor<double>({1, 1, 8}, {1, 1, 2, 2, 3, 3, 4, 4}), logits, host_tensor<double>({1, 1, 4}, {0.5, 0.5, 0.2, 0.4}),
           host_tensor<double>({1, 1, 2}, {1, 1}), {1, {{80, 80}}, {4}, 0.5, Sampling::bilinear}};
    expect_close(run(c).out, host_tensor<double>({1, 1, 2}, {wanted_bilinear[slot][0], wanted_bilinear[slot][1]}), 1e-13);
    c.options.sampling = Sampling::discrete;
    expect_close(run(c).out, host_tensor<double>({1, 1, 2}, {wanted_discrete[slot][0], wanted_discrete[slot][1]}), 0);
  }
}

TEST_CASE("deformable_attention: recorded from PyTorch, bilinear", "[cpu]") {
  const Result r = run(recorded_case(Sampling::bilinear));
  expect_recorded(r.out, {0.01704903677, -0.3461693636, -0.012761618, -0.03040095015, -0.1343515769, 0.007677667592, 0.12845555, 0.0294832328,
                          -0.2557426844, 0.01164483622, 0.02156451152, -0.4347405523});
  expect_recorded(r.doffsets, {-0.01822262747, 0.0005816299838, -0.0995654189, -0.08529065814, 0.2107807625, -0.0872099563, -0.01519293408,
                               0.01053870842, -0.03486345776, 0.03243332498, -0.02723037518, 0.1389230062, -0.04230581829, -0.09069583478,
                               -0.02887769369, -0.1638152806, 0.02947254989, -0.136054351, 0, 0, 0.02113322129, -0.4502670006, 0, 0});
  expect_recorded(r.dlogits, {0.1440949254, 0.1327252319, -0.2768201574, 0.0008527126334, -0.03423503378, 0.03338232114, 0.1068698202,
                              -0.05836571896, -0.04850410121, -0.0562125677, 0.09260488714, -0.03639231943});
  expect_sums(r.dvalue, 0.616448862858, 0.167692249848);
}

TEST_CASE("deformable_attention: recorded from PyTorch, discrete", "[cpu]") {
  const Result r = run(recorded_case(Sampling::discrete));
  expect_recorded(r.out, {0.06306640595, -0.528534925, 0.08016072718, -0.2432290644, 0.3654665878, -0.2261347432, 0.0121680764, 0.6208637286,
                          -0.2488705524, 0.5069857898, -0.02508121767, -0.2756229059});
  expect_recorded(r.dlogits, {0.1440706824, 0.3057704558, -0.4498411382, -0.0364030882, -0.1252657976, 0.1616688858, 0.1124292507,
                              -0.0128721987, -0.09955705201, 0.1980352972, -0.3173080425, 0.1192727453});
  expect_sums(r.dvalue, 1.89127510264, 0.501070932519);
  expect_same_bits(r.doffsets, host_zeros(r.doffsets.shape(), DType::f64));
}

TEST_CASE("deformable_attention: as the plain formula, any depth of a head", "[cpu]") {
  const DeformableOptions options{3, {{5, 7}, {1, 1}, {2, 3}}, {3, 1, 2}, 0.5, Sampling::bilinear};
  for (const std::int64_t depth : {1, 5, 32, 33}) {
    Case c = random_case(2, 3, depth, options);
    const Tensor wanted = plain_forward(c);
    expect_close(run(c).out, wanted, 1e-11, 1e-12);
    for (Tensor* x : {&c.value, &c.offsets, &c.logits, &c.reference, &c.dout}) *x = cast<float>(*x);
    expect_close(cast<double>(run(c).out), wanted, 1e-4, 1e-5);
  }
}

TEST_CASE("deformable_attention: f32 gradients are those of f64", "[cpu]") {
  const DeformableOptions options{2, {{5, 7}, {2, 3}}, {3, 2}, 0.5, Sampling::bilinear};
  for (const std::int64_t depth : {3, 32}) {
    Case c = random_case(2, 9, depth, options);
    const Result exact = run(c);
    for (Tensor* x : {&c.value, &c.offsets, &c.logits, &c.reference, &c.dout}) *x = cast<float>(*x);
    const Result rounded = run(c);
    expect_close(cast<double>(rounded.dvalue), exact.dvalue, 1e-4, 1e-5);
    expect_close(cast<double>(rounded.doffsets), exact.doffsets, 1e-4, 1e-4);
    expect_close(cast<double>(rounded.dlogits), exact.dlogits, 1e-4, 1e-5);
  }
}

TEST_CASE("deformable_attention: corners beyond the map count as zero", "[cpu]") {
  const auto bilinear = [](double x, double y) { return sample_coordinates<double>(4, 5, x, y, Sampling::bilinear); };
  CHECK(bilinear(0.5, 0.5) == std::vector<double>{2, 1.5});
  CHECK(bilinear(0.9, 0.875) == std::vector<double>{4, 3});            // the last cell's centre
  CHECK(bilinear(1.0, 0.875) == std::vector<double>{2, 1.5});          // half of it
  CHECK(bilinear(0.9, 1.0) == std::vector<double>{2, 1.5});
  CHECK(bilinear(1.1, 0.5) == std::vector<double>{0, 0});              // one cell out
  CHECK(bilinear(0.5, -0.125) == std::vector<double>{0, 0});
  CHECK(bilinear(-3, 7) == std::vector<double>{0, 0});
}

TEST_CASE("deformable_attention: discrete cells, clamped by the height", "[cpu]") {
  const auto cell = [](std::int64_t h, std::int64_t w, double x, double y) { return sample_coordinates<double>(h, w, x, y, Sampling::discrete); };
  CHECK(cell(4, 4, 0, 0) == std::vector<double>{0, 0});
  CHECK(cell(4, 4, 0.124, 0.125) == std::vector<double>{0, 1});
  CHECK(cell(4, 4, -2, 0.99) == std::vector<double>{0, 3});
  CHECK(cell(4, 4, 5, -0.1) == std::vector<double>{3, 0});
  CHECK(cell(3, 5, 0.9, 0.5) == std::vector<double>{2, 2});   // wide: column 5 is cut to h - 1
  CHECK(cell(5, 3, 0.9, 0.9) == std::vector<double>{2, 4});   // tall: column 3 would lie in the next row
  CHECK(cell(5, 3, 9, 9) == std::vector<double>{2, 4});
}

TEST_CASE("deformable_attention: the edge of a discrete cell is decided in the dtype", "[cpu]") {
  // 0.7 in f32 is a little less than 0.7: times 5 it rounds to 3.5 in f32, and stays under it in f64.
  CHECK(sample_coordinates<float>(5, 5, 0.7F, 0.5F, Sampling::discrete)[0] == 4);
  CHECK(sample_coordinates<double>(5, 5, static_cast<double>(0.7F), 0.5, Sampling::discrete)[0] == 3);
}

TEMPLATE_TEST_CASE("deformable_attention: locations that are huge or not finite", "[cpu]", float, double) {
  using T = TestType;
  const T max = std::numeric_limits<T>::max();
  for (const T x : {T(1e30), T(-1e30), max, -max, T(3e9), T(-3e9)}) {
    CHECK(sample_coordinates<T>(4, 4, x, T(0.5), Sampling::bilinear) == std::vector<double>{0, 0});
    CHECK(sample_coordinates<T>(4, 4, T(0.5), x, Sampling::bilinear) == std::vector<double>{0, 0});
    CHECK(sample_coordinates<T>(4, 4, x, T(0.4), Sampling::discrete) == std::vector<double>{x > 0 ? 3.0 : 0.0, 2});
    CHECK(sample_coordinates<T>(4, 4, T(0.4), x, Sampling::discrete) == std::vector<double>{2, x > 0 ? 3.0 : 0.0});
  }
  for (const double bad : {kNaN, kInf, -kInf}) {
    for (const Sampling sampling : {Sampling::bilinear, Sampling::discrete}) {
      CHECK(sample_coordinates<T>(4, 4, static_cast<T>(bad), T(0.5), sampling) == std::vector<double>{0, 0});
      CHECK(sample_coordinates<T>(4, 4, T(0.5), static_cast<T>(bad), sampling) == std::vector<double>{0, 0});
    }
  }
}

TEST_CASE("deformable_attention: a point without a location gives and gets nothing", "[cpu]") {
  Case c = random_case(1, 2, 3, {1, {{4, 5}}, {2}, 0.5, Sampling::bilinear});
  for (const double bad : {kNaN, kInf, 1e300}) {
    c.offsets.data<double>()[1] = bad;   // y of query 0, point 0
    const Result r = run(c);
    for (const Tensor& x : {r.out, r.dvalue, r.doffsets, r.dlogits}) {
      for (const double value : values_of(x)) CHECK(std::isfinite(value));
    }
    CHECK((r.doffsets.data<double>()[0] == 0 && r.doffsets.data<double>()[1] == 0));
  }
}

TEST_CASE("deformable_attention: no images, no queries, one cell", "[cpu]") {
  const DeformableOptions options{2, {{1, 1}}, {1}, 0.5, Sampling::bilinear};
  run(random_case(0, 3, 2, options));
  Case c = random_case(2, 0, 2, options);
  Tensor dvalue = cast<double>(c.value), doffsets = host_zeros(c.offsets.shape(), DType::f64);
  deformable_attention_backward(Stream::cpu(1), c.dout, c.value, c.offsets, c.logits, c.reference, c.options, &dvalue, &doffsets, nullptr);
  expect_same_bits(dvalue, host_zeros(c.value.shape(), DType::f64));   // overwritten, though no query is there
  c = random_case(1, 1, 1, options);
  expect_close(run(c).out, plain_forward(c), 1e-12, 1e-14);
}

TEST_CASE("deformable_attention: same bits for any number of threads", "[cpu]") {
  Case c = random_case(3, 37, 32, {4, {{9, 11}, {4, 5}}, {4, 2}, 0.5, Sampling::bilinear});
  for (Tensor* x : {&c.value, &c.offsets, &c.logits, &c.reference, &c.dout}) *x = cast<float>(*x);
  for (const Sampling sampling : {Sampling::bilinear, Sampling::discrete}) {
    c.options.sampling = sampling;
    const Result one = run(c, 1);
    expect_same_result(run(c, 2), one);
    expect_same_result(run(c, 3), one);
  }
}

TEST_CASE("deformable_attention: errors", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const DeformableOptions good{2, {{3, 4}, {2, 2}}, {2, 1}, 0.5, Sampling::bilinear};
  const Case c = random_case(2, 5, 3, good);
  Tensor out = host_zeros({2, 5, 6}, DType::f64), bad = host_zeros({2, 5, 7}, DType::f64), flat = host_zeros({2, 5}, DType::f64);
  const auto with_options = [&](const DeformableOptions& options, const std::string& text) {
    expect_throws<InvalidArgument>(
        [&] { deformable_attention_forward(stream, c.value, c.offsets, c.logits, c.reference, options, out); }, "deformable_attention: " + text);
  };
  DeformableOptions options = good;
  options.heads = 0;
  with_options(options, "heads must be >= 1, got 0");
  options.heads = 4;
  with_options(options, "value must be (N, S, A d) with A = 4, got f64(2, 16, 6)");
  options = good;
  options.points = {3};
  with_options(options, "there must be as many point counts as levels, at least one, got 1 point counts for 2 levels");
  with_options({2, {}, {}, 0.5, Sampling::bilinear}, "there must be as many point counts as levels, at least one, got 0 point counts for 0");
  options.points = {2, 0};
  with_options(options, "level 1 must have points, got 0");
  options = good;
  options.levels[0] = {0, 4};
  with_options(options, "level 0 must have cells, got 0 x 4");
  options.levels[0] = {3, 5};
  with_options(options, "value must be f64(2, 19, 6), got f64(2, 16, 6)");

  const auto with_tensors = [&](const Tensor& value, const Tensor& offsets, const Tensor& logits, const Tensor& reference, Tensor& out_,
                                const std::string& text) {
    expect_throws<InvalidArgument>([&] { deformable_attention_forward(stream, value, offsets, logits, reference, good, out_); },
                                   "deformable_attention: " + text);
  };
  with_tensors(flat, c.offsets, c.logits, c.reference, out, "value must be (N, S, A d)");
  with_tensors(c.value, flat, c.logits, c.reference, out, "offsets must be (N, Q, A P 2), got f64(2, 5)");
  with_tensors(c.value, bad, c.logits, c.reference, out, "offsets must be f64(2, 5, 12)");
  with_tensors(c.value, c.offsets, bad, c.reference, out, "logits must be f64(2, 5, 6)");
  with_tensors(c.value, c.offsets, cast<float>(c.logits), c.reference, out, "logits must be f64(2, 5, 6), got f32(2, 5, 6)");
  with_tensors(c.value, c.offsets, c.logits, bad, out, "reference must be f64(2, 5, 4)");
  with_tensors(c.value, c.offsets, c.logits, c.reference, bad, "out must be f64(2, 5, 6)");

  const auto backward = [&](const Tensor& dout, Tensor* dvalue, Tensor* doffsets, Tensor* dlogits, const std::string& text) {
    expect_throws<InvalidArgument>(
        [&] { deformable_attention_backward(stream, dout, c.value, c.offsets, c.logits, c.reference, good, dvalue, doffsets, dlogits); },
        "deformable_attention: " + text);
  };
  backward(bad, nullptr, nullptr, nullptr, "dout must be f64(2, 5, 6)");
  backward(c.dout, &bad, nullptr, nullptr, "dvalue must be f64(2, 16, 6)");
  backward(c.dout, nullptr, &bad, nullptr, "doffsets must be f64(2, 5, 12)");
  backward(c.dout, nullptr, nullptr, &bad, "dlogits must be f64(2, 5, 6)");
}

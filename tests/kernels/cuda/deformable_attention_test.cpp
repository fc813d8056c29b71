#include "kernels/deformable_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/random.h"
#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;
using kernels::deformable_attention_backward;
using kernels::deformable_attention_forward;
using kernels::DeformableOptions;
using kernels::Sampling;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

using Levels = std::vector<std::array<std::int64_t, 2>>;
using Points = std::vector<std::int64_t>;

struct Case {
  Tensor value, offsets, logits, reference, dout;   // f64 on the host
  DeformableOptions options;
};

/// out, dvalue, doffsets, dlogits as f64 on the host; undefined where not wanted.
using Result = std::array<Tensor, 4>;
constexpr const char* kNames[] = {"out", "dvalue", "doffsets", "dlogits"};

std::int64_t whole(RandomKey key, std::int64_t i, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(uniform(key, static_cast<std::uint64_t>(i)) * static_cast<double>(high - low));
}

/// Offsets are multiples of 1/8, sizes of 1/16 and centres odd multiples of 1/4096, so that all are exact in bf16 or f32 and that no
/// location comes near a grid line, where f32 and f64 would see different cells: the distance is 1 / (4096 points) of the map or more
/// where it is narrower than 2048. Some points fall outside.
Case make_case(std::int64_t images, std::int64_t queries, std::int64_t depth, const DeformableOptions& options) {
  std::int64_t tokens = 0, points = 0;
  for (std::size_t i = 0; i < options.levels.size(); ++i) {
    tokens += options.levels[i][0] * options.levels[i][1];
    points += options.points[i];
  }
  const std::int64_t heads = options.heads;
  Tensor offsets = host_zeros({images, queries, heads * points * 2}, DType::f64), reference = host_zeros({images, queries, 4}, DType::f64);
  for (std::int64_t i = 0; i < offsets.numel(); ++i) offsets.data<double>()[i] = static_cast<double>(whole(RandomKey(1), i, -32, 33)) / 8;
  for (std::int64_t i = 0; i < reference.numel(); ++i) {
    reference.data<double>()[i] = i % 4 < 2 ? static_cast<double>(4 * whole(RandomKey(2), i, 0, 1024) + 1) / 4096
                                            : static_cast<double>(whole(RandomKey(3), i, 1, 16)) / 16;
  }
  return {random({images, tokens, heads * depth}, DType::f64, 4), offsets, random({images, queries, heads * points}, DType::f64, 5),
          reference, random({images, queries, heads * depth}, DType::f64, 6), options};
}

/// The oracle in f64, from what the GPU is given.
Result oracle(const Case& c, DType dtype) {
  const Tensor value = rounded(c.value, dtype), offsets = rounded(c.offsets, dtype), logits = rounded(c.logits, dtype);
  const Tensor reference = rounded(c.reference, DType::f32), dout = rounded(c.dout, dtype);
  const Stream stream = Stream::cpu(2);
  Result r{host_zeros(dout.shape(), DType::f64), host_zeros(value.shape(), DType::f64), host_zeros(offsets.shape(), DType::f64),
           host_zeros(logits.shape(), DType::f64)};
  deformable_attention_forward(stream, value, offsets, logits, reference, c.options, r[0]);
  deformable_attention_backward(stream, dout, value, offsets, logits, reference, c.options, &r[1], &r[2], &r[3]);
  return r;
}

/// The values with `shift` elements of something else before them: at 1 no vector of 16 bytes fits.
Tensor shifted_on_gpu(const Tensor& x, DType dtype, std::int64_t shift) {
  Tensor padded = host_zeros({x.numel() + shift}, DType::f64);
  std::copy_n(x.data<double>(), x.numel(), padded.data<double>() + shift);
  return on_gpu(padded, dtype).view(shift, x.shape());
}

/// `wanted`: bits 1, 2, 4 for dvalue, doffsets, dlogits.
Result run(const Case& c, DType dtype, unsigned wanted = 7, std::int64_t shift = 0) {
  const Tensor value = shifted_on_gpu(c.value, dtype, shift), offsets = shifted_on_gpu(c.offsets, dtype, shift);
  const Tensor logits = shifted_on_gpu(c.logits, dtype, shift), dout = shifted_on_gpu(c.dout, dtype, shift);
  const Tensor reference = shifted_on_gpu(c.reference, DType::f32, shift);
  Guarded out(c.dout.shape(), dtype), dvalue(c.value.shape(), dtype), doffsets(c.offsets.shape(), dtype), dlogits(c.logits.shape(), dtype);
  deformable_attention_forward(gpu(), value, offsets, logits, reference, c.options, out.tensor);
  deformable_attention_backward(gpu(), dout, value, offsets, logits, reference, c.options, wanted & 1 ? &dvalue.tensor : nullptr,
                                wanted & 2 ? &doffsets.tensor : nullptr, wanted & 4 ? &dlogits.tensor : nullptr);
  return {out.values(), wanted & 1 ? dvalue.values() : Tensor(), wanted & 2 ? doffsets.values() : Tensor(), wanted & 4 ? dlogits.values() : Tensor()};
}

void expect_same_where_wanted(const Result& got, const Result& full) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO(kNames[i]);
    if (got[i].defined()) expect_same_bits(got[i], full[i]);
  }
}

/// Against the oracle, relative to each tensor's largest value. In f32 the location of a sample is exact to 2^-24 times a few
/// operations, and times the width of a map (at most 80 cells here) that is what a corner's weight is off by: 2^8 roundoffs. Sums of
/// n terms add at most n roundoffs of the largest sum of magnitudes: P 4 or depth for the others, and for dvalue the samples on one
/// cell, of mixed signs (`crowd`). A bf16 result is rounded once more, by up to 2^-8: half a step of its 8 significant bits.
void expect_like_oracle(const Result& got, const Result& wanted, DType dtype, double crowd = 64) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    INFO(kNames[i] << " in " << name_of(dtype));
    const double f32_error = (256 + (i == 1 ? crowd : 64)) * roundoff(DType::f32);
    expect_near(got[i], wanted[i], f32_error + (dtype == DType::bf16 ? 1.0 / 256 : 0));
  }
}

constexpr DType kDTypes[] = {DType::f32, DType::bf16};

void expect_right(const Case& c, double crowd = 64) {
  for (const DType dtype : kDTypes) expect_like_oracle(run(c, dtype), oracle(c, dtype), dtype, crowd);
}

}  // namespace

TEST_CASE("deformable_attention cuda: queries, levels, points, depths", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  struct Setup {
    Levels levels;
    Points points;
    std::int64_t heads;
  };
  const Setup setups[] = {{{{8, 10}, {4, 5}, {2, 3}}, {4, 4, 4}, 8},
                          {{{9, 7}, {5, 4}, {3, 2}}, {3, 3, 3}, 8},
                          {{{5, 7}, {2, 3}}, {2, 1}, 3},
                          {{{6, 5}}, {4}, 1},
                          {{{9, 11}, {5, 6}, {3, 3}, {1, 2}}, {4, 4, 4, 4}, 8},
                          {{{3, 4}, {2, 2}}, {40, 5}, 2},
                          {{{4, 4}, {3, 3}, {2, 2}, {1, 1}, {4, 5}, {5, 4}, {1, 6}, {6, 1}}, {1, 1, 1, 1, 1, 1, 1, 1}, 2}};
  for (const Setup& setup : setups) {
    for (const std::int64_t queries : {1, 31, 33}) {
      for (const std::int64_t depth : {32, 2, 5, 48}) {
        if (depth != 32 && queries != 33) continue;
        for (const Sampling sampling : {Sampling::bilinear, Sampling::discrete}) {
          INFO("levels " << setup.levels.size() << ", heads " << setup.heads << ", queries " << queries << ", depth " << depth << ", discrete "
                         << (sampling == Sampling::discrete));
          expect_right(make_case(2, queries, depth, {setup.heads, setup.levels, setup.points, 0.5, sampling}));
        }
      }
    }
  }
}

TEST_CASE("deformable_attention cuda: a decoder's shape", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Case c = make_case(1, 500, 32, {8, {{80, 80}, {40, 40}, {20, 20}}, {4, 4, 4}, 0.5, Sampling::bilinear});
  expect_right(c, 500);
  for (const DType dtype : kDTypes) expect_same_where_wanted(run(c, dtype), run(c, dtype));
}

TEST_CASE("deformable_attention cuda: many queries, listed by tile", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  // 12,000 samples a level, 6 chunks; tiles of 8 x 8 that the maps do not fill; a cell gets up to a few thousand contributions.
  for (const std::int64_t depth : {32, 3}) {
    for (const Sampling sampling : {Sampling::bilinear, Sampling::discrete}) {
      const Case c = make_case(2, 3000, depth, {2, {{20, 33}, {9, 7}, {3, 2}, {1, 1}}, {4, 4, 3, 1}, 0.5, sampling});
      expect_right(c, 4000);
      for (const DType dtype : kDTypes) expect_same_where_wanted(run(c, dtype), run(c, dtype));
    }
  }
}

TEST_CASE("deformable_attention cuda: maps cut into tiles without lists", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  // Wider than a tile; several rows of tiles, the last one lower.
  expect_right(make_case(1, 33, 32, {2, {{2, 1300}, {37, 100}, {50, 81}}, {1, 2, 4}, 0.5, Sampling::bilinear}));
}

TEST_CASE("deformable_attention cuda: all samples near one cell", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  // Lists of hundreds of entries on a few cells: those that a warp shares. Q 300 without lists of tiles, Q 1500 with.
  for (const std::int64_t queries : {300, 1500}) {
    Case c = make_case(1, queries, 32, {2, {{16, 20}, {4, 5}}, {4, 2}, 0.5, Sampling::bilinear});
    for (std::int64_t i = 0; i < c.reference.numel(); ++i) c.reference.data<double>()[i] = i % 4 < 2 ? 1825.0 / 4096 : 1.0 / 16;
    for (std::int64_t i = 0; i < c.offsets.numel(); ++i) c.offsets.data<double>()[i] /= 4;   // exact in bf16 still, and no location meets a grid line
    expect_right(c, 6000);
    for (const DType dtype : kDTypes) expect_same_where_wanted(run(c, dtype), run(c, dtype));
  }
}

TEST_CASE("deformable_attention cuda: every subset of gradients has the bits of all", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const std::int64_t queries : {33, 1100}) {
    for (const std::int64_t depth : {32, 7}) {
      const Case c = make_case(2, queries, depth, {3, {{9, 10}, {4, 6}}, {4, 3}, 0.5, Sampling::bilinear});
      for (const DType dtype : kDTypes) {
        const Result full = run(c, dtype);
        for (unsigned wanted = 0; wanted < 8; ++wanted) expect_same_where_wanted(run(c, dtype, wanted), full);
      }
    }
  }
}

TEST_CASE("deformable_attention cuda: tensors that start anywhere", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Case c = make_case(2, 33, 32, {2, {{9, 10}, {4, 6}}, {4, 3}, 0.5, Sampling::bilinear});
  for (const DType dtype : kDTypes) expect_like_oracle(run(c, dtype, 7, 1), oracle(c, dtype), dtype);
}

TEST_CASE("deformable_attention cuda: no queries, no images", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const DeformableOptions options{2, {{9, 10}, {4, 6}}, {4, 3}, 0.5, Sampling::bilinear};
  for (const DType dtype : kDTypes) {
    const Case c = make_case(2, 0, 32, options);
    expect_same_bits(run(c, dtype)[1], host_zeros(c.value.shape(), DType::f64));
    run(make_case(0, 5, 32, options), dtype);
  }
}

TEST_CASE("deformable_attention cuda: a point without a location gives and gets nothing", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  for (const Sampling sampling : {Sampling::bilinear, Sampling::discrete}) {
    for (const double bad : {kNaN, kInf, -kInf}) {
      Case c = make_case(1, 3, 32, {2, {{4, 5}, {3, 3}}, {2, 1}, 0.5, sampling});
      c.offsets.data<double>()[1] = bad;   // y of query 0, head 0, point 0
      for (std::int64_t i = 0; i < 12; ++i) c.offsets.data<double>()[12 + i] = bad;   // all points of query 1
      expect_right(c);
      const Result r = run(c, DType::bf16);
      CHECK((r[2].data<double>()[0] == 0 && r[2].data<double>()[1] == 0));
      CHECK((r[0].data<double>()[64] == 0 && r[0].data<double>()[127] == 0));
    }
  }
}

TEST_CASE("deformable_attention cuda: discrete cells at their edges and beyond", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  // One point, at the reference itself, on a map whose channels are column and row. 0.7 in f32, times 5, rounds to 3.5.
  const auto cell = [](std::int64_t h, std::int64_t w, double x, double y) {
    Case c = make_case(1, 1, 2, {1, {{h, w}}, {1}, 0.5, Sampling::discrete});
    for (std::int64_t i = 0; i < h * w; ++i) {
      c.value.data<double>()[2 * i] = static_cast<double>(i % w);
      c.value.data<double>()[2 * i + 1] = static_cast<double>(i / w);
    }
    c.offsets = host_zeros(c.offsets.shape(), DType::f64);
    c.reference = host_tensor<double>({1, 1, 4}, {x, y, 0.5, 0.5});
    return values_of(run(c, DType::f32)[0]);
  };
  CHECK(cell(5, 5, 0.7, 0.5) == std::vector<double>{4, 3});
  CHECK(cell(3, 5, 0.9, 0.5) == std::vector<double>{2, 2});
  CHECK(cell(5, 3, 9, 9) == std::vector<double>{2, 4});
  CHECK(cell(4, 4, -2, 1e30) == std::vector<double>{0, 3});
  CHECK(cell(4, 4, 3e38, -3e38) == std::vector<double>{3, 0});
}

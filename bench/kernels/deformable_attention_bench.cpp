#include "kernels/deformable_attention.h"

#include "bench/kernels/cases.h"

namespace detr::bench {
namespace {

using kernels::DeformableOptions;

constexpr std::int64_t kWidth = 256;
// Of a reference box's sides. Offsets are standard normal, in units of half a box over four points: samples lie 0.05 of the picture around it.
constexpr float kBoxSize = 0.4F;

struct Setup {
  const char* name;
  std::int64_t queries;   ///< 0: as many as tokens, each at its own cell
  std::vector<std::array<std::int64_t, 2>> levels;
};

std::int64_t tokens_of(const Setup& setup) {
  std::int64_t tokens = 0;
  for (const auto& [h, w] : setup.levels) tokens += h * w;
  return tokens;
}

std::int64_t queries_of(const Setup& setup) { return setup.queries > 0 ? setup.queries : tokens_of(setup); }

DeformableOptions options_of(const Setup& setup) {
  DeformableOptions options;
  options.levels = setup.levels;
  options.points.assign(setup.levels.size(), 4);
  return options;
}

/// (N, Q, 4) f32: anywhere, or on the grid.
Tensor references(Inputs& in, const Setup& setup, std::int64_t n) {
  const std::int64_t queries = queries_of(setup);
  Tensor boxes = in.host_boxes({n, queries, 4});
  const auto values = boxes.span<float>();
  for (std::size_t i = 0; i < values.size(); i += 4) values[i + 2] = values[i + 3] = kBoxSize;
  if (setup.queries > 0) return boxes;
  std::size_t i = 0;
  for (std::int64_t image = 0; image < n; ++image) {
    for (const auto& [h, w] : setup.levels) {
      for (std::int64_t cell = 0; cell < h * w; ++cell, i += 4) {
        values[i] = (static_cast<float>(cell % w) + 0.5F) / static_cast<float>(w);
        values[i + 1] = (static_cast<float>(cell / w) + 0.5F) / static_cast<float>(h);
      }
    }
  }
  return boxes;
}

Work make(Inputs& in, const Setup& setup, std::int64_t n, bool backward) {
  const DeformableOptions options = options_of(setup);
  const std::int64_t queries = queries_of(setup), slots = 4 * std::ssize(setup.levels);
  const Tensor value = in.normal({n, tokens_of(setup), kWidth}), offsets = in.normal({n, queries, options.heads * slots * 2}), logits = in.normal({n, queries, options.heads * slots});
  const Tensor reference = in.upload(references(in, setup, n));
  if (!backward) {
    Tensor out = in.empty({n, queries, kWidth});
    return {[=](const Stream& stream) mutable { kernels::deformable_attention_forward(stream, value, offsets, logits, reference, options, out); }, {out}};
  }
  const Tensor dout = in.normal({n, queries, kWidth});
  Tensor dvalue = in.empty(value.shape()), doffsets = in.empty(offsets.shape()), dlogits = in.empty(logits.shape());
  return {[=](const Stream& stream) mutable {
            kernels::deformable_attention_backward(stream, dout, value, offsets, logits, reference, options, &dvalue, &doffsets, &dlogits);
          },
          {dvalue, doffsets, dlogits}};
}

}  // namespace

std::vector<Case> deformable_attention_cases() {
  const Setup decoder{"decoder", 500, {{80, 80}, {40, 40}, {20, 20}}};
  const Setup encoder{"encoder", 0, {{100, 167}, {50, 84}, {25, 42}, {13, 21}}};   // Deformable DETR's
  std::vector<Case> cases;
  for (const bool backward : {false, true}) {
    for (const auto& [setup, n] : {std::pair{decoder, 16}, {decoder, 64}, {encoder, 2}, {encoder, 4}}) {
      const SamplerGeometry g{n, tokens_of(setup), queries_of(setup), 8, 4 * std::ssize(setup.levels), kWidth / 8};
      Case c{.op = backward ? "deformable_attention_backward" : "deformable_attention_forward", .variant = setup.name, .shape = {{"N", n}, {"Q", g.queries}, {"V", std::ssize(setup.levels)}}};
      c.size = n;
      c.cost = backward ? sampler_backward(g, 2) : sampler_forward(g, 2);
      c.make = [setup = setup, backward](Inputs& in, std::int64_t images) { return make(in, setup, images, backward); };
      cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace detr::bench

#include "kernels/pool.h"

#include "bench/kernels/cases.h"
#include "kernels/gather.h"

namespace detr::bench {
namespace {

enum class Op { max_forward, max_backward, average_forward, average_backward, upsample_forward, upsample_backward };

Work make(Inputs& in, const Shape& map, Op op) {
  const bool up = op == Op::upsample_forward || op == Op::upsample_backward;
  const Shape output = up ? Shape{map[0], 2 * map[1], 2 * map[2], map[3]} : Shape{map[0], (map[1] + 1) / 2, (map[2] + 1) / 2, map[3]};
  const Tensor x = in.normal(map), dy = in.normal(output);
  Tensor y = in.empty(output), dx = in.empty(map);
  const bool backward = op == Op::max_backward || op == Op::average_backward || op == Op::upsample_backward;
  return {[=](const Stream& stream) mutable {
            switch (op) {
              case Op::max_forward: return kernels::max_pool_forward(stream, x, y);
              case Op::max_backward: return kernels::max_pool_backward(stream, dy, x, &dx);
              case Op::average_forward: return kernels::avg_pool_forward(stream, x, y);
              case Op::average_backward: return kernels::avg_pool_backward(stream, dy, &dx);
              case Op::upsample_forward: return kernels::upsample_forward(stream, x, y);
              case Op::upsample_backward: return kernels::upsample_backward(stream, dy, &dx);
            }
          },
          {backward ? dx : y}};
}

/// Two maps joined along the channels, as before a CSP block.
Work make_concat(Inputs& in, std::int64_t n, bool backward) {
  constexpr std::int64_t kSide = 80, kWidth = 256;
  const Shape half{n, kSide, kSide, kWidth}, whole{n, kSide, kSide, 2 * kWidth};
  if (!backward) {
    const std::vector<Tensor> inputs = {in.normal(half), in.normal(half)};
    Tensor y = in.empty(whole);
    return {[=](const Stream& stream) mutable { kernels::concat_forward(stream, inputs, 3, y); }, {y}};
  }
  const Tensor dy = in.normal(whole);
  Tensor first = in.empty(half), second = in.empty(half);
  return {[=](const Stream& stream) mutable {
            const std::int64_t sizes[] = {kWidth, kWidth};
            Tensor* const gradients[] = {&first, &second};
            kernels::concat_backward(stream, dy, 3, sizes, gradients);
          },
          {first, second}};
}

}  // namespace

std::vector<Case> pool_cases() {
  struct Setup {
    const char* op;
    Op kind;
    std::int64_t side, channels;
    double maps;   ///< maps of the larger size that are read or written
  };
  constexpr std::int64_t kImages = 64;
  std::vector<Case> cases;
  for (const Setup& s : {Setup{"max_pool_forward", Op::max_forward, 320, 64, 1.25}, {"max_pool_backward", Op::max_backward, 320, 64, 2.25}, {"avg_pool_forward", Op::average_forward, 160, 256, 1.25},
                         {"avg_pool_backward", Op::average_backward, 160, 256, 1.25}, {"upsample_forward", Op::upsample_forward, 40, 256, 1.25},
                         {"upsample_backward", Op::upsample_backward, 40, 256, 1.25}}) {
    const bool up = s.kind == Op::upsample_forward || s.kind == Op::upsample_backward;
    Case c{.op = s.op, .variant = "", .shape = {{"N", kImages}, {"H", s.side}, {"W", s.side}, {"C", s.channels}}};
    c.size = kImages;
    c.cost = passes_over(kImages * s.side * s.side * s.channels * (up ? 4 : 1), s.maps, 2);
    c.make = [s](Inputs& in, std::int64_t n) { return make(in, {n, s.side, s.side, s.channels}, s.kind); };
    cases.push_back(c);
  }
  for (const bool backward : {false, true}) {
    Case c{.op = backward ? "concat_backward" : "concat_forward", .variant = "channels", .shape = {{"N", kImages}, {"H", 80}, {"W", 80}, {"C", 512}}};
    c.size = kImages;
    c.cost = passes_over(kImages * 80 * 80 * 512, 2, 2);
    c.make = [backward](Inputs& in, std::int64_t n) { return make_concat(in, n, backward); };
    cases.push_back(c);
  }
  return cases;
}

}  // namespace detr::bench

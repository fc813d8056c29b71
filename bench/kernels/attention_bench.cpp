#include "kernels/attention.h"

#include <algorithm>
#include <optional>

#include "bench/kernels/cases.h"
#include "bench/scene.h"

namespace detr::bench {
namespace {

constexpr std::int64_t kHeads = 8, kWidth = 256;

/// Groups (T) of the loader's denoising slots and, behind them, ordinary queries.
Tensor groups_of(std::int64_t tokens) {
  const Tensor slots = make_scene(16, 0, 7).denoising.group;
  Tensor groups = host_zeros({tokens}, DType::i64);
  std::ranges::fill(groups.span<std::int64_t>(), kernels::kOrdinaryQuery);
  std::ranges::copy(slots.span<std::int64_t>(), groups.data<std::int64_t>());
  return groups;
}

Work make(Inputs& in, std::int64_t n, std::int64_t tokens, bool masked, bool backward) {
  const Shape shape{n, tokens, kWidth};
  const Tensor q = in.normal(shape), k = in.normal(shape), v = in.normal(shape);
  std::optional<Tensor> groups;
  if (masked) groups = in.upload(groups_of(tokens));
  Tensor out = in.empty(shape), lse = in.wide_empty({n, kHeads, tokens});
  const auto forward = [=](const Stream& stream) mutable { kernels::attention_forward(stream, q, k, v, kHeads, groups ? &*groups : nullptr, out, lse); };
  if (!backward) return {forward, {out, lse}};
  auto first = forward;
  first(in.stream());
  const Tensor dout = in.normal(shape);
  Tensor dq = in.empty(shape), dk = in.empty(shape), dv = in.empty(shape);
  return {[=](const Stream& stream) mutable { kernels::attention_backward(stream, dout, q, k, v, out, lse, kHeads, groups ? &*groups : nullptr, &dq, &dk, &dv); }, {dq, dk, dv}};
}

}  // namespace

std::vector<Case> attention_cases() {
  std::vector<Case> cases;
  for (const bool backward : {false, true}) {
    for (const auto& [tokens, masked] : {std::pair{std::int64_t{500}, true}, {std::int64_t{400}, false}}) {
      for (const std::int64_t n : {16, 64}) {
        const AttentionGeometry g{n, kHeads, tokens, tokens, kWidth / kHeads};
        Case c{.op = backward ? "attention_backward" : "attention_forward", .variant = masked ? "denoising" : "", .shape = {{"N", n}, {"T", tokens}, {"A", kHeads}, {"D", kWidth}}};
        c.size = n;
        c.cost = backward ? attention_backward(g, 2) : attention_forward(g, 2);
        c.make = [tokens = tokens, masked = masked, backward](Inputs& in, std::int64_t images) { return make(in, images, tokens, masked, backward); };
        cases.push_back(c);
      }
    }
  }
  return cases;
}

}  // namespace detr::bench

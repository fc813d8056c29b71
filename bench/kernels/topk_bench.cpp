#include "kernels/topk.h"

#include "bench/kernels/cases.h"

namespace detr::bench {
namespace {

constexpr std::int64_t kTokens = 8400, kClasses = 80, kQueries = 300;

Work make_topk(Inputs& in, std::int64_t n) {
  const Tensor x = in.normal({n, kTokens});
  Tensor values = in.empty({n, kQueries}), indices = in.stream().empty({n, kQueries}, DType::i64);
  return {[=](const Stream& stream) mutable { kernels::topk(stream, x, values, indices); }, {values, indices}};
}

Work make_max(Inputs& in, std::int64_t n) {
  const Tensor x = in.normal({n, kTokens, kClasses});
  Tensor y = in.empty({n, kTokens});
  return {[=](const Stream& stream) mutable { kernels::max_last(stream, x, y); }, {y}};
}

}  // namespace

std::vector<Case> topk_cases() {
  std::vector<Case> cases;
  for (const std::int64_t n : {16, 64}) {
    Case best{.op = "topk", .variant = "", .shape = {{"R", n}, {"M", kTokens}, {"k", kQueries}}};
    best.size = n;
    best.cost = kernel_cost(0, static_cast<double>(n * (2 * kTokens + (2 + 8) * kQueries)));
    best.make = make_topk;
    cases.push_back(best);
    Case largest{.op = "max_last", .variant = "", .shape = {{"N", n}, {"T", kTokens}, {"K", kClasses}}};
    largest.size = n;
    largest.cost = kernel_cost(0, 2.0 * static_cast<double>(n * kTokens * (kClasses + 1)));
    largest.make = make_max;
    cases.push_back(largest);
  }
  return cases;
}

}  // namespace detr::bench

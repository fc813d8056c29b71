#include "kernels/assignment.h"

#include <algorithm>

#include "bench/kernels/cases.h"
#include "bench/scene.h"

namespace detr::bench {
namespace {

constexpr std::int64_t kClasses = 80;
constexpr double kLogitMean = -2;

enum class Costs { real, ties, scene };

Tensor all_equal(std::int64_t n, std::int64_t count) { return host_tensor<std::int64_t>({n}, std::vector<std::int64_t>(static_cast<std::size_t>(n), count)); }

/// The costs are computed on the host: in other arithmetic they would be others, and so might be the matching.
Work make_assign(Inputs& in, std::int64_t problems, std::int64_t queries, std::int64_t boxes, Costs kind) {
  Tensor cost = host_zeros({problems, boxes, queries}, DType::f32), counts = all_equal(problems, boxes);
  if (kind == Costs::ties) {
    const Tensor integers = in.host_integers(cost.shape(), 4);
    std::ranges::copy(integers.span<std::int64_t>(), cost.data<float>());
  } else {
    Tensor labels = in.host_integers({problems, boxes}, kClasses), truth = in.host_boxes({problems, boxes, 4});
    if (kind == Costs::scene) {
      const data::Targets targets = make_scene(problems, 93, 5).targets;
      counts = targets.counts;
      labels = targets.labels;
      truth = targets.boxes;
    }
    kernels::match_cost(in.host(), in.host_normal({problems, queries, kClasses}, kLogitMean, 1), in.host_boxes({problems, queries, 4}), 0, labels, truth, counts, {}, cost);
  }
  const Tensor device_cost = in.upload(cost), device_counts = in.upload(counts);
  Tensor match = in.stream().empty({problems, queries}, DType::i64), status = in.stream().empty({problems}, DType::i64);
  return {[=](const Stream& stream) mutable { kernels::assign(stream, device_cost, device_counts, match, status); }, {match, status}};
}

Work make_cost(Inputs& in, std::int64_t images, std::int64_t queries, std::int64_t boxes) {
  const Tensor logits = in.normal({images, queries, kClasses}), predicted = in.upload(in.host_boxes({images, queries, 4}));
  const Tensor labels = in.upload(in.host_integers({images, boxes}, kClasses)), truth = in.upload(in.host_boxes({images, boxes, 4})), counts = in.upload(all_equal(images, boxes));
  Tensor cost = in.wide_empty({images, boxes, queries});
  return {[=](const Stream& stream) mutable { kernels::match_cost(stream, logits, predicted, 0, labels, truth, counts, {}, cost); }, {cost}};
}

Case assign_case(std::int64_t problems, std::int64_t queries, std::int64_t boxes, Costs kind) {
  Case c{.op = "assign", .variant = kind == Costs::ties ? "ties" : kind == Costs::scene ? "scene" : "", .shape = {{"N", problems}, {"Q", queries}, {"G", boxes}}, .dtype = DType::f32};
  c.size = problems;
  c.small_size = std::min<std::int64_t>(problems, 16);
  c.cost = kernel_cost(0, 4.0 * static_cast<double>(problems * queries * boxes) + 8.0 * static_cast<double>(problems * queries));
  c.make = [=](Inputs& in, std::int64_t n) { return make_assign(in, n, queries, boxes, kind); };
  return c;
}

}  // namespace

std::vector<Case> assignment_cases() {
  std::vector<Case> cases = {assign_case(112, 300, 7, Costs::real),  assign_case(448, 300, 100, Costs::real), assign_case(16, 300, 7, Costs::real),  assign_case(112, 300, 60, Costs::real),
                             assign_case(448, 300, 20, Costs::real), assign_case(16, 900, 100, Costs::real),  assign_case(112, 300, 7, Costs::ties),
                             assign_case(64, 300, data::box_capacity(93), Costs::scene)};
  for (const std::int64_t images : {16, 64}) {
    constexpr std::int64_t kQueries = 300, kBoxes = 7;
    Case c{.op = "match_cost", .variant = "", .shape = {{"N", images}, {"Q", kQueries}, {"G", kBoxes}}};
    c.size = images;
    // A logit of each pair read, its cost written; the boxes.
    c.cost = kernel_cost(0, static_cast<double>(images * kQueries * (kBoxes * (2 + 4) + 16)));
    c.make = [](Inputs& in, std::int64_t n) { return make_cost(in, n, kQueries, kBoxes); };
    cases.push_back(c);
  }
  return cases;
}

}  // namespace detr::bench

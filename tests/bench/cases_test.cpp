#include "bench/kernels/cases.h"

#include <cmath>
#include <set>

#include "bench/check.h"
#include "bench/peers.h"
#include "bench/scene.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::bench;

namespace {

const RandomPool& pool() {
  static const RandomPool pool(Stream::cpu(2), DType::f32);
  return pool;
}

TEST_CASE("bench cases: names differ, and each has a floor", "[cpu]") {
  std::set<std::string> names;
  for (const Case& c : all_cases()) {
    INFO(c.op << " " << shape_text(c));
    CHECK(names.insert(c.op + " " + shape_text(c)).second);
    CHECK(c.cost.floor_ms > 0);
    CHECK(c.cost.bytes > 0);
    CHECK(c.small_size >= 1);
    CHECK(c.small_size <= c.size);
  }
  CHECK(names.size() > 100);
}

TEST_CASE("bench cases: every peer belongs to a case", "[cpu]") {
  std::set<std::string> names;
  for (const Case& c : all_cases()) names.insert(c.op + " " + shape_text(c));
  for (const Peer& peer : kPeers) {
    INFO(peer.op << " " << peer.shape);
    CHECK(names.contains(std::string(peer.op) + " " + peer.shape));
    CHECK(peer.ms > 0);
    CHECK((peer.kind == 'm' || peer.kind == 'p'));
  }
}

TEST_CASE("bench cases: the best peer is the fastest", "[cpu]") {
  for (const Case& c : all_cases()) {
    if (c.op == "deformable_attention_backward" && shape_text(c) == "decoder N=16 Q=500 V=3") CHECK(std::string(best_peer(c).value().name) == "Deformable-DETR CUDA");
    if (c.op == "topk") CHECK(!best_peer(c));
  }
}

TEST_CASE("bench inputs: equal seeds give equal inputs, other seeds others", "[cpu]") {
  const auto make = [](std::uint64_t seed) {
    Inputs in(pool(), seed);
    return std::vector<Tensor>{in.normal({7, 5}), in.wide_normal({7, 5}, 0.5), in.bytes({9}), in.host_normal({4}, 1, 2), in.host_boxes({3, 4}), in.host_integers({50}, 80)};
  };
  const auto a = make(1), b = make(1), c = make(2);
  for (std::size_t i = 0; i < a.size(); ++i) {
    test::expect_same_bits(a[i], b[i]);
    CHECK(test::values_of(a[i]) != test::values_of(c[i]));
  }
  Inputs in(pool(), 1);
  test::expect_throws<InvalidArgument>([&] { in.normal({3}, 0.3); }, "power of two");
}

TEST_CASE("bench inputs: moments, and tiles beyond the pool's length", "[cpu]") {
  Inputs in(pool(), 3);
  const Tensor x = in.normal({5'000'000}, 2);
  double sum = 0, squares = 0;
  for (const float v : x.span<float>()) {
    sum += static_cast<double>(v);
    squares += static_cast<double>(v) * static_cast<double>(v);
  }
  CHECK(std::abs(sum / 5e6) < 0.01);
  test::expect_close(squares / 5e6, 4, 0.01);
  for (const float v : x.span<float>().first(1000)) CHECK(to_float(to_bf16(v)) == v);
  for (std::int64_t r = 0; r < 3; ++r) {
    const Tensor boxes = in.host_boxes({1, 4});
    const float* box = boxes.data<float>();
    CHECK(box[0] - box[2] / 2 >= -1e-6F);
    CHECK(box[1] + box[3] / 2 <= 1 + 1e-6F);
    CHECK(box[2] >= 0.05F);
  }
}

TEST_CASE("bench scene: boxes as the loader has them", "[cpu]") {
  const Scene scene = make_scene(64, 93, 5);
  CHECK(scene.targets.largest == 93);
  CHECK(scene.targets.labels.dim(1) == 128);
  CHECK(scene.denoising.group.numel() == 200);
  test::expect_close(static_cast<double>(make_scene(512, 0, 5).targets.total) / 512, 7.3, 0.1);
}

TEST_CASE("bench cases: every one runs on the CPU at its small size", "[slow]") {
  for (Case& c : all_cases()) {
    INFO(c.op << " " << shape_text(c));
    c.size = c.small_size;
    const Check check = check_case(c, pool(), nullptr);
    INFO(check.fault);
    CHECK(check.ok);
    Inputs inputs(pool(), 1);
    CHECK(!c.make(inputs, c.size).outputs.empty());
  }
}

}  // namespace

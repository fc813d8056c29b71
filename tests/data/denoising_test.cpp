#include "data/denoising.h"

#include <cmath>
#include <cstdint>
#include <string>

#include "runtime/error.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::data;
using detr::test::expect_close;
using detr::test::expect_throws;
using detr::test::values_of;

namespace {

/// The generator of the golden values: draw i of a name, in [0, 1).
double golden(const std::string& name, std::int64_t i) {
  std::uint64_t z = 0xcbf29ce484222325;
  for (const char c : name) z = (z ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  z += static_cast<std::uint64_t>(i + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  z ^= z >> 31;
  return static_cast<double>(z >> 40) * 0x1p-24;
}

ImageTargets golden_image(int b, std::int64_t boxes, std::int64_t classes) {
  const std::string name = "golden.target" + std::to_string(b);
  ImageTargets image;
  for (std::int64_t j = 0; j < boxes; ++j) {
    std::array<double, 4> box{};
    for (std::size_t i = 0; i < 2; ++i) {
      box[2 + i] = 0.05 + 0.45 * golden(name + ".wh", 2 * j + static_cast<std::int64_t>(i));
      box[i] = golden(name + ".c", 2 * j + static_cast<std::int64_t>(i)) * (1 - box[2 + i]) + box[2 + i] / 2;
    }
    image.boxes.push_back(box);
    image.labels.push_back(static_cast<std::int64_t>(golden(name + ".label", j) * static_cast<double>(classes)));
  }
  return image;
}

DenoisingDraws golden_draws(std::int64_t slots, std::int64_t classes) {
  return [slots, classes](const DenoisingSlot& slot) {
    const std::int64_t at = slot.image * slots + slot.index;
    DenoisingDraw draw;
    draw.label_mask = golden("dn.label_mask", at);
    draw.new_label = static_cast<std::int64_t>(golden("dn.new_label", at) * static_cast<double>(classes));
    for (std::size_t i = 0; i < 4; ++i) {
      draw.sign[i] = golden("dn.box_sign", at * 4 + static_cast<std::int64_t>(i)) < 0.5 ? -1 : 1;
      draw.part[i] = golden("dn.box_part", at * 4 + static_cast<std::int64_t>(i));
    }
    return draw;
  };
}

Targets targets_of(std::vector<std::int64_t> counts, std::int64_t gcap = 32, DType dtype = DType::f64) {
  std::vector<ImageTargets> images;
  for (std::size_t b = 0; b < counts.size(); ++b) images.push_back(golden_image(static_cast<int>(b), counts[b], 80));
  return make_targets(images, gcap, dtype);
}

/// The same draw for every slot.
DenoisingDraws same_draw(const DenoisingDraw& draw) {
  return [draw](const DenoisingSlot&) { return draw; };
}

void expect_row(const Tensor& boxes, std::int64_t row, std::array<double, 4> wanted, double atol = 1e-14) {
  for (std::size_t i = 0; i < 4; ++i) expect_close(boxes.data<double>()[row * 4 + static_cast<std::int64_t>(i)], wanted[i], 0, atol);
}

}  // namespace

TEST_CASE("denoising: capacities", "[cpu]") {
  CHECK(box_capacity(0) == 32);
  CHECK(box_capacity(32) == 32);
  CHECK(box_capacity(33) == 128);
  CHECK(box_capacity(512) == 512);
  CHECK(box_capacity(513) == 2048);
  CHECK(denoising_capacity(0, 700) == 0);
  CHECK(denoising_capacity(100, 0) == 200);
  CHECK(denoising_capacity(100, 100) == 200);
  CHECK(denoising_capacity(100, 101) == 256);
  CHECK(denoising_capacity(100, 320) == 1024);
  // The capacity holds every count up to `largest`.
  for (const std::int64_t n : {1, 7, 100, 300}) {
    for (std::int64_t m = 1; m <= 400; ++m) CHECK(2 * m * std::max<std::int64_t>(1, n / m) <= denoising_capacity(n, m));
  }
  expect_throws<InvalidArgument>([] { box_capacity(-1); }, "boxes must be >= 0");
  expect_throws<InvalidArgument>([] { denoising_capacity(-1, 3); }, "num_denoising and largest must be >= 0");
}

TEST_CASE("denoising: targets are padded with zeros", "[cpu]") {
  const Targets targets = make_targets({{{5, 2}, {{0.5, 0.25, 0.1, 0.2}, {0.1, 0.2, 0.3, 0.4}}}, {}}, 3, DType::f32);
  CHECK(values_of(targets.labels) == std::vector<double>{5, 2, 0, 0, 0, 0});
  CHECK(values_of(targets.counts) == std::vector<double>{2, 0});
  CHECK(targets.total == 2);
  CHECK(targets.largest == 2);
  CHECK(targets.boxes.shape() == Shape{2, 3, 4});
  CHECK(targets.boxes.dtype() == DType::f32);
  const std::vector<double> boxes = values_of(targets.boxes);
  CHECK(boxes[1] == 0.25);
  expect_close(boxes[7], 0.4, 1e-7);
  for (std::size_t i = 8; i < boxes.size(); ++i) CHECK(boxes[i] == 0);
  CHECK(make_targets({}, 32, DType::f64).labels.shape() == Shape{0, 32});

  expect_throws<InvalidArgument>([] { make_targets({{{1}, {}}}, 4, DType::f32); }, "0 boxes with 1 labels");
  expect_throws<InvalidArgument>([] { make_targets({{{1, 1}, {{}, {}}}}, 1, DType::f32); }, "2 boxes for 1 slots");
  expect_throws<InvalidArgument>([] { make_targets({}, 4, DType::i64); }, "dtype must be f32 or f64");
}

TEST_CASE("denoising: groups and matches", "[cpu]") {
  const Denoising two = make_denoising(targets_of({2, 0}), {}, same_draw({1, 0, {1, 1, 1, 1}, {}}), 200);
  CHECK(two.groups == 50);
  const std::vector<double> match = values_of(two.match), group = values_of(two.group), classes = values_of(two.classes);
  for (std::size_t p = 0; p < 200; ++p) {
    CHECK(group[p] == static_cast<double>(p / 4));
    CHECK(match[p] == (p % 4 < 2 ? static_cast<double>(p % 4) : -1));   // positives 4g and 4g + 1
    CHECK(classes[p] == (p % 2 ? 54 : 6));
    CHECK(match[200 + p] == -1);
    CHECK(classes[200 + p] == 80);
  }

  const Denoising seven = make_denoising(targets_of({7, 3}), {}, same_draw({1, 0, {1, 1, 1, 1}, {}}), 200);
  CHECK(seven.groups == 14);
  CHECK(values_of(seven.group)[195] == 13);
  for (std::int64_t p = 196; p < 200; ++p) {   // padding takes part in nothing
    CHECK(seven.group.data<std::int64_t>()[p] == -2);
    CHECK(seven.match.data<std::int64_t>()[p] == -1);
    CHECK(seven.classes.data<std::int64_t>()[p] == 80);
  }

  // M of another rank: this rank's images have unreal slots.
  const Denoising agreed = make_denoising(targets_of({2, 0}), {}, same_draw({1, 0, {1, 1, 1, 1}, {}}), 200, 40);
  CHECK(agreed.groups == 2);
  CHECK(values_of(agreed.match)[1] == 1);
  CHECK(values_of(agreed.match)[2] == -1);
  CHECK(values_of(agreed.match)[80] == 0);

  DenoisingOptions off;
  off.num_denoising = 0;
  const Denoising none = make_denoising(targets_of({2, 0}), off, same_draw({}), 200);
  CHECK(none.groups == 0);
  CHECK(none.classes.shape() == Shape{2, 0});
  CHECK(none.boxes.shape() == Shape{2, 0, 4});
  CHECK(none.group.shape() == Shape{0});
}

TEST_CASE("denoising: box noise by hand", "[cpu]") {
  const Targets targets = make_targets({{{3}, {{0.5, 0.5, 0.2, 0.4}}}}, 32, DType::f64);   // corners .4 .3 .6 .7
  DenoisingOptions options;
  options.num_denoising = 1;
  // Positive: x by 0.5 x 0.1 outwards, y by 0.25 x 0.2 inwards. Negative: one whole half size more.
  const Denoising grown = make_denoising(targets, options, same_draw({1, 0, {-1, 1, 1, -1}, {0.5, 0.25, 0.5, 0.25}}), 2);
  expect_row(grown.boxes, 0, {0.5, 0.5, 0.3, 0.3});
  // Negative corners .25 .55 .75 .45: the height is crossed and ends at the clamp.
  expect_row(grown.boxes, 1, {0.5, 0.5, 0.5, 1e-5 / (1 + 1e-5)});

  options.box_noise_scale = 4;   // corners 0.4 - 0.2, 0.6 + 0.2, and 0.3 - 1.2 < 0 and 0.7 + 1.2 > 1 after the clip
  const Denoising clipped = make_denoising(targets, options, same_draw({1, 0, {-1, -1, 1, 1}, {0.5, 0.5, 0.5, 0.5}}), 2);
  expect_row(clipped.boxes, 1, {0.5, 0.5, 1 / (1 + 1e-5), 1 / (1 + 1e-5)});

  options.box_noise_scale = 0;
  const Denoising still = make_denoising(targets, options, same_draw({1, 0, {-1, -1, 1, 1}, {0.5, 0.5, 0.5, 0.5}}), 2);
  expect_row(still.boxes, 0, {0.5, 0.5, 0.2, 0.4});
  expect_row(still.boxes, 1, {0.5, 0.5, 0.2, 0.4});
}

TEST_CASE("denoising: the reference's numbers", "[cpu]") {
  // PyTorch reference in f64 on the golden targets and draws: sum of the classes, boxes weighted by (1 + index mod 97), rows.
  struct Case { std::vector<std::int64_t> counts; std::int64_t groups, slots, classes; double weighted; };
  for (const Case& c : {Case{{7, 3}, 14, 196, 17893, 21315.48486202089}, Case{{4, 0}, 25, 200, 22168, 14215.725964283281},
                        Case{{0, 0}, 1, 2, 320, 35.226359807116793}, Case{{320, 2}, 1, 640, 76896, 46561.164625162724}}) {
    const Targets targets = targets_of(c.counts, 512);
    const Denoising dn = make_denoising(targets, {}, golden_draws(c.slots, 80), c.slots);
    CHECK(dn.groups == c.groups);
    double classes = 0, weighted = 0;
    for (const double value : values_of(dn.classes)) classes += value;
    const std::vector<double> boxes = values_of(dn.boxes);
    for (std::size_t i = 0; i < boxes.size(); ++i) weighted += boxes[i] * static_cast<double>((i + 1) % 97);
    CHECK(classes == static_cast<double>(c.classes));
    expect_close(weighted, c.weighted, 1e-13);
    // More padding: the same slots.
    const Denoising padded = make_denoising(targets, {}, golden_draws(c.slots, 80), c.slots + 5);
    for (std::int64_t i = 0; i < 2; ++i) {
      const std::int64_t wide = i * (c.slots + 5);
      test::expect_same_bits(padded.boxes.reshape({2 * (c.slots + 5), 4}).slice(wide, wide + c.slots),
                             dn.boxes.reshape({2 * c.slots, 4}).slice(i * c.slots, (i + 1) * c.slots));
    }
  }
  const Denoising dn = make_denoising(targets_of({7, 3}), {}, golden_draws(196, 80), 196);
  expect_row(dn.boxes, 0, {0.285722444998883, 0.336538834470869, 0.0374842006681228, 0.261348743889088});
  expect_row(dn.boxes, 8, {0.169355753094281, 0.5, 0.338711506188562, 0.999990000099999});
  const Denoising empty = make_denoising(targets_of({0, 0}), {}, golden_draws(2, 80), 200);
  expect_row(empty.boxes, 1, {0.402327863872051, 0.482984514534473, 0.0971350997686386, 0.245506903529167});
  CHECK(values_of(empty.group)[1] == 0);
  CHECK(values_of(empty.group)[2] == -2);
  for (const double match : values_of(empty.match)) CHECK(match == -1);
}

TEST_CASE("denoising: a slot's draw depends neither on M nor on the batch", "[cpu]") {
  const RandomKey a(11), b(12);
  const Targets alone = targets_of({3}), both = make_targets({golden_image(1, 20, 80), golden_image(0, 3, 80)}, 32, DType::f64);
  const Denoising small = make_denoising(alone, {}, keyed_draws({a}, 80), 200);
  const Denoising large = make_denoising(both, {}, keyed_draws({b, a}, 80), 200);
  CHECK(small.groups == 33);
  CHECK(large.groups == 5);
  for (std::int64_t g = 0; g < large.groups; ++g) {
    for (std::int64_t side = 0; side < 2; ++side) {
      for (std::int64_t j = 0; j < 3; ++j) {
        const std::int64_t p = g * 6 + side * 3 + j, q = 200 + g * 40 + side * 20 + j;
        test::expect_same_bits(small.boxes.reshape({200, 4}).slice(p, p + 1), large.boxes.reshape({400, 4}).slice(q, q + 1));
        CHECK(small.classes.data<std::int64_t>()[p] == large.classes.data<std::int64_t>()[q]);
      }
    }
  }
}

TEST_CASE("denoising: distribution of the noise", "[cpu]") {
  DenoisingOptions options;
  options.num_denoising = 4000;
  options.num_classes = 10;
  const Targets targets = make_targets({{{3}, {{0.5, 0.5, 0.2, 0.1}}}}, 32, DType::f64);   // never clipped: |noise| < 0.2
  const Denoising dn = make_denoising(targets, options, keyed_draws({RandomKey(5)}, 10), 8000);
  std::array<int, 10> drawn{};
  int outwards = 0, crossed = 0;
  double positive_sum = 0;
  for (std::int64_t p = 0; p < 8000; ++p) {
    ++drawn[static_cast<std::size_t>(dn.classes.data<std::int64_t>()[p])];
    const double* box = dn.boxes.data<double>() + p * 4;
    const double x0 = box[0] - box[2] / 2, x1 = box[0] + box[2] / 2, moved = std::abs(x0 - 0.4);
    if (p % 2 == 0) {
      REQUIRE(moved < 0.1 + 1e-12);
      positive_sum += moved;
    } else if (box[2] < 2e-5) {
      ++crossed;   // both corners inwards by more than half the width
    } else {
      REQUIRE(moved >= 0.1 - 1e-12);
      REQUIRE(moved < 0.2 + 1e-12);
    }
    if (x1 > 0.6) ++outwards;
  }
  expect_close(positive_sum / 4000, 0.05, 0.05);        // mean of U[0, 0.1)
  expect_close(outwards, 4000, 0.05);                   // a fair sign
  expect_close(crossed, 1000, 0.15);                    // a quarter of the negatives
  expect_close(drawn[3], 8000 * (0.75 + 0.025), 0.03);  // replaced with 1/4, one in ten by itself
  for (std::size_t c = 0; c < 10; ++c) {
    if (c != 3) expect_close(drawn[c], 200, 0.3);
  }
}

TEST_CASE("denoising: errors", "[cpu]") {
  const Targets targets = targets_of({2, 1});
  const auto with = [&](DenoisingOptions options, std::int64_t qcap, std::int64_t largest) {
    return [&targets, options, qcap, largest] { make_denoising(targets, options, same_draw({}), qcap, largest); };
  };
  expect_throws<InvalidArgument>(with({}, 199, -1), "50 groups of 4 slots need qcap >= 200, got 199");
  expect_throws<InvalidArgument>(with({}, 200, 1), "largest is 1, but an image has 2 boxes");
  expect_throws<InvalidArgument>(with({-1}, 200, -1), "num_denoising must be >= 0");
  expect_throws<InvalidArgument>(with({100, 0.5, -1}, 200, -1), "box_noise_scale must be >= 0");
  expect_throws<InvalidArgument>(with({100, 0.5, 1, 0}, 200, -1), "num_classes must be >= 1");
}

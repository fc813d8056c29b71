#include "data/augment.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "runtime/error.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::data;
using detr::test::expect_close;
using detr::test::expect_throws;
using Box = std::array<double, 4>;

namespace {

/// A picture that says where each pixel comes from: red is x, green is y (sizes up to 255), blue is 200.
Image coordinates(std::int64_t width, std::int64_t height) {
  Image image(width, height);
  for (std::int64_t y = 0; y < height; ++y) {
    for (std::int64_t x = 0; x < width; ++x) {
      std::uint8_t* pixel = image.at(x, y);
      pixel[0] = static_cast<std::uint8_t>(x), pixel[1] = static_cast<std::uint8_t>(y), pixel[2] = 200;
    }
  }
  return image;
}

Sample sample_of(std::int64_t width, std::int64_t height, std::vector<Box> boxes) {
  Sample sample;
  sample.picture = coordinates(width, height);
  sample.boxes = std::move(boxes);
  for (std::size_t i = 0; i < sample.boxes.size(); ++i) sample.labels.push_back(static_cast<std::int64_t>(i));
  return sample;
}

/// Up to 6 boxes on quarter pixels, label = rank.
Sample random_sample(RandomKey key) {
  RandomSequence random(key);
  const std::int64_t width = 20 + random.uniform_int(80), height = 20 + random.uniform_int(80), boxes = random.uniform_int(7);
  std::vector<Box> list;
  for (std::int64_t i = 0; i < boxes; ++i) {
    Box box{};
    for (std::size_t axis = 0; axis < 2; ++axis) {
      const std::int64_t size = 4 * (axis ? height : width), low = random.uniform_int(size - 8);
      box[axis] = static_cast<double>(low) / 4;
      box[axis + 2] = static_cast<double>(low + 8 + random.uniform_int(size - 8 - low + 1)) / 4;
    }
    list.push_back(box);
  }
  return sample_of(width, height, list);
}

void expect_same(const Sample& a, const Sample& b) {
  CHECK(a.picture.width == b.picture.width);
  CHECK(a.picture.height == b.picture.height);
  CHECK(a.picture.rgb == b.picture.rgb);
  CHECK(a.boxes == b.boxes);
  CHECK(a.labels == b.labels);
}

RandomKey key_of(int i) { return RandomKey(77).fold(static_cast<std::uint64_t>(i)); }

}  // namespace

TEST_CASE("augment: geometry by hand", "[cpu]") {
  const Sample sample = sample_of(10, 8, {{1, 2, 5, 6}, {8, 0, 10, 8}});

  const Sample padded = pad(sample, 3, 1, 2, 4, {9, 8, 7});
  CHECK(padded.width() == 15);
  CHECK(padded.height() == 13);
  CHECK(padded.boxes == std::vector<Box>{{4, 3, 8, 7}, {11, 1, 13, 9}});
  const Sample flat = flatten(padded);
  CHECK(flat.width() == 15);
  CHECK(flat.left == 0);
  CHECK(flat.picture.at(3, 1)[0] == 0);
  CHECK(flat.picture.at(12, 8)[0] == 9);
  CHECK(flat.picture.at(12, 8)[1] == 7);
  CHECK(flat.picture.at(2, 1)[0] == 9);
  CHECK(flat.picture.at(14, 12)[2] == 7);

  const Sample cut = crop(sample, 2, 1, 5, 6);   // the second centre, (9, 4), is outside; the first, (3, 4), is inside
  CHECK(cut.boxes == std::vector<Box>{{0, 1, 3, 5}, {0, 0, 0, 0}});
  CHECK(cut.picture.at(0, 0)[0] == 2);
  CHECK(cut.picture.at(4, 5)[0] == 6);
  CHECK(cut.picture.at(4, 5)[1] == 6);
  CHECK(sanitize(cut, 1).labels == std::vector<std::int64_t>{0});
  CHECK(crop(sample, 3, 0, 7, 8).boxes[0] == Box{});   // its centre is on the edge: not strictly inside

  const Sample flipped = horizontal_flip(sample);
  CHECK(flipped.boxes == std::vector<Box>{{5, 2, 9, 6}, {0, 0, 2, 8}});
  CHECK(flipped.picture.at(0, 3)[0] == 9);
  expect_same(horizontal_flip(flipped), sample);

  const Sample resized = resize(sample, 40, 4);
  CHECK(resized.boxes == std::vector<Box>{{4, 1, 20, 3}, {32, 0, 40, 4}});
  CHECK(resized.picture.width == 40);
  CHECK(resized.picture.height == 4);

  CHECK(normalised_cxcywh({2, 2, 6, 4}, 10, 8) == Box{0.4, 0.375, 0.4, 0.25});
}

TEST_CASE("augment: sanitize drops small boxes and boxes outside, with their labels", "[cpu]") {
  const Sample sample = sample_of(10, 8, {{0, 0, 10, 8}, {1, 1, 1.5, 5}, {1, 1, 5, 1.999}, {-0.5, 0, 4, 4}, {0, 0, 10.5, 4}, {2, 3, 3, 4}, {0, 7, 4, 8.01}});
  const Sample clean = sanitize(sample, 1);
  CHECK(clean.labels == std::vector<std::int64_t>{0, 5});
  CHECK(clean.boxes == std::vector<Box>{{0, 0, 10, 8}, {2, 3, 3, 4}});
  CHECK(sanitize(sample, 2).labels == std::vector<std::int64_t>{0});
}

TEST_CASE("augment: margins act like pixels", "[cpu]") {
  for (int i = 0; i < 40; ++i) {
    RandomSequence random(key_of(i));
    const Sample sample = random_sample(key_of(i).fold(1));
    const Sample lazy = pad(sample, random.uniform_int(200), random.uniform_int(90), random.uniform_int(200), random.uniform_int(90), {3, 250, 77});
    const Sample flat = flatten(lazy);
    CHECK(flat.width() == lazy.width());
    CHECK(flat.height() == lazy.height());
    const std::int64_t w = 1 + random.uniform_int(lazy.width()), h = 1 + random.uniform_int(lazy.height());
    const std::int64_t left = random.uniform_int(lazy.width() - w + 1), top = random.uniform_int(lazy.height() - h + 1);
    expect_same(flatten(crop(lazy, left, top, w, h)), crop(flat, left, top, w, h));   // windows without any picture among them
    expect_same(flatten(horizontal_flip(lazy)), horizontal_flip(flat));
    expect_same(resize(lazy, 33, 47), resize(flat, 33, 47));
    expect_same(resize(crop(lazy, left, top, w, h), 20, 31), resize(crop(flat, left, top, w, h), 20, 31));
    expect_same(flatten(pad(lazy, 2, 1, 0, 3, {1, 2, 3})), flatten(pad(flat, 2, 1, 0, 3, {1, 2, 3})));
  }
}

TEST_CASE("augment: an edge at the border survives resize and sanitize", "[cpu]") {
  for (std::int64_t size = 1; size < 900; ++size) {
    Sample sample;
    sample.picture = Image(size, 1);
    sample.boxes = {{0, 0, static_cast<double>(size), 1}};
    sample.labels = {1};
    const Sample out = sanitize(resize(sample, 640, 3), 1);
    REQUIRE(out.boxes == std::vector<Box>{{0, 0, 640, 3}});
  }
}

TEST_CASE("augment: zoom-out", "[cpu]") {
  int applied = 0;
  double sum = 0;
  constexpr int kDraws = 2000;
  for (int i = 0; i < kDraws; ++i) {
    const Sample sample = sample_of(20, 10, {{2, 3, 7, 9}});
    const Sample out = apply(RandomZoomOut{}, sample, key_of(i));
    if (out.width() == 20 && out.height() == 10) continue;
    ++applied;
    sum += static_cast<double>(out.width()) / 20;
    REQUIRE(out.width() < 80);
    REQUIRE(out.height() < 40);
    REQUIRE(out.boxes[0][2] - out.boxes[0][0] == 5);
    REQUIRE(out.boxes[0][0] == 2 + static_cast<double>(out.left));
    REQUIRE(out.boxes[0][1] == 3 + static_cast<double>(out.top));
    REQUIRE(std::min({out.left, out.top, out.right, out.bottom}) >= 0);
  }
  expect_close(applied, kDraws * 0.5, 0.08);
  expect_close(sum / applied, 2.5, 0.05);   // r is uniform in [1, 4)
}

TEST_CASE("augment: the IoU crop keeps centres, labels and pixels together", "[cpu]") {
  int changed = 0, tried = 0;
  for (int i = 0; i < 1500; ++i) {
    const Sample sample = random_sample(key_of(i));
    const Sample out = apply(RandomIoUCrop{}, sample, key_of(i).fold(2));
    const bool same = out.width() == sample.width() && out.height() == sample.height();
    if (sample.boxes.empty()) REQUIRE(same);
    else ++tried;
    if (same) continue;
    ++changed;
    const double left = out.picture.at(0, 0)[0], top = out.picture.at(0, 0)[1], w = static_cast<double>(out.width()), h = static_cast<double>(out.height());
    REQUIRE(out.picture.at(out.width() - 1, out.height() - 1)[0] == left + w - 1);
    REQUIRE(w >= std::floor(0.3 * static_cast<double>(sample.width())));
    REQUIRE(h >= std::floor(0.3 * static_cast<double>(sample.height())));
    REQUIRE(w / h >= 0.5);
    REQUIRE(w / h <= 2);
    int inside = 0;
    for (std::size_t j = 0; j < sample.boxes.size(); ++j) {
      const Box& before = sample.boxes[j];
      const double cx = (before[0] + before[2]) / 2 - left, cy = (before[1] + before[3]) / 2 - top;
      const bool kept = cx > 0 && cx < w && cy > 0 && cy < h;
      inside += kept;
      Box wanted{};
      if (kept) wanted = {std::max(before[0] - left, 0.0), std::max(before[1] - top, 0.0), std::min(before[2] - left, w), std::min(before[3] - top, h)};
      REQUIRE(out.boxes[j] == wanted);
      REQUIRE(out.labels[j] == static_cast<std::int64_t>(j));
    }
    REQUIRE(inside >= 1);
  }
  CHECK(changed > tried / 2);
  CHECK(changed < tried * 6 / 7 + 40);   // at least one option in seven leaves the picture as it is

  RandomIoUCrop never;
  never.p = 0;
  expect_same(apply(never, random_sample(key_of(1)), key_of(1)), random_sample(key_of(1)));
  RandomIoUCrop strict;   // asks for an overlap that this box cannot give in any crop
  strict.sampler_options = {0.9};
  strict.trials = 2;
  CHECK(apply(strict, sample_of(60, 60, {{1, 1, 3, 3}}), key_of(3)).width() == 60);
  RandomIoUCrop wanted;
  wanted.sampler_options = {0.5};
  for (int i = 0; i < 100; ++i) {
    const Sample out = apply(wanted, sample_of(60, 60, {{10, 10, 50, 50}}), key_of(i));
    const Box& box = out.boxes[0];
    const double area = (box[2] - box[0]) * (box[3] - box[1]);
    REQUIRE(area / (1600 + static_cast<double>(out.width() * out.height()) - area) >= 0.5);
  }
}

TEST_CASE("augment: photometric distortion", "[cpu]") {
  Image grey(16, 9);
  for (std::size_t i = 0; i < grey.rgb.size(); ++i) grey.rgb[i] = static_cast<std::uint8_t>(i / 3);
  Sample sample;
  sample.picture = grey;

  RandomPhotometricDistort off;
  off.p = 0;
  CHECK(apply(off, sample, key_of(0)).picture.rgb == grey.rgb);
  RandomPhotometricDistort neutral;   // every step happens, and none may change a grey picture
  neutral.brightness = neutral.contrast = neutral.saturation = {1, 1};
  neutral.hue = {0, 0};
  neutral.p = 1;
  CHECK(apply(neutral, sample, key_of(0)).picture.rgb == grey.rgb);

  RandomPhotometricDistort bright = neutral;
  bright.brightness = {0.5, 0.5};
  const Image half = apply(bright, sample, key_of(0)).picture;
  for (std::size_t i = 0; i < grey.rgb.size(); ++i) REQUIRE(half.rgb[i] == grey.rgb[i] / 2);

  // Each of the six channel orders comes equally often, and each of the five coins falls half of the time.
  std::map<std::array<std::size_t, 3>, int> orders;
  std::array<int, 5> coins{};
  const std::array<const char*, 5> words{"brightness", "contrast", "saturation", "hue", "channels"};
  for (int i = 0; i < 1200; ++i) {
    Sample pixel;
    pixel.picture = Image(1, 1);
    pixel.picture.rgb = {10, 100, 200};
    std::string draws;
    const Image out = apply(RandomPhotometricDistort{}, pixel, key_of(i), &draws).picture;
    for (std::size_t c = 0; c < 5; ++c) coins[c] += draws.find(words[c]) != std::string::npos;
    if (draws.empty()) CHECK(out.rgb == pixel.picture.rgb);
    const Image turned = apply(neutral, pixel, key_of(i)).picture;   // hue 0 passes 8-bit HSV: off by a hue step, 6 x 190 / 255
    std::array<std::size_t, 3> order{0, 1, 2};
    std::ranges::sort(order, {}, [&](std::size_t c) { return turned.rgb[c]; });
    ++orders[order];
    for (std::size_t c = 0; c < 3; ++c) REQUIRE(std::abs(turned.rgb[order[c]] - pixel.picture.rgb[c]) <= 5);
  }
  CHECK(orders.size() == 6);
  for (const auto& [order, count] : orders) expect_close(count, 200, 0.25);
  for (const int count : coins) expect_close(count, 600, 0.12);
}

TEST_CASE("augment: the recipe's list", "[cpu]") {
  const std::vector<TransformOp> ops = training_transforms(48, 64);
  CHECK(output_size(ops) == std::array<std::int64_t, 2>{48, 64});
  int flips = 0, boxes = 0;
  for (int i = 0; i < 400; ++i) {
    const Sample sample = random_sample(key_of(i));
    std::string draws;
    const Sample out = apply_transforms(sample, ops, {}, 0, key_of(i), &draws);
    REQUIRE(out.picture.width == 64);
    REQUIRE(out.picture.height == 48);
    REQUIRE(out.left + out.top + out.right + out.bottom == 0);
    REQUIRE(out.boxes.size() == out.labels.size());
    for (const Box& box : out.boxes) {
      REQUIRE(box[0] >= 0);
      REQUIRE(box[1] >= 0);
      REQUIRE(box[2] <= 64);
      REQUIRE(box[3] <= 48);
      REQUIRE(box[2] - box[0] >= 1);
      REQUIRE(box[3] - box[1] >= 1);
    }
    REQUIRE(std::ranges::is_sorted(out.labels));   // boxes go, but never change places
    boxes += static_cast<int>(out.boxes.size());
    expect_same(apply_transforms(sample, ops, {}, 0, key_of(i)), out);   // the log changes nothing

    // The policy leaves its ops out, and the flip falls as before.
    const TransformPolicy policy{3, {"RandomPhotometricDistort", "RandomZoomOut", "RandomIoUCrop"}};
    std::string late;
    const Sample clean = apply_transforms(sample, ops, policy, 3, key_of(i), &late);
    const bool flip = draws.ends_with("flip");
    CHECK(late == (flip ? "flip" : ""));
    flips += flip;
    Sample plain = sanitize(resize(sanitize(flip ? horizontal_flip(sample) : sample, 1), 64, 48), 1);
    expect_same(clean, plain);
    expect_same(apply_transforms(sample, ops, policy, 2, key_of(i)), out);
  }
  expect_close(flips, 200, 0.15);
  CHECK(boxes > 400);

  expect_same(apply_transforms(random_sample(key_of(5)), evaluation_transforms(48, 64), {}, 0, key_of(5)), resize(random_sample(key_of(5)), 64, 48));
}

TEST_CASE("augment: PadToSize fills up and cuts", "[cpu]") {
  const PadToSize op{6, 12, {5, 5, 5}};
  const Sample out = apply_transforms(sample_of(10, 8, {{1, 2, 5, 8}}), std::vector<TransformOp>{op}, {}, 0, RandomKey(1));
  CHECK(out.picture.width == 12);
  CHECK(out.picture.height == 6);
  CHECK(out.boxes == std::vector<Box>{{1, 2, 5, 6}});
  CHECK(out.picture.at(11, 0)[0] == 5);
  CHECK(out.picture.at(9, 5)[1] == 5);
}

TEST_CASE("augment: types and errors", "[cpu]") {
  for (const char* type : {"RandomPhotometricDistort", "RandomZoomOut", "RandomIoUCrop", "SanitizeBoundingBoxes", "RandomHorizontalFlip", "Resize", "PadToSize"}) {
    CHECK(type_of(make_transform(type)) == type);
    check_transform(make_transform(type));
  }
  expect_throws<ConfigError>([] { make_transform("Rotate"); }, "no such type 'Rotate'; known: RandomPhotometricDistort RandomZoomOut");

  expect_throws<ConfigError>([] { output_size(std::vector<TransformOp>{RandomHorizontalFlip{}}); }, "add Resize");
  expect_throws<ConfigError>([] { output_size(std::vector<TransformOp>{Resize{}, RandomZoomOut{}}); }, "add Resize");
  CHECK(output_size(std::vector<TransformOp>{RandomZoomOut{}, PadToSize{3, 5}}) == std::array<std::int64_t, 2>{3, 5});

  const Sample sample = sample_of(10, 8, {});
  expect_throws<InvalidArgument>([&] { pad(sample, 0, -1, 0, 0, {}); }, "margins must be >= 0");
  expect_throws<InvalidArgument>([&] { crop(sample, 4, 0, 7, 8); }, "leaves the canvas of 10x8");
  expect_throws<InvalidArgument>([&] { crop(sample, 0, 0, 0, 8); }, "leaves the canvas");
  expect_throws<InvalidArgument>([&] { resize(sample, 0, 8); }, "size must be at least 1x1");
  expect_throws<InvalidArgument>([] { resize(Sample{}, 4, 8); }, "the canvas is empty");
  Sample torn = sample_of(10, 8, {{0, 0, 4, 4}});
  torn.labels.clear();
  expect_throws<InvalidArgument>([&] { apply(Resize{}, torn, RandomKey(1)); }, "1 boxes with 0 labels");

  const auto expect_bad = [](const TransformOp& op, const char* text) { expect_throws<ConfigError>([&] { check_transform(op); }, text); };
  expect_bad(RandomPhotometricDistort{{1.1, 0.9}}, "brightness, contrast and saturation");
  expect_bad(RandomPhotometricDistort{{1, 1}, {1, 1}, {1, 1}, {-0.6, 0}}, "hue must be a range");
  expect_bad(RandomPhotometricDistort{{1, 1}, {1, 1}, {1, 1}, {0, 0}, 1.5}, "p must be in [0, 1]");
  expect_bad(RandomZoomOut{{}, {0.5, 2}}, "side_range");
  expect_bad(RandomZoomOut{{}, {1, 4}, -0.1}, "p must be in [0, 1]");
  expect_bad(RandomIoUCrop{0}, "min_scale");
  expect_bad(RandomIoUCrop{0.3, 1, 2, 0.5}, "min_aspect_ratio");
  expect_bad(RandomIoUCrop{0.3, 1, 0.5, 2, {}}, "sampler_options");
  expect_bad(RandomIoUCrop{0.3, 1, 0.5, 2, {0}, 0}, "trials");
  expect_bad(RandomIoUCrop{0.3, 1, 0.5, 2, {0}, 1, 2}, "p must be in [0, 1]");
  expect_bad(SanitizeBoundingBoxes{0}, "min_size");
  expect_bad(RandomHorizontalFlip{2}, "p must be in [0, 1]");
  expect_bad(Resize{0, 4}, "size must be at least 1 x 1");
  expect_bad(PadToSize{4, 0}, "size must be at least 1 x 1");
}

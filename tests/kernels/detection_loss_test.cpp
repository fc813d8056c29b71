#include "kernels/detection_loss.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/attention.h"
#include "runtime/random.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;
using kernels::detection_loss_backward;
using kernels::detection_loss_forward;
using kernels::DetectionLossOptions;
using kernels::PredictionSet;
using kernels::TrueBoxes;

namespace {

template <class T>
Tensor tensor_of(const Shape& shape, const std::vector<double>& values) {
  return host_tensor<T>(shape, std::vector<T>(values.begin(), values.end()));
}

/// Everything that one call needs, and its results.
struct Loss {
  Tensor logits, boxes;
  std::vector<PredictionSet> sets;
  TrueBoxes truth;
  DetectionLossOptions options;
  Tensor dterms;
  Tensor terms, dlogits, dboxes;

  void run(int threads = 1) {
    const Stream stream = Stream::cpu(threads);
    const std::int64_t count = std::ssize(sets);
    terms = host_zeros({count, 3}, logits.dtype());
    detection_loss_forward(stream, logits, boxes, sets, truth, options, terms);
    if (!dterms.defined()) {
      dterms = logits.dtype() == DType::f32 ? tensor_of<float>({count, 3}, std::vector<double>(static_cast<std::size_t>(3 * count), 1))
                                            : tensor_of<double>({count, 3}, std::vector<double>(static_cast<std::size_t>(3 * count), 1));
    }
    // Not zero before the call: the gradients are overwritten.
    dlogits = stream.empty_like(logits);
    dboxes = stream.empty_like(boxes);
    for (Tensor* gradient : {&dlogits, &dboxes}) {
      std::fill_n(static_cast<std::byte*>(gradient->raw()), gradient->bytes(), std::byte{0x41});
    }
    detection_loss_backward(stream, dterms, logits, boxes, sets, truth, options, &dlogits, &dboxes);
  }
};

/// One image, one class, one box and one set over all queries.
Loss one_box(const std::vector<double>& logits, const std::vector<double>& boxes, const std::vector<std::int64_t>& match,
             const std::vector<double>& true_box, double normalizer = 1) {
  const std::int64_t queries = std::ssize(logits);
  Loss loss;
  loss.logits = tensor_of<double>({1, queries, 1}, logits);
  loss.boxes = tensor_of<double>({1, queries, 4}, boxes);
  loss.sets.push_back({0, host_tensor<std::int64_t>({1, queries}, match), {}, tensor_of<double>({1}, {normalizer})});
  loss.truth = {host_zeros({1, 1}, DType::i64), tensor_of<double>({1, 1, 4}, true_box)};
  return loss;
}

/// Two images, a denoising set with a padding slot and an ordinary one. All numbers are multiples of 1/32, so that ties (equal
/// sides, touching and equal boxes) are exact. Values and gradients are those of the formulas composed in PyTorch in float64.
template <class T>
Loss recorded() {
  Loss loss;
  loss.logits = tensor_of<T>({2, 7, 3}, {0,     1,    -2,     -4.5,   0.5,   3,    2,    -1,   0,    1,    1,    1,     -3,    -0.25,
                                         0.75,  6,    -6,     0,      -1.5,  2.5,  -0.5, -1.75, 0.25, -1.25, 2,  -4,    -1,    -2.5,
                                         -1.125, -0.625, -0.5, -0.5,  -0.5,  0,    -1.5, -1,   -3.25, -0.75, 0.5, -1,   -0.5,  -2});
  loss.boxes = tensor_of<T>({2, 7, 4}, {.5,   .5,   .25,  .25,  .25,    .5,   .25,  .25,  .5,  .5,  .5,   .25,   .75,   .25,
                                        .5,   .5,   .625, .375, .25,    .5,   .125, .875, .25, .125, .5,  .5,    .375,  .375,
                                        .375, .5,   .125, .25,  .4375,  .5,   .25,  .75,  .75, .75, .25,  .25,   .5,    .25,
                                        .25,  .25,  .5,   .5,   .25,    .5,   .25,  .25,  .125, .375, .8125, .3125, .25, .125});
  loss.truth.labels = host_tensor<std::int64_t>({2, 3}, {0, 2, 1, 1, 0, 0});
  loss.truth.boxes = tensor_of<T>({2, 3, 4}, {.5, .5, .25, .25, .625, .5, .25, .5, .75, .75, .125, .25,
                                              .4375, .5, .375, .5, .5, .5, .25, .25, 0, 0, 0, 0});
  loss.sets.push_back({0, host_tensor<std::int64_t>({2, 4}, {0, 0, 1, 2, 0, 1, -1, 1}),
                       host_tensor<std::int64_t>({4}, {0, 0, 1, kernels::kPaddingSlot}), tensor_of<T>({1}, {6})});
  loss.sets.push_back({4, host_tensor<std::int64_t>({2, 3}, {1, -1, 0, 0, 1, -1}),
                       host_tensor<std::int64_t>({3}, std::vector<std::int64_t>(3, kernels::kOrdinaryQuery)), tensor_of<T>({1}, {2.5})});
  loss.dterms = tensor_of<T>({2, 3}, {1, -0.5, 2, 0.5, 1, 1});
  return loss;
}

const std::vector<double> kTerms = {0.9433992716295961, 1.6666666666666667, 1.2175213675213674,
                                    3.409115420311644, 2.625, 2.2755555555555556};
const std::vector<double> kDlogits = {
    -0.08333333333333333, 0.04883897561641349, 0.00021172430561678884, 0.0, 0.030146920684162814, 0.10804541873694919,
    0.08541568116806823, 0.0024315494180308173, 0.009259259259259259, 0.0, 0.0, 0.0,
    1.6000636750548182e-05, 0.012588919653174567, 0.00950144390104716, 0.1488900685512953, 2.267592728225101e-09, 0.018750000000000003,
    -0.02329057072338561, 0.11838784908575663, 0.008072024688287108, 0.00040561180828024786, 0.010986384283864762, 0.0013806114672821536,
    0.0250010710464866, 7.273257936810585e-07, 0.0024315494180308173, 5.45653907872937e-05, 0.0018401798815552827, 0.005297376523666629,
    0.0, 0.0, 0.0, 0.018750000000000003, -0.06456548571470803, 0.0029178593016369815,
    0.0, 0.004953142758143729, 0.036176304820995375, 0.0029178593016369815, 0.008072024688287108, 0.0002540691667401466};
const std::vector<double> kDboxes = {
    0.0, 0.0, 0.0, 0.0, -0.9166666666666666, 0.0, -0.6666666666666666, 0.0, -0.34259259259259267, 0.0, -0.16666666666666663,
    -0.8425925925925924, 0.0, 0.0, 0.0, 0.0, 0.0, -4.048, 0.0, -0.256, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.9481481481481477,
    2.9481481481481477, 0.41666666666666663, 0.0, -0.4722222222222222, -0.02777777777777779, -1.7309730440499673, 0.0, -0.7902169625246547,
    -0.16805829498137193, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.7777777777777777, 0.0, -3.2444444444444445, 0.08888888888888896,
    -2.8126984126984125, -2.6320987654320986, -2.812698412698413, 1.9097001763668429, 0.0, 0.0, 0.0, 0.0};

/// Several blocks of queries, from random numbers.
template <class T>
Loss random_layer() {
  const std::int64_t images = 2, tokens = 60, classes = 7, capacity = 5;
  const auto draw = [](const Shape& shape, std::uint64_t seed, double low, double high) {
    std::vector<double> values(static_cast<std::size_t>(shape.numel()));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = low + (high - low) * uniform(RandomKey(seed), i);
    return tensor_of<T>(shape, values);
  };
  Loss loss;
  loss.logits = draw({images, tokens, classes}, 1, -6, 4);
  loss.boxes = draw({images, tokens, 4}, 2, 0.1, 0.9);
  loss.truth = {host_zeros({images, capacity}, DType::i64), draw({images, capacity, 4}, 3, 0.1, 0.9)};
  for (std::int64_t i = 0; i < images * capacity; ++i) loss.truth.labels.data<std::int64_t>()[i] = i % classes;
  for (const std::int64_t begin : {0, 20}) {
    const std::int64_t queries = begin ? 40 : 20;
    PredictionSet set{begin, host_zeros({images, queries}, DType::i64), {}, tensor_of<T>({1}, {4.5})};
    for (std::int64_t i = 0; i < images * queries; ++i) {
      set.match.data<std::int64_t>()[i] = i % (capacity + 3) < capacity ? i % (capacity + 3) : -1;
    }
    loss.sets.push_back(set);
  }
  return loss;
}

bool all_finite(const Tensor& tensor) {
  for (const double value : values_of(tensor)) {
    if (!std::isfinite(value)) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("detection_loss: varifocal elements worked by hand", "[cpu]") {
  // A box of height 0.32 within one of 0.4 has IoU 0.8, one of 0.2 has 0.5.
  const std::vector<double> truth = {.5, .5, .4, .4}, far = {.1, .1, .1, .1};
  const auto check = [&](double x, double height, double wanted, double gradient) {
    Loss loss = one_box({x}, {.5, .5, .4, height}, {0}, truth);
    loss.run();
    expect_close(loss.terms.data<double>()[0], wanted, 2e-6);
    expect_close(loss.dlogits.data<double>()[0], gradient, 2e-6, 1e-12);
  };
  check(0, .32, 0.554518, -0.24);
  check(-1, .32, 0.890609, -0.424847);
  check(0, .2, 0.346574, 0);
  Loss positive = one_box({3}, far, {0}, truth);   // apart: IoU 0, so neither loss nor gradient
  positive.run();
  CHECK(positive.terms.data<double>()[0] == 0);
  CHECK(positive.dlogits.data<double>()[0] == 0);
  for (const auto& [x, wanted, gradient] : {std::array{-4.59512, 7.537752e-7, 7.5e-7}, std::array{1., 0.526401, 0.293034}}) {
    Loss negative = one_box({x}, far, {-1}, truth);
    negative.run();
    expect_close(negative.terms.data<double>()[0], wanted, 2e-6);
    expect_close(negative.dlogits.data<double>()[0], gradient, 2e-6);
    CHECK(values_of(negative.dboxes) == std::vector<double>{0, 0, 0, 0});
  }
}

TEST_CASE("detection_loss: box terms worked by hand", "[cpu]") {
  // L1 0.3, IoU 1/3, GIoU 0.2333333; normaliser 2
  Loss loss = one_box({0, 0}, {.5, .5, .4, .4, 0, 0, 1, 1}, {0, -1}, {.6, .5, .4, .2}, 2);
  loss.options = {0, 5, 2, 0.75, 2};
  loss.run();
  CHECK(loss.terms.data<double>()[0] == 0);
  expect_close(loss.terms.data<double>()[1], 5 * 0.3 / 2, 1e-12);
  expect_close(loss.terms.data<double>()[2], 2 * (1 - 0.2333333) / 2, 1e-6);
}

TEST_CASE("detection_loss: values and gradients composed in PyTorch, ties included", "[cpu]") {
  Loss loss = recorded<double>();
  loss.run();
  expect_close(loss.terms, tensor_of<double>({2, 3}, kTerms), 1e-14, 1e-15);
  expect_close(loss.dlogits, tensor_of<double>({2, 7, 3}, kDlogits), 1e-13, 1e-15);
  expect_close(loss.dboxes, tensor_of<double>({2, 7, 4}, kDboxes), 1e-13, 1e-14);

  Loss single = recorded<float>();
  single.run();
  expect_close(single.terms, tensor_of<float>({2, 3}, kTerms), 1e-6);
  expect_close(single.dlogits, tensor_of<float>({2, 7, 3}, kDlogits), 1e-5, 1e-9);
  expect_close(single.dboxes, tensor_of<float>({2, 7, 4}, kDboxes), 1e-6, 1e-6);
}

TEST_CASE("detection_loss: a general gamma agrees with its formula", "[cpu]") {
  Loss loss = one_box({0.5}, {.1, .1, .1, .1}, {-1}, {.5, .5, .4, .4});
  loss.options.gamma = 1.5;
  loss.run();
  const double p = 1 / (1 + std::exp(-0.5)), weight = 0.75 * std::pow(p, 1.5);
  expect_close(loss.terms.data<double>()[0], weight * std::log(1 + std::exp(0.5)), 1e-12);
  expect_close(loss.dlogits.data<double>()[0], weight * p, 1e-12);
}

TEST_CASE("detection_loss: boxes without area and apart give finite numbers", "[cpu]") {
  const std::vector<std::vector<double>> strange = {{.5, .5, 0, 0},    {.5, .5, 0, .4},   {.5, .5, -.4, .4}, {.5, .5, -.4, -.4},
                                                    {.5, .5, 1e-40, 1}, {.9, .9, 0, 0},   {.1, .1, .1, .1},  {.3, .3, 1e-22, 1e-22},
                                                    {0, 0, 1e-45, 1e-45}};
  for (const auto& a : strange) {
    for (const auto& b : strange) {
      INFO("(" << a[0] << " " << a[2] << " " << a[3] << ") for (" << b[0] << " " << b[2] << " " << b[3] << ")");
      Loss loss = one_box({1}, a, {0}, b);
      loss.run();
      CHECK(all_finite(loss.terms));
      CHECK(all_finite(loss.dlogits));
      CHECK(all_finite(loss.dboxes));
      loss.logits = tensor_of<float>({1, 1, 1}, {1});
      loss.boxes = tensor_of<float>({1, 1, 4}, a);
      loss.truth.boxes = tensor_of<float>({1, 1, 4}, b);
      loss.sets[0].normalizer = tensor_of<float>({1}, {1});
      loss.dterms = {};
      loss.run();
      CHECK(all_finite(loss.terms));
      CHECK(all_finite(loss.dlogits));
      CHECK(all_finite(loss.dboxes));
    }
  }
  Loss points = one_box({1}, {.5, .5, 0, 0}, {0}, {.5, .5, 0, 0});   // no enclosing area: GIoU = IoU = 0
  points.run();
  CHECK(values_of(points.terms) == std::vector<double>{0, 0, 2});
}

TEST_CASE("detection_loss: a box that is not a number shows in every term", "[cpu]") {
  Loss loss = one_box({1}, {.5, std::numeric_limits<double>::quiet_NaN(), .4, .4}, {0}, {.5, .5, .4, .4});
  loss.run();
  for (const double term : values_of(loss.terms)) CHECK(std::isnan(term));
}

TEST_CASE("detection_loss: large logits do not overflow", "[cpu]") {
  Loss loss = one_box({1e4, -1e4, 1e4, -1e4}, std::vector<double>(16, 0.5), {-1, -1, 0, 0}, {.5, .5, .5, .5});
  loss.run();
  expect_close(loss.terms.data<double>()[0], 0.75 * 1e4 + 1e4, 1e-12);   // the sure negative and the doubted positive
  CHECK(values_of(loss.dlogits) == std::vector<double>{0.75, 0, 0, -1});
}

TEST_CASE("detection_loss: padding takes part in nothing", "[cpu]") {
  Loss loss = recorded<double>();
  loss.run();
  Loss padded = recorded<double>();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  padded.truth.labels = host_tensor<std::int64_t>({2, 5}, {0, 2, 1, -7, 99, 1, 0, 99, 99, -7});
  Tensor boxes = tensor_of<double>({2, 5, 4}, std::vector<double>(40, nan));
  for (std::int64_t n = 0; n < 2; ++n) std::copy_n(loss.truth.boxes.data<double>() + n * 12, 12, boxes.data<double>() + n * 20);
  padded.truth.boxes = boxes;
  // Slot 3 is padding: what it predicts and what it was matched with is not looked at.
  for (std::int64_t n = 0; n < 2; ++n) {
    std::fill_n(padded.logits.data<double>() + (n * 7 + 3) * 3, 3, nan);
    std::fill_n(padded.boxes.data<double>() + (n * 7 + 3) * 4, 4, nan);
    padded.sets[0].match.data<std::int64_t>()[n * 4 + 3] = 1234;
  }
  padded.run();
  expect_same_bits(padded.terms, loss.terms);
  expect_same_bits(padded.dlogits, loss.dlogits);
  expect_same_bits(padded.dboxes, loss.dboxes);
}

TEST_CASE("detection_loss: gradients are zero outside the sets and add up where sets meet", "[cpu]") {
  Loss loss = recorded<double>();
  loss.sets.erase(loss.sets.begin());
  loss.dterms = {};
  loss.run();
  for (std::int64_t i = 0; i < 4 * 3; ++i) CHECK(loss.dlogits.data<double>()[i] == 0);
  for (std::int64_t i = 0; i < 4 * 4; ++i) CHECK(loss.dboxes.data<double>()[i] == 0);
  const Tensor dlogits = loss.dlogits, dboxes = loss.dboxes;
  loss.sets.push_back(loss.sets[0]);
  loss.dterms = {};
  loss.run();
  for (std::int64_t i = 0; i < dlogits.numel(); ++i) CHECK(loss.dlogits.data<double>()[i] == 2 * dlogits.data<double>()[i]);
  for (std::int64_t i = 0; i < dboxes.numel(); ++i) CHECK(loss.dboxes.data<double>()[i] == 2 * dboxes.data<double>()[i]);
}

TEST_CASE("detection_loss: no thread count changes a bit", "[cpu]") {
  Loss loss = random_layer<float>();
  loss.run(1);
  CHECK(loss.terms.data<float>()[0] > 0);
  for (const int threads : {2, 3}) {
    Loss again = random_layer<float>();
    again.run(threads);
    expect_same_bits(again.terms, loss.terms);
    expect_same_bits(again.dlogits, loss.dlogits);
    expect_same_bits(again.dboxes, loss.dboxes);
  }
}

TEST_CASE("detection_loss: no sets, no queries, no boxes", "[cpu]") {
  Loss none = recorded<double>();
  none.sets.clear();
  none.dterms = {};
  none.run();
  CHECK(values_of(none.dlogits) == std::vector<double>(42, 0));

  Loss empty = one_box({0}, {.5, .5, .4, .4}, {-1}, {.5, .5, .4, .4});
  empty.truth = {host_zeros({1, 0}, DType::i64), host_zeros({1, 0, 4}, DType::f64)};
  empty.sets.push_back({1, host_zeros({1, 0}, DType::i64), {}, tensor_of<double>({1}, {1})});
  empty.run();
  expect_close(empty.terms.data<double>()[0], 0.75 * 0.25 * std::log(2.0), 1e-12);
  for (std::int64_t i = 1; i < 6; ++i) CHECK(empty.terms.data<double>()[i] == 0);
}

TEST_CASE("detection_loss: errors", "[cpu]") {
  const auto expect = [](const std::string& text, const std::function<void(Loss&)>& spoil) {
    Loss loss = recorded<double>();
    spoil(loss);
    expect_throws<InvalidArgument>([&] { loss.run(); }, text);
  };
  expect("detection_loss: logits must be (N, T, C)", [](Loss& l) { l.logits = host_zeros({7, 3}, DType::f64); });
  expect("detection_loss: boxes", [](Loss& l) { l.boxes = host_zeros({2, 6, 4}, DType::f64); });
  expect("detection_loss: true labels must be (N, Gcap)", [](Loss& l) { l.truth.labels = host_zeros({6}, DType::i64); });
  expect("detection_loss: true labels", [](Loss& l) { l.truth.labels = host_zeros({1, 3}, DType::i64); });
  expect("detection_loss: true boxes", [](Loss& l) { l.truth.boxes = host_zeros({2, 3, 4}, DType::f32); });
  expect("detection_loss: match must be (N, Q)", [](Loss& l) { l.sets[0].match = host_zeros({4}, DType::i64); });
  expect("detection_loss: match", [](Loss& l) { l.sets[0].match = host_zeros({1, 4}, DType::i64); });
  expect("detection_loss: groups", [](Loss& l) { l.sets[0].groups = host_zeros({5}, DType::i64); });
  expect("detection_loss: normalizer", [](Loss& l) { l.sets[1].normalizer = host_zeros({1}, DType::f32); });
  expect("normalizer must be > 0, got 0", [](Loss& l) { l.sets[1].normalizer = host_zeros({1}, DType::f64); });
  expect("queries [5, 8) do not lie in the 7", [](Loss& l) { l.sets[1].begin = 5; });
  expect("queries [-1, 3) do not lie in the 7", [](Loss& l) { l.sets[0].begin = -1; });
  expect("match[1, 0] must be in [-1, 3), got 3", [](Loss& l) { l.sets[1].match.data<std::int64_t>()[3] = 3; });
  expect("match[0, 1] must be in [-1, 3), got -2", [](Loss& l) { l.sets[1].match.data<std::int64_t>()[1] = -2; });
  expect("labels[0, 1] must be in [0, 3), got 3", [](Loss& l) { l.truth.labels.data<std::int64_t>()[1] = 3; });
  expect("detection_loss: dterms", [](Loss& l) { l.dterms = host_zeros({1, 3}, DType::f64); });

  Loss loss = recorded<double>();
  Tensor bad = host_zeros({3, 3}, DType::f64);
  const Stream stream = Stream::cpu(1);
  expect_throws<InvalidArgument>([&] { detection_loss_forward(stream, loss.logits, loss.boxes, loss.sets, loss.truth, {}, bad); },
                                 "detection_loss: terms");
  expect_throws<InvalidArgument>(
      [&] { detection_loss_backward(stream, loss.dterms, loss.logits, loss.boxes, loss.sets, loss.truth, {}, &bad, nullptr); },
      "detection_loss: dlogits");
  expect_throws<InvalidArgument>(
      [&] { detection_loss_backward(stream, loss.dterms, loss.logits, loss.boxes, loss.sets, loss.truth, {}, nullptr, &bad); },
      "detection_loss: dboxes");
}

#include "autograd/detection.h"

#include "kernels/attention.h"
#include "tests/autograd/expect_gradients.h"

using namespace detr;
using namespace detr::test;
using kernels::DetectionLossOptions;

namespace {

Variable refine(Context& ctx, Inputs in) { return refine_boxes(ctx, in[0], in[1]); }

/// Two prediction sets of one layer of 2 images, 7 queries, 3 classes.
std::vector<kernels::PredictionSet> sets() {
  std::vector<kernels::PredictionSet> result(2);
  result[0].begin = 0;
  result[0].match = host_tensor<std::int64_t>({2, 4}, {0, 1, -1, 1, 2, -1, 0, 2});
  result[0].groups = host_tensor<std::int64_t>({4}, {0, 0, 1, kernels::kPaddingSlot});
  result[0].normalizer = host_tensor<double>({1}, {3.5});
  result[1].begin = 5;
  result[1].match = host_tensor<std::int64_t>({2, 2}, {2, -1, 1, 0});
  result[1].normalizer = host_tensor<double>({1}, {2});
  return result;
}

kernels::TrueBoxes truth() { return {host_tensor<std::int64_t>({2, 3}, {0, 2, 1, 1, 1, 0}), test::uniform({2, 3, 4}, 0.2, 0.7, 4)}; }

Op loss(const DetectionLossOptions& options) {
  return [options](Context& ctx, Inputs in) { return detection_loss(ctx, in[0], in[1], sets(), truth(), options); };
}

/// The loss of constant boxes: the gradient takes the IoU in the varifocal loss for a constant, differences do not.
Op loss_of_logits(const DetectionLossOptions& options) {
  return [options](Context& ctx, Inputs in) {
    const Variable boxes(test::uniform({2, 7, 4}, 0.2, 0.7, 5));
    return detection_loss(ctx, in[0], boxes, sets(), truth(), options);
  };
}

}  // namespace

TEST_CASE("refine_boxes: gradients", "[cpu]") {
  const std::vector<Tensor> inputs = {test::normal({2, 3, 4}), test::uniform({2, 3, 4}, 0.02, 0.98)};
  expect_gradients(refine, inputs);
  expect_gradient_subsets(refine, inputs);
}

TEST_CASE("refine_boxes: gradients beyond the clamps", "[cpu]") {
  expect_gradients(refine, {test::normal({2, 4}), host_tensor<double>({2, 4}, {-0.5, 1.5, 4e-6, 1 - 4e-6, 2e-4, 0.5, 2, -3})});
}

TEST_CASE("detection_loss: gradients of the boxes", "[cpu]") {
  const std::vector<Tensor> inputs = {test::normal({2, 7, 3}), test::uniform({2, 7, 4}, 0.2, 0.7, 5)};
  DetectionLossOptions options;
  options.vfl_weight = 0;
  expect_gradients(loss(options), inputs);
  // Small boxes: many pairs are apart, so that only the enclosing box has a gradient.
  expect_gradients(loss(options), {inputs[0], test::uniform({2, 7, 4}, 0.05, 0.15, 6)});
}

TEST_CASE("detection_loss: gradients of the logits", "[cpu]") {
  // The weight is a constant to the gradient and moves with the differences, so only gamma 0 can be checked by them.
  DetectionLossOptions options;
  options.gamma = 0;
  options.vfl_weight = 1.5;
  expect_gradients(loss_of_logits(options), {test::normal({2, 7, 3})});
}

TEST_CASE("detection_loss: any subset of gradients", "[cpu]") {
  expect_gradient_subsets(loss({}), {test::normal({2, 7, 3}), test::uniform({2, 7, 4}, 0.2, 0.7, 5)});
}

TEST_CASE("detection_loss: no thread count changes a bit", "[cpu]") {
  const auto gradients = [](int threads) {
    Tape tape;
    Context ctx(Stream::cpu(threads), &tape, true);
    const Variable delta = tape.input(test::normal({2, 7, 4})), reference = tape.input(test::uniform({2, 7, 4}, 0.1, 0.9));
    const Variable logits = tape.input(test::normal({2, 7, 3}));
    const Variable terms = detection_loss(ctx, logits, refine_boxes(ctx, delta, reference), sets(), truth(), {});
    tape.backward(ctx, terms, test::normal({2, 3}));
    return std::vector<Tensor>{terms.value(), tape.gradient(delta), tape.gradient(reference), tape.gradient(logits)};
  };
  const std::vector<Tensor> one = gradients(1);
  for (const int threads : {2, 3}) {
    const std::vector<Tensor> more = gradients(threads);
    for (std::size_t i = 0; i < one.size(); ++i) expect_same_bits(more[i], one[i]);
  }
}

#include "train/inputs.h"

#include "tests/train/rig.h"

using namespace detr;
using namespace detr::test;
using namespace detr::train;

namespace {

models::DecoderConfig decoder(std::int64_t denoising = 8) {
  models::DecoderConfig config = tiny_config().decoder;
  config.num_denoising = denoising;
  return config;
}

}  // namespace

TEST_CASE("inputs: batches whose tensors have equal shapes have equal keys", "[cpu]") {
  const data::Batch batch = make_batch(two_pictures(), decoder());
  const StepKey key = key_of(batch);
  CHECK(key.pictures == std::vector<std::int64_t>{2, 64, 64, 3});
  CHECK(key.height == 64);
  CHECK(key.width == 64);
  CHECK(key.box_slots == 32);
  CHECK(key.denoising_slots == 16);
  CHECK(key_of(make_batch({{}, {{1}, {{0.5, 0.5, 0.1, 0.1}}}}, decoder(), 64, 7)) == key);   // other boxes and pixels

  data::Batch scaled = batch;
  scaled.size_h = 96;
  CHECK(key_of(scaled) != key);
  scaled.size_h = 64;
  scaled.size_w = 96;
  CHECK(key_of(scaled) != key);
  CHECK(key_of(make_batch(two_pictures(), decoder(), 96)) != key);
  CHECK(key_of(make_batch({two_pictures()[0]}, decoder())) != key);
  CHECK(key_of(make_batch(crowd(), decoder())).box_slots == 128);
  CHECK(key_of(make_batch(two_pictures(), decoder(30))).denoising_slots == 60);
  const StepKey without = key_of(make_batch(two_pictures(), decoder(0)));
  CHECK(without.denoising_slots == 0);
  CHECK(without != key);
  CHECK(((without < key) != (key < without)));   // an order, for tables
}

TEST_CASE("inputs: memory for the batches of a key", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const data::Batch batch = make_batch(crowd(), decoder());
  const StepInputs inputs = empty_inputs(stream, key_of(batch));
  const auto is_like = [](const Tensor& x, const Tensor& like) { return x.defined() && x.shape() == like.shape() && x.dtype() == like.dtype() && x.raw() != like.raw(); };
  CHECK(is_like(inputs.pictures, batch.images));
  CHECK(is_like(inputs.targets.labels, batch.targets.labels));
  CHECK(is_like(inputs.targets.boxes, batch.targets.boxes));
  CHECK(is_like(inputs.targets.counts, batch.targets.counts));
  CHECK(is_like(inputs.denoising.classes, batch.denoising.classes));
  CHECK(is_like(inputs.denoising.boxes, batch.denoising.boxes));
  CHECK(is_like(inputs.denoising.groups, batch.denoising.group));
  CHECK(is_like(inputs.targets.dn_match, batch.denoising.match));
  for (const Tensor& number : {inputs.targets.num_boxes, inputs.targets.dn_num_boxes}) {
    CHECK(number.shape() == Shape{1});
    CHECK(number.dtype() == DType::f32);
  }
  const StepInputs without = empty_inputs(stream, key_of(make_batch(two_pictures(), decoder(0))));
  CHECK(without.targets.labels.defined());
  for (const Tensor& none : {without.denoising.classes, without.denoising.boxes, without.denoising.groups, without.targets.dn_match, without.targets.dn_num_boxes}) CHECK_FALSE(none.defined());
}

TEST_CASE("inputs: an upload brings a batch and what it is divided by", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  Upload upload(stream);
  Tensor number = stream.zeros({2}, DType::f64);
  for (const auto& pictures : {two_pictures(), crowd(), std::vector<data::ImageTargets>{{}, {}}}) {
    const data::Batch batch = make_batch(pictures, decoder());
    INFO(batch.targets.total << " boxes");
    StepInputs inputs = empty_inputs(stream, key_of(batch));
    upload.wait();
    upload.enqueue(host_tensor<double>({2}, {0.5, 1}), number);
    upload.enqueue(batch, 1000, inputs);   // of all ranks
    CHECK(values_of(number) == std::vector<double>{0.5, 1});
    expect_same_bits(inputs.pictures, batch.images);
    expect_same_bits(inputs.targets.labels, batch.targets.labels);
    expect_same_bits(inputs.targets.boxes, batch.targets.boxes);
    expect_same_bits(inputs.targets.counts, batch.targets.counts);
    expect_same_bits(inputs.denoising.classes, batch.denoising.classes);
    expect_same_bits(inputs.denoising.boxes, batch.denoising.boxes);
    expect_same_bits(inputs.denoising.groups, batch.denoising.group);
    expect_same_bits(inputs.targets.dn_match, batch.denoising.match);
    CHECK(values_of(inputs.targets.num_boxes) == std::vector<double>{1000});
    CHECK(values_of(inputs.targets.dn_num_boxes) == std::vector<double>{1000 * static_cast<double>(batch.denoising.groups)});
    upload.enqueue(batch, 0, inputs);   // no box anywhere: nothing is divided by zero
    CHECK(values_of(inputs.targets.num_boxes) == std::vector<double>{1});
    CHECK(values_of(inputs.targets.dn_num_boxes) == std::vector<double>{static_cast<double>(batch.denoising.groups)});

    // The other way to the device, which checks take, gives the same.
    StepInputs direct;
    targets_to_device(stream, batch.targets, batch.denoising, 0, DType::f32, direct);
    expect_same_bits(direct.targets.boxes, inputs.targets.boxes);
    expect_same_bits(direct.denoising.boxes, inputs.denoising.boxes);
    expect_same_bits(direct.targets.num_boxes, inputs.targets.num_boxes);
    expect_same_bits(direct.targets.dn_num_boxes, inputs.targets.dn_num_boxes);
  }
  const data::Batch batch = make_batch(two_pictures(), decoder(0));
  StepInputs inputs = empty_inputs(stream, key_of(batch));
  upload.enqueue(batch, batch.targets.total, inputs);
  CHECK(values_of(inputs.targets.num_boxes) == std::vector<double>{3});
  CHECK_FALSE(inputs.denoising.classes.defined());
  StepInputs other = empty_inputs(stream, key_of(make_batch(two_pictures(), decoder(), 96)));
  expect_throws<InvalidArgument>([&] { upload.enqueue(batch, 3, other); }, "copy: u8(2, 64, 64, 3) to u8(2, 96, 96, 3)");
}

TEST_CASE("inputs: pictures at the step's size", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  data::Batch batch;
  batch.images = host_tensor<std::uint8_t>({1, 2, 2, 1}, {0, 51, 102, 255});
  batch.size_h = 2;
  batch.size_w = 4;
  const Tensor images = pictures_to_device(stream, batch, DType::f64);
  CHECK(images.shape() == Shape{1, 2, 4, 1});
  const std::vector<double> wanted = {0, 0, 0.2, 0.2, 0.4, 0.4, 1, 1};
  for (std::size_t i = 0; i < wanted.size(); ++i) expect_close(values_of(images)[i], wanted[i], 1e-15);
  CHECK(resized_pictures(stream, batch.images, 4, 2, DType::f32).shape() == Shape{1, 4, 2, 1});
}

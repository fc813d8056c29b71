#include "runtime/stream.h"

#include "runtime/gpus.h"
#include "tests/gpu.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;

namespace {

/// A tensor that says it lies on a GPU; it has no elements.
Tensor elsewhere() { return {nullptr, 0, Shape{0}, DType::f32, Device::cuda(0)}; }

}  // namespace

TEST_CASE("stream: tensors it makes", "[cpu]") {
  const Stream stream = Stream::cpu(2);
  CHECK(stream.device().is_cpu());
  CHECK(stream.pool().threads() == 2);
  const Tensor x = stream.empty({2, 3}, DType::bf16), host = stream.empty_host({4}, DType::f64), zeros = stream.zeros({33}, DType::f32);
  CHECK(x.shape() == Shape{2, 3});
  CHECK(x.dtype() == DType::bf16);
  CHECK(x.device().is_cpu());
  CHECK(host.dtype() == DType::f64);
  CHECK(host.device().is_cpu());
  CHECK(values_of(zeros) == std::vector<double>(33, 0));
  CHECK(stream.zeros({0, 3}, DType::i64).numel() == 0);
  const Tensor like = stream.empty_like(zeros);
  CHECK(like.shape() == zeros.shape());
  CHECK(like.dtype() == DType::f32);
  CHECK(like.raw() != zeros.raw());
}

TEST_CASE("stream: copies", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const Tensor from = host_tensor<float>({2, 2}, {1, 2, 3, 4});
  Tensor to = stream.empty({2, 2}, DType::f32);
  stream.copy(from, to);
  CHECK(values_of(to) == std::vector<double>{1, 2, 3, 4});
  Tensor row = to.slice(1, 2);   // a part of a tensor
  stream.copy(from.slice(0, 1), row);
  CHECK(values_of(to) == std::vector<double>{1, 2, 1, 2});
  stream.copy(to, to);
  CHECK(values_of(to) == std::vector<double>{1, 2, 1, 2});
  Tensor nothing = stream.empty({0, 2}, DType::f32);
  stream.copy(from.slice(1, 1), nothing);

  Tensor other_shape = stream.empty({4}, DType::f32), other_dtype = stream.empty({2, 2}, DType::f64), undefined, far = elsewhere();
  expect_throws<InvalidArgument>([&] { stream.copy(from, other_shape); }, "copy: f32(2, 2) to f32(4)");
  expect_throws<InvalidArgument>([&] { stream.copy(from, other_dtype); }, "copy: f32(2, 2) to f64(2, 2)");
  expect_throws<InvalidArgument>([&] { stream.copy(from, undefined); }, "copy: f32(2, 2) to undefined");
  expect_throws<InvalidArgument>([&] { stream.copy(undefined, to); }, "copy: undefined to f32(2, 2)");
  expect_throws<InvalidArgument>([&] { stream.copy(host_zeros({0}, DType::f32), far); }, "copy: a tensor on cuda:0, the stream is on cpu");
  expect_throws<InvalidArgument>([&] { stream.copy(far, nothing = host_zeros({0}, DType::f32)); }, "copy: a tensor on cuda:0, the stream is on cpu");
}

TEST_CASE("stream: what is on the host stays there", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  const Tensor x = host_tensor<double>({2}, {1, 2});
  CHECK(stream.to_host(x).raw() == x.raw());
  CHECK(stream.to_device(x).raw() == x.raw());
  CHECK_FALSE(stream.to_host(Tensor()).defined());
  CHECK_FALSE(stream.to_device(Tensor()).defined());
  expect_throws<InvalidArgument>([&] { stream.to_device(elsewhere()); }, "copy: a tensor on cuda:0, the stream is on cpu");
}

TEST_CASE("stream: an arena has memory of its own and the same threads", "[cpu]") {
  const Stream stream = Stream::cpu(3);
  const Stream arena = stream.with_arena();
  CHECK(&arena.allocator() != &stream.allocator());
  CHECK(&arena.pool() == &stream.pool());
  CHECK(arena.device() == stream.device());
  const std::size_t in_use = stream.allocator().bytes_in_use();
  const Tensor short_lived = arena.empty({1000}, DType::f64);
  CHECK(stream.allocator().bytes_in_use() == in_use);
  CHECK(arena.allocator().bytes_in_use() >= 8000);
  CHECK(arena.allocator().peak_bytes() >= 8000);

  const Stream lasting = arena.lasting();
  CHECK(&lasting.allocator() == &stream.allocator());
  CHECK(&lasting.with_arena().lasting().allocator() == &stream.allocator());
  CHECK(&stream.lasting().allocator() == &stream.allocator());
  const Tensor kept = lasting.empty({1000}, DType::f64);
  CHECK(stream.allocator().bytes_in_use() >= in_use + 8000);
  CHECK(arena.allocator().bytes_in_use() < 16000);
}

TEST_CASE("stream: memory of a stream that is gone stays", "[cpu]") {
  Tensor x;
  {
    const Stream arena = Stream::cpu(1).with_arena();
    x = arena.zeros({5}, DType::f32);
  }
  CHECK(values_of(x) == std::vector<double>(5, 0));
}

TEST_CASE("stream: on the CPU an op has run when its call returns", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  stream.wait();
  Event event = stream.record();
  event.wait();
  Event().wait();
  CHECK(event.passed());
  CHECK(Event().passed());
  CHECK_FALSE(stream.is_capturing());
  stream.enter_thread();
  expect_throws<InvalidArgument>([&] { event.milliseconds_since(Event()); }, "event: the CPU has no times");
  bool ran = false;
  expect_throws<InvalidArgument>([&] { stream.capture([&] { ran = true; }); }, "capture: a stream on the CPU has no graphs");
  CHECK_FALSE(ran);
  CHECK_FALSE(Graph().defined());
}

TEST_CASE("stream: an event of a GPU is passed once the work before it is done", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Stream stream = Stream::cuda(0, 1);
  stream.enter_thread();
  const Tensor from = stream.zeros({1 << 26}, DType::f32);   // 256 MiB
  Tensor to = stream.empty_like(from);
  int asked_in_vain = 0;
  for (int i = 0; i < 100; ++i) stream.copy(from, to);
  const Event event = stream.record();
  while (!event.passed()) ++asked_in_vain;
  CHECK(asked_in_vain > 0);
  CHECK(event.passed());
  bool in_capture = false;
  const Graph graph = stream.capture([&] {
    in_capture = stream.is_capturing();
    stream.copy(from, to);
  });
  CHECK(in_capture);
  CHECK_FALSE(stream.is_capturing());
  graph.launch(stream);   // "not ready" is no error that a later call finds
  stream.wait();
}

TEST_CASE("stream: a GPU that is not there", "[cpu]") {
  const int count = static_cast<int>(list_gpus().size());
  expect_throws<DeviceError>([&] { Stream::cuda(count); }, concat("cuda:", count));
  expect_throws<DeviceError>([] { Stream::cuda(-1); }, "cuda:-1");
}

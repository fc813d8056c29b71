#include "runtime/side_branch.h"

#include "tests/gpu.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::test;

namespace {

/// The memory of a tensor without a share in it.
Tensor alias(const Tensor& tensor) {
  return {std::shared_ptr<std::byte>(std::shared_ptr<void>(), static_cast<std::byte*>(tensor.raw())), 0, tensor.shape(), tensor.dtype(), tensor.device()};
}

}  // namespace

TEST_CASE("side branch: keeps what its work touches until the stream waits for the work", "[cpu]") {
  const Stream stream = Stream::planning(Device::cuda(0));
  SideBranch branch(stream);
  const auto in_use = [&] { return stream.allocator().bytes_in_use(); };
  constexpr std::int64_t kBytes = 1 << 20;
  const auto one = static_cast<std::size_t>(kBytes);
  const auto run = [&] {
    const Tensor x = stream.empty({kBytes}, DType::u8);
    branch.run({x}, [&](const Stream& side) { CHECK(&side.allocator() != &stream.allocator()); });
    return alias(x);
  };
  run();
  run();
  CHECK(in_use() == 2 * one);
  branch.join();
  CHECK(in_use() == 0);
  branch.join();   // there is nothing to wait for

  for (int i = 0; i < 32; ++i) run();
  CHECK(in_use() == 32 * one);
  run();   // waits for the older half first
  CHECK(in_use() == 17 * one);
}

TEST_CASE("side branch: settles what shares memory with a tensor of its work", "[cpu]") {
  const Stream stream = Stream::planning(Device::cuda(0));
  SideBranch branch(stream);
  const Tensor first = stream.empty({8, 4}, DType::f32), second = stream.empty({8, 4}, DType::f32);
  const auto keeps = [&](const Tensor& settled) {
    std::weak_ptr<std::byte> kept;
    {
      const std::shared_ptr<std::byte> memory = stream.allocator().allocate(1024);
      kept = memory;
      branch.run({Tensor(memory, 0, {256}, DType::f32, stream.device()), first.slice(2, 6)}, [](const Stream&) {});
    }
    branch.settle(settled);
    const bool result = !kept.expired();
    branch.join();
    CHECK(kept.expired());
    return result;
  };
  CHECK(keeps(second));
  CHECK(keeps(first.slice(0, 2)));   // ends where the other begins
  CHECK(keeps(first.slice(6, 8)));
  CHECK(keeps(first.slice(3, 3)));   // has no elements
  CHECK_FALSE(keeps(first));
  CHECK_FALSE(keeps(first.slice(5, 6)));
  CHECK_FALSE(keeps(first.slice(1, 3).reshape({8})));
}

TEST_CASE("side branch: settling waits for nothing that came later", "[cpu]") {
  const Stream stream = Stream::planning(Device::cuda(0));
  SideBranch branch(stream);
  std::vector<Tensor> aliases;
  for (int i = 0; i < 3; ++i) {
    const Tensor x = stream.empty({512}, DType::u8);
    branch.run({x}, [](const Stream&) {});
    aliases.push_back(alias(x));
  }
  branch.settle(aliases[1]);
  CHECK(stream.allocator().bytes_in_use() == 512);
  branch.settle(aliases[0]);   // has gone
  CHECK(stream.allocator().bytes_in_use() == 512);
  branch.settle(aliases[2]);
  CHECK(stream.allocator().bytes_in_use() == 0);
}

TEST_CASE("side branch: on the CPU work has run when its call returns", "[cpu]") {
  const Stream stream = Stream::cpu(1);
  SideBranch branch(stream);
  const Tensor from = host_tensor<float>({2}, {1, 2});
  Tensor to = stream.zeros({2}, DType::f32);
  branch.run({from, to}, [&](const Stream& side) { side.copy(from, to); });
  CHECK(values_of(to) == std::vector<double>{1, 2});
}

TEST_CASE("side branch: on a GPU its work comes after the stream's, and the stream's after a join", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  const Stream stream = gpu().with_arena();
  SideBranch branch(stream);
  const std::int64_t count = 1 << 24;
  const Tensor ones = on_gpu(host_tensor<float>({count}, std::vector<float>(static_cast<std::size_t>(count), 1)), DType::f32), zeros = stream.zeros({count}, DType::f32);
  Tensor a = stream.zeros({count}, DType::f32), b = stream.zeros({count}, DType::f32), c = stream.zeros({count}, DType::f32);
  // Each queue is slow to come to what the other waits for.
  const auto slowly = [&](const Stream& queue, const Tensor& from, Tensor& to) {
    for (int i = 0; i < 50; ++i) queue.copy(zeros, to);
    queue.copy(from, to);
  };
  const auto pass = [&](bool joins) {
    slowly(stream, ones, a);
    branch.run({a, b}, [&](const Stream& side) { slowly(side, a, b); });
    joins ? branch.join() : branch.settle(b);
    stream.copy(b, c);
    branch.join();
  };
  const auto clear = [&] {
    for (Tensor* x : {&a, &b, &c}) stream.copy(zeros, *x);
  };
  for (const bool joins : {true, false}) {
    INFO("joins " << joins);
    clear();
    pass(joins);
    expect_same_bits(stream.to_host(c), stream.to_host(ones));
    const Graph graph = stream.capture([&] { pass(joins); });
    for (int launch = 0; launch < 2; ++launch) {
      clear();
      graph.launch(stream);
      expect_same_bits(stream.to_host(c), stream.to_host(ones));
    }
  }
}

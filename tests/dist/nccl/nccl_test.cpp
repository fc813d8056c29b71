// The NCCL engine, one rank a GPU in threads of one process: right sums, eager and captured. With one GPU it is a group of one.
#include "dist/nccl/communicator.h"

#include <algorithm>
#include <cstdlib>

#include "dist/bucketer.h"
#include "runtime/gpus.h"
#include "tests/dist/ranks.h"
#include "tests/dist/steps.h"
#include "tests/gpu.h"

namespace detr::dist {
namespace {

using detr::test::cuda_available;

constexpr Milliseconds kTime{60000};

int ranks() { return std::min<int>(4, static_cast<int>(list_gpus().size())); }

void run(const std::function<void(Communicator&, const Stream&)>& body) {
  static_cast<void>(set_nccl_environment());
  const auto thrown = test::run_ranks(ranks(), [&](const Meeting& meeting) {
    const auto control = test::meet(meeting);
    const Stream stream = Stream::cuda(meeting.rank, 1);
    const auto communicator = nccl_communicator(control, stream, kTime, kTime);
    body(*communicator, stream);
    communicator->barrier(kTime, "end");
  }, kTime);
  for (const std::string& text : thrown) CHECK(text == "");
}

TEST_CASE("nccl: ranks that share a GPU get a host id each, unless there is one", "[cpu]") {
  const char* const names[] = {"NCCL_HOSTID", "NCCL_SOCKET_IFNAME"};
  for (const char* name : names) ::unsetenv(name);
  let_ranks_share_a_gpu(3);
  CHECK(std::string(std::getenv("NCCL_HOSTID")) == "detrtrain-rank-3");
  CHECK(std::string(std::getenv("NCCL_SOCKET_IFNAME")) == "lo");
  ::setenv("NCCL_SOCKET_IFNAME", "eth0", 1);
  let_ranks_share_a_gpu(4);
  CHECK(std::string(std::getenv("NCCL_HOSTID")) == "detrtrain-rank-3");
  CHECK(std::string(std::getenv("NCCL_SOCKET_IFNAME")) == "eth0");
  for (const char* name : names) ::unsetenv(name);
}

TEST_CASE("nccl: sums, gathers and broadcasts", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  std::vector<std::int64_t> wrong(static_cast<std::size_t>(ranks()), -1);
  run([&](Communicator& c, const Stream& stream) {
    std::int64_t count = 0;
    const double sum = c.size() * (c.size() + 1) / 2.0;
    for (const std::int64_t length : {1, 1000, 3'000'001}) {
      const std::vector<std::int64_t> own(static_cast<std::size_t>(length), c.rank() + 1);
      const std::vector<double> own_real(own.begin(), own.end());
      Tensor whole = stream.empty({length}, DType::i64), real = stream.empty({length}, DType::f64);
      stream.copy(host_tensor<std::int64_t>({length}, own), whole);
      stream.copy(host_tensor<double>({length}, own_real), real);
      stream.wait();
      const auto first = c.all_reduce_sum(stream, whole, {1, "i64"}), second = c.all_reduce_sum(stream, real, {2, "f64"});
      first->wait(stream, Clock::now() + kTime);
      second->wait(stream, Clock::now() + kTime);
      c.watch(stream, Clock::now() + kTime, "sums");
      const Tensor whole_host = stream.to_host(whole), real_host = stream.to_host(real);
      for (const std::int64_t x : whole_host.span<std::int64_t>()) count += static_cast<double>(x) != sum ? 1 : 0;
      for (const double x : real_host.span<double>()) count += x != sum ? 1 : 0;
      const Tensor all = stream.zeros({c.size(), length}, DType::i64);
      stream.copy(host_tensor<std::int64_t>({length}, own), whole);
      stream.wait();
      c.all_gather(stream, whole, all, {4, "gather"})->wait(stream, Clock::now() + kTime);
      c.watch(stream.record(), Clock::now() + kTime, "gather");
      const Tensor gathered = stream.to_host(all);
      for (std::int64_t i = 0; i < gathered.numel(); ++i) count += gathered.data<std::int64_t>()[i] != i / length + 1 ? 1 : 0;
      c.broadcast(stream, whole, c.size() - 1, {3, "broadcast"})->wait(stream, Clock::now() + kTime);
      c.watch(stream, Clock::now() + kTime, "broadcast");
      const Tensor sent = stream.to_host(whole);
      for (const std::int64_t x : sent.span<std::int64_t>()) count += x != c.size() ? 1 : 0;
    }
    wrong[static_cast<std::size_t>(c.rank())] = count;
  });
  for (const std::int64_t count : wrong) CHECK(count == 0);
}

TEST_CASE("nccl: a bucketer's step, eager and captured, with a parameter missing", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  std::vector<std::int64_t> wrong(static_cast<std::size_t>(ranks()), -1);
  run([&](Communicator& c, const Stream& stream) {
    const Layout layout = make_layout({{"a", DType::f32, {1000}}, {"b", DType::f32, {70}}, {"c", DType::f32, {5000}}}, {256, 4096});
    Tensor grads = stream.zeros({layout.total}, DType::f32);
    Bucketer bucketer(c, layout, grads, stream, {.extras = 1});
    const Tensor ones = host_tensor<float>({layout.total}, std::vector<float>(static_cast<std::size_t>(layout.total), static_cast<float>(c.rank() + 1)));
    const Tensor extra = host_tensor<double>({1}, std::vector<double>{2.0});
    const Tensor ones_there = stream.to_device(ones), extra_there = stream.to_device(extra);
    stream.wait();
    const auto step = [&](std::int64_t number) {
      bucketer.begin(number);
      stream.copy(ones_there, grads);
      Tensor extras = bucketer.extras();
      stream.copy(extra_there, extras);
      bucketer.mark_ready(2);
      bucketer.mark_missing(1);
      if (c.rank() == 0) bucketer.mark_ready(0);
      bucketer.finish();
    };
    std::int64_t count = 0;
    const auto check = [&] {
      c.watch(stream, Clock::now() + kTime, "step");
      const float sum = static_cast<float>(c.size() * (c.size() + 1)) / 2.0F;
      const Tensor summed = stream.to_host(grads), extras = stream.to_host(bucketer.extras()), used = stream.to_host(bucketer.used());
      for (const float x : summed.span<float>()) count += x != sum ? 1 : 0;
      count += extras.data<double>()[0] != 2.0 * c.size() ? 1 : 0;
      const auto u = used.span<double>();
      count += u[0] != 1.0 || u[1] != 0.0 || u[2] != c.size() ? 1 : 0;
      count += test::unused_everywhere(bucketer, stream) != std::vector<int>{1} ? 1 : 0;
    };
    step(0);
    check();
    {
      const Graph graph = stream.capture([&] { step(1); });   // gone before the communicator is
      for (int launch = 0; launch < 3; ++launch) {
        graph.launch(stream);
        check();
      }
    }
    wrong[static_cast<std::size_t>(c.rank())] = count;
  });
  for (const std::int64_t count : wrong) CHECK(count == 0);
}

}  // namespace
}  // namespace detr::dist

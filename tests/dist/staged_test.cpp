// The staged Gloo engine. Its steps do not know the device, so a CPU stream shows that they are right; on a GPU one rank is a process
// (tests/dist/nccl).
#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

#include "dist/bucketer.h"
#include "dist/gloo/communicator.h"
#include "tests/dist/ranks.h"
#include "tests/dist/steps.h"
#include "tests/support.h"

namespace detr::dist {
namespace {

using detr::test::expect_same_bits;
using detr::test::expect_throws;

constexpr Milliseconds kTime{20000};
Clock::time_point soon() { return Clock::now() + kTime; }

using Body = std::function<void(Communicator&, const Stream&)>;

/// Calls the body on each rank, with a stream of its own.
void run(int size, bool staged, const Body& body) {
  const auto thrown = test::run_ranks(size, [&](const Meeting& meeting) {
    const auto control = test::meet(meeting);
    const Stream stream = Stream::cpu(1);
    const auto communicator = staged ? staged_gloo_communicator(control, stream, kTime, {"127.0.0.1", kTime}) : test::communicator_of(control);
    body(*communicator, stream);
    communicator->barrier(kTime, "end");
  });
  for (const std::string& text : thrown) REQUIRE(text == "");
}

Tensor draws(std::int64_t count, DType dtype, int seed) {
  std::mt19937 draw(static_cast<unsigned>(seed));
  Tensor out = host_zeros({count}, dtype);
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(std::ldexp(static_cast<double>(draw()), -31) - 1.0);
    if (dtype == DType::bf16) out.data<BFloat16>()[i] = to_bf16(x);
    else out.data<float>()[i] = x;
  }
  return out;
}

/// Sums, gathers and a broadcast, several under way at once, twice so that blocks are used again: by rank, what they gave.
std::vector<std::vector<Tensor>> collectives(int size, bool staged) {
  std::vector<std::vector<Tensor>> results(static_cast<std::size_t>(size));
  run(size, staged, [&](Communicator& c, const Stream& stream) {
    if (c.capturable() || std::string(c.engine()) != (staged ? "gloo-staged" : "gloo")) throw Error("another engine: ", c.engine());
    auto& out = results[static_cast<std::size_t>(c.rank())];
    for (std::uint64_t round = 0; round < 2; ++round) {
      const int seed = c.rank() + 10 * static_cast<int>(round);
      const Tensor single = draws(5001, DType::f32, seed), half = draws(4000, DType::bf16, seed), none = host_zeros({0}, DType::f32);
      const Tensor mine = draws(6, DType::f32, seed).reshape({2, 3});
      const Tensor all = host_zeros({size, 2, 3}, DType::f32), sent = draws(1000, DType::f32, seed);
      const std::uint64_t tag = 10 * round;
      std::vector<std::shared_ptr<Work>> works;
      works.push_back(c.all_reduce_sum(stream, single, {tag, "f32"}));
      works.push_back(c.all_reduce_sum(stream, half, {tag + 1, "bf16"}));
      works.push_back(c.all_gather(stream, mine, all, {tag + 2, "gather"}));
      works.push_back(c.all_reduce_sum(stream, none, {tag + 3, "none"}));
      works.push_back(c.broadcast(stream, sent, size - 1, {tag + 4, "weights"}));
      for (const auto& work : works) work->wait(stream, soon());
      for (const Tensor& tensor : {single, half, all, sent}) out.push_back(tensor);
    }
  });
  return results;
}

TEST_CASE("gloo-staged: the bits of Gloo", "[cpu]") {
  for (int size = 2; size <= 4; ++size) {
    const auto direct = collectives(size, false), staged = collectives(size, true);
    for (std::size_t rank = 0; rank < direct.size(); ++rank) {
      REQUIRE(staged[rank].size() == 8);
      for (std::size_t i = 0; i < 8; ++i) expect_same_bits(staged[rank][i], direct[rank][i]);
      for (std::size_t i = 0; i < 8; ++i) expect_same_bits(staged[rank][i], staged[0][i]);
    }
    for (int rank = 0; rank < size; ++rank) expect_same_bits(staged[0][2].slice(rank, rank + 1).reshape({6}), draws(6, DType::f32, rank));
    expect_same_bits(staged[0][7], draws(1000, DType::f32, size - 1 + 10));
  }
}

TEST_CASE("gloo-staged: a tensor changes when its work is waited for, and not before", "[cpu]") {
  std::vector<std::vector<double>> before(2), after(2);
  run(2, true, [&](Communicator& c, const Stream& stream) {
    const Tensor x = host_tensor<float>({1}, {static_cast<float>(c.rank() + 1)});
    const auto work = c.all_reduce_sum(stream, x, {1, "sum"});
    const Tensor y = host_tensor<float>({1}, {7.0F});
    c.all_reduce_sum(stream, y, {2, "behind"})->wait(stream, soon());   // the first is done by then
    before[static_cast<std::size_t>(c.rank())] = detr::test::values_of(x);
    work->wait(stream, soon());
    after[static_cast<std::size_t>(c.rank())] = detr::test::values_of(x);
  });
  CHECK(before == std::vector<std::vector<double>>{{1}, {2}});
  CHECK(after == std::vector<std::vector<double>>{{3}, {3}});
}

TEST_CASE("gloo-staged: a bucketer's steps", "[cpu]") {
  const auto steps = [](bool staged) {
    std::vector<Tensor> results(3);
    std::vector<std::vector<Flight>> records(3);
    run(3, staged, [&](Communicator& c, const Stream& stream) {
      const Layout layout = test::Steps::layout();
      const Tensor grads = host_zeros({layout.total}, DType::f32);
      Bucketer bucketer(c, layout, grads, stream, {.extras = 2});
      test::Steps made_up;
      made_up.integers = false;
      for (int step = 0; step < 10; ++step) made_up.run(bucketer, grads, step, c.rank());
      results[static_cast<std::size_t>(c.rank())] = grads;
      records[static_cast<std::size_t>(c.rank())] = c.record().flights();
    });
    for (const auto& flights : records) {
      CHECK(flights.size() == 10 * (test::Steps::layout().buckets.size() + 1));
      CHECK(flights.back().phase == "trailer of step 9");
      CHECK(std::ranges::all_of(flights, [](const Flight& f) { return f.ended_s >= f.issued_s; }));
      CHECK_FALSE(first_difference(flights, records[0]));
    }
    return results;
  };
  const auto staged = steps(true), direct = steps(false);
  for (std::size_t rank = 0; rank < 3; ++rank) expect_same_bits(staged[rank], direct[0]);
}

TEST_CASE("gloo-staged: arguments, and the deadline of a work", "[cpu]") {
  std::vector<std::vector<std::string>> texts(2);
  const auto thrown = test::run_ranks(2, [&](const Meeting& meeting) {
    const auto control = test::meet(meeting);
    const Stream stream = Stream::cpu(1);
    const auto c = staged_gloo_communicator(control, stream, kTime, {"127.0.0.1", kTime});
    const Tensor elsewhere(nullptr, 0, Shape{0}, DType::f32, Device::cuda(0)), x = host_zeros({2}, DType::f32);
    c->barrier(kTime, "start");
    const auto expect = [&](const std::function<void()>& call) {
      try {
        call();
      } catch (const Error& error) {
        texts[static_cast<std::size_t>(meeting.rank)].emplace_back(error.what());
      }
    };
    expect([&] { c->all_reduce_sum(stream, elsewhere, {1, "sum"}); });
    expect([&] { c->all_gather(stream, x, x, {1, "g"}); });
    expect([&] { c->broadcast(stream, x, 2, {1, "w"}); });
    if (meeting.rank == 1) return std::this_thread::sleep_for(Milliseconds(1000));
    expect([&] { c->all_reduce_sum(stream, x, {2, "bucket 3 of step 5"})->wait(stream, Clock::now() + Milliseconds(200)); });
    expect([&] { c->all_reduce_sum(stream, x, {3, "bucket 4 of step 5"}); });
  });
  for (const std::string& text : thrown) CHECK(text == "");
  const std::vector<std::string> both = {"gloo-staged, sum: a tensor on cpu, got f32(0)", "all_gather, g: f32(2) of each of 2 ranks into f32(2)",
                                         "broadcast, w: root 2 in a group of 2"};
  CHECK(texts[1] == both);
  REQUIRE(texts[0].size() == 5);
  CHECK(std::equal(both.begin(), both.end(), texts[0].begin()));
  CHECK(texts[0][3] == "rank 0: bucket 3 of step 5: not done by its deadline; a peer is late or stuck");
  CHECK(texts[0][4] == texts[0][3]);
  expect_throws<InvalidArgument>([] { staged_gloo_communicator(nullptr, Stream::planning(Device::cpu()), kTime); }, "planning stream");
}

}  // namespace
}  // namespace detr::dist

// The bucketer: the plain sum of whatever each rank's backward reached, and errors of its caller.
#include "dist/bucketer.h"

#include "dist/build.h"
#include "tests/dist/ranks.h"
#include "tests/dist/steps.h"
#include "tests/support.h"

namespace detr::dist {
namespace {

using detr::test::expect_throws;
using test::Steps;

const Stream& cpu() {
  static const Stream stream = Stream::cpu(1);
  return stream;
}

/// What a step left on one rank.
struct Result {
  std::vector<float> grads;
  std::vector<double> used, extras;
  std::vector<int> unused;
  bool operator==(const Result&) const = default;
};

/// results[rank][step].
std::vector<std::vector<Result>> run(const Steps& steps, int size, int count) {
  std::vector<std::vector<Result>> results(static_cast<std::size_t>(size));
  const auto thrown = test::run_ranks(size, [&](const Meeting& meeting) {
    const auto communicator = test::communicator_of(test::meet(meeting));
    const Layout layout = Steps::layout();
    const Tensor grads = host_zeros({layout.total}, DType::f32);
    Bucketer bucketer(*communicator, layout, grads, cpu(), {.extras = 2});
    for (int step = 0; step < count; ++step) {
      steps.run(bucketer, grads, step, meeting.rank);
      const auto g = grads.span<float>();
      const auto used = bucketer.used().span<double>(), extras = bucketer.extras().span<double>();
      results[static_cast<std::size_t>(meeting.rank)].push_back({{g.begin(), g.end()}, {used.begin(), used.end()}, {extras.begin(), extras.end()}, test::unused_everywhere(bucketer, cpu())});
    }
    communicator->barrier(Milliseconds(20000), "end");
  });
  for (const std::string& text : thrown) REQUIRE(text == "");
  return results;
}

/// The sums in plain loops.
Result plain(const Steps& steps, int size, int step) {
  const Layout layout = Steps::layout();
  Result sum{std::vector<float>(static_cast<std::size_t>(layout.total)), std::vector<double>(layout.parameters.size()), {0, 0}, {}};
  for (std::size_t p = 0; p < layout.parameters.size(); ++p) {
    for (int rank = 0; rank < size; ++rank) {
      if (!steps.reached(step, rank, static_cast<int>(p))) continue;
      sum.used[p] += 1;
      const std::int64_t begin = layout.offsets[p];
      for (std::int64_t i = begin; i < begin + layout.parameters[p].shape.numel(); ++i) sum.grads[static_cast<std::size_t>(i)] += steps.gradient(step, rank, i);
    }
    if (sum.used[p] == 0) sum.unused.push_back(static_cast<int>(p));
  }
  for (int rank = 0; rank < size; ++rank) {
    for (std::size_t i = 0; i < 2; ++i) sum.extras[i] += static_cast<double>(rank + static_cast<int>(i) + step);
  }
  return sum;
}

int largest_group() { return kHasGloo ? 4 : 1; }

TEST_CASE("bucketer: any subset missing on any rank, many steps, gives the plain sum", "[cpu]") {
  REQUIRE(Steps::layout().buckets.size() >= 4);
  for (int size = 1; size <= largest_group(); ++size) {
    Steps steps;
    steps.seed = static_cast<unsigned>(size);
    steps.never = {4, 11};
    const int count = 120;
    const auto results = run(steps, size, count);
    int wrong = 0;
    for (int step = 0; step < count; ++step) {
      const Result expected = plain(steps, size, step);
      for (const auto& of_rank : results) wrong += of_rank[static_cast<std::size_t>(step)] == expected ? 0 : 1;
    }
    INFO("size " << size);
    CHECK(wrong == 0);
    CHECK(std::ranges::includes(results[0][0].unused, steps.never));
  }
}

TEST_CASE("bucketer: nothing reached on one rank, and on all", "[cpu]") {
  Steps steps;
  steps.missing = 1.0;
  for (int size = 1; size <= largest_group(); ++size) {
    const auto results = run(steps, size, 3);
    for (const auto& of_rank : results) CHECK(of_rank[2] == plain(steps, size, 2));
    CHECK(results[0][0].unused.size() == Steps::layout().parameters.size());
  }
}

TEST_CASE("bucketer: the bits do not depend on the order of readiness, the rank or the run", "[cpu]") {
  for (int size = 2; size <= largest_group(); ++size) {
    Steps steps;
    steps.integers = false;
    const auto first = run(steps, size, 20), again = run(steps, size, 20);
    steps.order_seed = 99;
    const auto other_order = run(steps, size, 20);
    INFO("size " << size);
    for (const auto& of_rank : first) CHECK(of_rank == first[0]);
    CHECK(again == first);
    CHECK(other_order == first);
    double largest = 0;
    const Result expected = plain(steps, size, 7);
    for (std::size_t i = 0; i < expected.grads.size(); ++i) largest = std::max(largest, std::abs(static_cast<double>(expected.grads[i] - first[0][7].grads[i])));
    CHECK(largest <= 2 * size * size * std::ldexp(1.0, -24));   // two sums of `size` values below 1, each rounded size - 1 times
  }
}

/// Records what is issued, and when.
class Recorder final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  const char* engine() const override { return "recorder"; }
  bool capturable() const override { return false; }
  std::shared_ptr<Work> all_reduce_sum(const Stream& stream, const Tensor& tensor, const Place& place) override {
    issued.push_back(place);
    lengths.push_back(tensor.numel());
    return single_->all_reduce_sum(stream, tensor, place);
  }
  std::shared_ptr<Work> broadcast(const Stream& stream, const Tensor& tensor, int root, const Place& place) override { return single_->broadcast(stream, tensor, root, place); }
  std::shared_ptr<Work> all_gather(const Stream& stream, const Tensor& mine, const Tensor& all, const Place& place) override { return single_->all_gather(stream, mine, all, place); }
  void barrier(Milliseconds, const std::string&) override {}
  void check(const std::string&) override {}
  void abort(const std::string&) noexcept override {}

  std::vector<Place> issued;
  std::vector<std::int64_t> lengths;

 private:
  std::unique_ptr<Communicator> single_ = single_communicator();
};

Layout three_buckets() { return make_layout({{"a", DType::f32, {64}}, {"b", DType::f32, {64}}, {"c", DType::f32, {64}}, {"d", DType::f32, {64}}}, {256, 512}); }   // a; b c; d

TEST_CASE("bucketer: a bucket goes when it is complete and its turn has come", "[cpu]") {
  Recorder recorder;
  const Layout layout = three_buckets();
  Bucketer bucketer(recorder, layout, host_zeros({layout.total}, DType::f32), cpu(), {.extras = 1});
  CHECK(bucketer.plan_length() == 4);
  bucketer.begin(10);
  bucketer.mark_ready(3);      // complete, but not its turn
  bucketer.mark_ready(1);
  CHECK(recorder.issued.empty());
  bucketer.mark_missing(0);
  REQUIRE(recorder.issued.size() == 1);
  bucketer.mark_ready(2);      // and the one behind it goes too
  REQUIRE(recorder.issued.size() == 3);
  bucketer.finish();
  REQUIRE(recorder.issued.size() == 4);
  for (std::size_t slot = 0; slot < 4; ++slot) CHECK(recorder.issued[slot].tag == 40 + slot);
  CHECK(recorder.issued[1].phase == "bucket 1 of step 10");
  CHECK(recorder.issued[3].phase == "trailer of step 10");
  CHECK(recorder.lengths == std::vector<std::int64_t>{64, 128, 64, 5});
  CHECK(test::unused_everywhere(bucketer, cpu()) == std::vector<int>{0});

  bucketer.begin(11);   // nothing marked: the same plan
  bucketer.mark_used(0);
  bucketer.finish();
  CHECK(recorder.issued.size() == 8);
  CHECK(std::vector<std::int64_t>(recorder.lengths.begin() + 4, recorder.lengths.end()) == std::vector<std::int64_t>{64, 128, 64, 5});
  CHECK(test::unused_everywhere(bucketer, cpu()) == std::vector<int>{1, 2, 3});
}

TEST_CASE("bucketer: a bucket that is ready early waits for the exchanges that go before it", "[cpu]") {
  Recorder recorder;
  const Layout layout = three_buckets();
  Bucketer bucketer(recorder, layout, host_zeros({layout.total}, DType::f32), cpu(), {.exchanges_before = {0, 2, 2}, .slots_before = 3});
  CHECK(bucketer.plan_length() == 7);
  std::vector<std::size_t> issued;   // buckets at each exchange
  const auto exchange = [&] { bucketer.exchange([&] { issued.push_back(recorder.issued.size()); }); };
  for (const bool early : {true, false}) {
    recorder.issued.clear();
    issued.clear();
    bucketer.begin(2);
    bucketer.mark_ready(0);
    if (early) {
      for (const int p : {1, 2, 3}) bucketer.mark_missing(p);
    }
    exchange();
    if (!early) bucketer.mark_ready(1);
    exchange();
    for (const int p : {2, 3}) {
      if (!early) bucketer.mark_ready(p);
    }
    if (!early) CHECK(recorder.issued.size() == 3);
    exchange();
    CHECK(issued == std::vector<std::size_t>{1, 1, 3});
    bucketer.finish();
    REQUIRE(recorder.issued.size() == 4);
    for (std::size_t i = 0; i < 4; ++i) CHECK(recorder.issued[i].tag == 2 * 7 + 3 + i);
  }
  bucketer.begin(3);
  expect_throws<InvalidArgument>(exchange, "the gradient of a is not complete before exchange 0 of backward");
  expect_throws<InvalidArgument>([&] { Bucketer(recorder, layout, host_zeros({layout.total}, DType::f32), cpu(), {.exchanges_before = {0, 2, 1}}); }, "must not fall");
}

TEST_CASE("bucketer: a bucket in another's place never comes to the engine, however long it is", "[cpu]") {
  const Layout layout = three_buckets();   // the first and the last one are equally long
  for (const int other : {1, 2}) {
    Recorder recorder;
    Bucketer bucketer(recorder, layout, host_zeros({layout.total}, DType::f32), cpu(), {.slots_before = 2});
    bucketer.set_fault({.swap_a = 0, .swap_b = other});
    bucketer.begin(7);
    expect_throws<CommError>([&] { bucketer.finish(); }, concat("rank 0: bucket ", other, " of step 7: slot ", 2 + other, " of the plan is to be sent where slot 2 is due"));
    CHECK(recorder.issued.empty());
  }
}

TEST_CASE("bucketer: a bucket of another length than the plan's never comes to the engine", "[cpu]") {
  Recorder recorder;
  const Layout layout = three_buckets();
  Bucketer bucketer(recorder, layout, host_zeros({layout.total}, DType::f32), cpu(), {.slots_before = 2});
  bucketer.set_fault({.shorten = 1});
  bucketer.begin(7);
  expect_throws<CommError>([&] { bucketer.finish(); }, "rank 0: bucket 1 of step 7: slot 3 of the plan has 128 values, and 64 are to be sent");
  CHECK(recorder.lengths == std::vector<std::int64_t>{64});
}

TEST_CASE("bucketer: errors of the caller name the parameter", "[cpu]") {
  const auto single = single_communicator();
  const Layout layout = three_buckets();
  const Tensor grads = host_zeros({layout.total}, DType::f32);
  Bucketer bucketer(*single, layout, grads, cpu());
  expect_throws<InvalidArgument>([&] { bucketer.mark_ready(1); }, "the gradient of b comes outside of a step");
  expect_throws<InvalidArgument>([&] { bucketer.finish(); }, "finish() without begin()");
  bucketer.begin(3);
  expect_throws<InvalidArgument>([&] { bucketer.begin(4); }, "step 4 begins before step 3 is finished");
  bucketer.mark_ready(1);
  bucketer.mark_missing(2);
  expect_throws<InvalidArgument>([&] { bucketer.mark_ready(1); }, "step 3: the gradient of b was reported complete before");
  expect_throws<InvalidArgument>([&] { bucketer.mark_ready(2); }, "step 3: the gradient of c was reported missing before");
  expect_throws<InvalidArgument>([&] { bucketer.mark_ready(4); }, "parameter 4 of 4");
  expect_throws<InvalidArgument>([&] { bucketer.mark_ready(-1); }, "parameter -1 of 4");
  bucketer.finish();
  expect_throws<InvalidArgument>([&] { Bucketer(*single, layout, host_zeros({layout.total + 1}, DType::f32), cpu()); }, "bucketer: grads");
  expect_throws<InvalidArgument>([&] { Bucketer(*single, layout, host_zeros({layout.total}, DType::f64), cpu()); }, "bucketer: grads");
}

}  // namespace
}  // namespace detr::dist

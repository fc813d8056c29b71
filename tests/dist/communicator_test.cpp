// What all engines share: the group of one, arguments, and the host's wait for a device.
#include "dist/communicator.h"

#include <thread>

#include "tests/support.h"

namespace detr::dist {
namespace {

using detr::test::expect_throws;

Clock::time_point after(int milliseconds) { return Clock::now() + Milliseconds(milliseconds); }

const Stream& cpu() {
  static const Stream stream = Stream::cpu(1);
  return stream;
}

TEST_CASE("communicators: the group of one", "[cpu]") {
  const auto single = single_communicator();
  CHECK(single->size() == 1);
  CHECK(single->rank() == 0);
  CHECK(std::string(single->engine()) == "single");
  CHECK(single->capturable());
  const Tensor sum = host_tensor<float>({2}, {1, 2});
  single->all_reduce_sum(cpu(), sum, {1, "sum"})->wait(cpu(), after(0));
  single->broadcast(cpu(), sum, 0, {2, "weights"})->wait(cpu(), after(0));
  CHECK(detr::test::values_of(sum) == std::vector<double>{1, 2});
  const Tensor all = host_zeros({1, 2}, DType::f32);
  single->all_gather(cpu(), sum, all, {3, "statistics"})->wait(cpu(), after(0));
  CHECK(detr::test::values_of(all) == std::vector<double>{1, 2});
  single->all_gather(cpu(), all.reshape({2}), all, {4, "in place"})->wait(cpu(), after(0));
  CHECK(detr::test::values_of(all) == std::vector<double>{1, 2});
  single->barrier(Milliseconds(1), "end");
  const std::vector<Flight> flights = single->record().flights();
  REQUIRE(flights.size() == 4);
  CHECK(flights[2].phase == "statistics");
  CHECK(flights[2].tag == 3);
  CHECK(flights[2].bytes == 8);
  CHECK(flights[2].ended_s >= 0);
}

TEST_CASE("communicators: arguments", "[cpu]") {
  const auto single = single_communicator();
  const Tensor three = host_zeros({3}, DType::f32);
  expect_throws<InvalidArgument>([&] { single->all_reduce_sum(cpu(), host_zeros({1}, DType::u8), {1, "sum"}); }, "sum: f32, f64, bf16 or i64, got u8(1)");
  expect_throws<InvalidArgument>([&] { single->all_reduce_sum(cpu(), Tensor(), {1, "sum"}); }, "undefined");
  expect_throws<InvalidArgument>([&] { single->broadcast(cpu(), three, 1, {1, "w"}); }, "root 1 in a group of one");
  expect_throws<InvalidArgument>([&] { expect_root(-1, 4, "w"); }, "w: root -1 in a group of 4");
  expect_throws<InvalidArgument>([&] { single->all_gather(cpu(), three, Tensor(), {1, "g"}); }, "all_gather, g: a tensor is undefined");
  expect_throws<InvalidArgument>([&] { single->all_gather(cpu(), three, three, {1, "g"}); }, "all_gather, g: f32(3) of each of 1 ranks into f32(3)");
  expect_throws<InvalidArgument>([&] { expect_gatherable(three, host_zeros({2, 3}, DType::f64), 2, "g"); }, "f32(3) of each of 2 ranks into f64(2, 3)");
  expect_throws<InvalidArgument>([&] { expect_gatherable(three, host_zeros({3, 3}, DType::f32), 2, "g"); }, "into f32(3, 3)");
  expect_throws<InvalidArgument>([&] { expect_gatherable(host_zeros({2, 3}, DType::f32), host_zeros({2, 3, 2}, DType::f32), 2, "g"); }, "f32(2, 3) of each of 2 ranks");
  expect_gatherable(three, host_zeros({2, 3}, DType::f32), 2, "g");
  expect_gatherable(host_zeros({}, DType::f32), host_zeros({2}, DType::f32), 2, "g");
}

TEST_CASE("communicators: the wait for a device ends when it is done, late, or not wanted any more", "[cpu]") {
  int asked = 0;
  single_communicator()->watch([&] { return ++asked == 30; }, after(20000), "step 3");
  CHECK(asked == 30);
  single_communicator()->watch(cpu(), after(-1), "step 3");   // has been passed
  single_communicator()->watch(Event(), after(-1), "step 3");

  const auto late = single_communicator();
  const Clock::time_point start = Clock::now();
  expect_throws<CommError>([&] { late->watch([] { return false; }, after(200), "step 3"); }, "rank 0: step 3: the device is not done by the deadline");
  CHECK(Clock::now() - start >= Milliseconds(200));
  expect_throws<CommError>([&] { late->watch([] { return true; }, after(200), "step 4"); }, "rank 0: step 3: ");   // dead: the first reason
  expect_throws<CommError>([&] { late->all_reduce_sum(cpu(), host_zeros({1}, DType::f32), {1, "sum"}); }, "rank 0: step 3: ");
  expect_throws<CommError>([&] { late->barrier(Milliseconds(1), "end"); }, "rank 0: step 3: ");

  const auto aborted = single_communicator();
  std::thread other([&] {
    std::this_thread::sleep_for(Milliseconds(100));
    aborted->abort("stopped by a test");
  });
  expect_throws<CommError>([&] { aborted->watch([] { return false; }, after(20000), "step 3"); }, "stopped by a test");
  other.join();
  CHECK(Clock::now() - start < Milliseconds(10000));
}

}  // namespace
}  // namespace detr::dist

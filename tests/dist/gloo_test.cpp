// The Gloo engine: right sums, the same bits everywhere, and errors instead of wrong pairings or waiting for ever.
#include "dist/gloo/communicator.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "dist/bucketer.h"
#include "runtime/host_value.h"
#include "tests/dist/ranks.h"
#include "tests/dist/steps.h"
#include "tests/support.h"

namespace detr::dist {
namespace {

using detr::test::expect_throws;
using test::communicator_of;
using test::meet;
using test::run_ranks;
using test::values;

Clock::time_point after(int milliseconds) { return Clock::now() + Milliseconds(milliseconds); }

const Stream& cpu() {
  static const Stream stream = Stream::cpu(1);
  return stream;
}

std::vector<Tensor> sums(int size, DType dtype, std::int64_t count, bool integers) {
  std::vector<Tensor> out(static_cast<std::size_t>(size));
  const auto thrown = run_ranks(size, [&](const Meeting& meeting) {
    const auto communicator = communicator_of(meet(meeting));
    const Tensor tensor = values(dtype, count, meeting.rank, integers);
    communicator->all_reduce_sum(cpu(), tensor, {1, "sum"})->wait(cpu(), after(20000));
    communicator->barrier(Milliseconds(20000), "end");
    out[static_cast<std::size_t>(meeting.rank)] = tensor;
  });
  for (const std::string& text : thrown) REQUIRE(text.empty());
  return out;
}

double value_of(const Tensor& tensor, std::int64_t i) {
  return tensor.dtype() == DType::i64 ? static_cast<double>(tensor.data<std::int64_t>()[i]) : host_value(tensor, i);
}

TEST_CASE("gloo: sums of integers are exact, for every dtype and group", "[cpu]") {
  for (int size = 1; size <= 4; ++size) {
    for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::i64}) {
      for (const std::int64_t count : {0, 1, 3, 1000}) {
        const std::vector<Tensor> got = sums(size, dtype, count, true);
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < count; ++i) {
          double sum = 0;
          for (int rank = 0; rank < size; ++rank) sum += value_of(values(dtype, count, rank, true), i);
          for (const Tensor& tensor : got) wrong += value_of(tensor, i) != sum ? 1 : 0;
        }
        INFO("size " << size << ", " << dtype << ", count " << count);
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("gloo: sums that round are near, the same on all ranks and again", "[cpu]") {
  for (int size = 2; size <= 4; ++size) {
    const std::int64_t count = 600'001;   // several of Gloo's segments
    const std::vector<Tensor> first = sums(size, DType::f32, count, false), second = sums(size, DType::f32, count, false);
    std::vector<Tensor> parts;
    for (int rank = 0; rank < size; ++rank) parts.push_back(values(DType::f32, count, rank, false));
    double largest = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      double sum = 0;
      for (const Tensor& part : parts) sum += static_cast<double>(part.data<float>()[i]);
      largest = std::max(largest, std::abs(sum - static_cast<double>(first[0].data<float>()[i])));
    }
    CHECK(largest <= size * size * std::ldexp(1.0, -24));   // size - 1 roundings of partial sums below size
    for (int rank = 0; rank < size; ++rank) {
      detr::test::expect_same_bits(first[static_cast<std::size_t>(rank)], first[0]);
      detr::test::expect_same_bits(second[static_cast<std::size_t>(rank)], first[0]);
    }
  }
}

TEST_CASE("gloo: broadcast from each root, of each dtype, several under way at once", "[cpu]") {
  std::vector<int> wrong(3, -1);
  const auto thrown = run_ranks(3, [&](const Meeting& meeting) {
    const auto communicator = communicator_of(meet(meeting));
    std::vector<Tensor> tensors;
    std::vector<std::shared_ptr<Work>> works;
    for (int root = 0; root < 3; ++root) {
      Tensor bytes = host_zeros({1000}, DType::u8);
      for (std::uint8_t& byte : bytes.span<std::uint8_t>()) byte = static_cast<std::uint8_t>(meeting.rank + 1);
      works.push_back(communicator->broadcast(cpu(), bytes, root, {static_cast<std::uint64_t>(root), "weights"}));
      tensors.push_back(bytes);
    }
    int count = 0;
    for (std::size_t root = 0; root < 3; ++root) {
      works[root]->wait(cpu(), after(20000));
      for (const std::uint8_t byte : tensors[root].span<std::uint8_t>()) count += byte != root + 1 ? 1 : 0;
    }
    communicator->barrier(Milliseconds(20000), "end");
    wrong[static_cast<std::size_t>(meeting.rank)] = count;
  });
  for (const std::string& text : thrown) CHECK(text.empty());
  CHECK(wrong == std::vector<int>{0, 0, 0});
}

/// Runs 3 ranks with a timeout of the engine and expects a CommError with `text` on the ranks of `wanted` within `limit`.
void expect_failures(const std::function<void(Communicator&)>& body, const std::vector<int>& wanted, const std::string& text, Milliseconds timeout,
                     Milliseconds limit) {
  std::vector<Clock::duration> took(3, Clock::duration::zero());
  std::vector<int> right_type(3, 0);
  const auto thrown = run_ranks(3, [&](const Meeting& meeting) {
    const auto communicator = communicator_of(meet(meeting), timeout);
    communicator->barrier(Milliseconds(20000), "start");
    const Clock::time_point start = Clock::now();
    try {
      body(*communicator);
    } catch (const CommError&) {
      took[static_cast<std::size_t>(meeting.rank)] = Clock::now() - start;
      right_type[static_cast<std::size_t>(meeting.rank)] = 1;
      throw;
    }
  });
  for (const int rank : wanted) {
    const auto r = static_cast<std::size_t>(rank);
    INFO("rank " << rank << ": " << thrown[r] << " after " << std::chrono::duration<double>(took[r]).count() << " s");
    CHECK(right_type[r] == 1);
    CHECK(thrown[r].find(text) != std::string::npos);
    CHECK(took[r] < limit);
  }
}

TEST_CASE("gloo: collectives in another order are an error, never a mixture", "[cpu]") {
  expect_failures([](Communicator& c) {
    const Tensor a = host_zeros({100}, DType::f32), b = host_zeros({100}, DType::f32);
    const bool swapped = c.rank() == 1;
    const auto first = c.all_reduce_sum(cpu(), swapped ? b : a, swapped ? Place{2, "b"} : Place{1, "a"});
    const auto second = c.all_reduce_sum(cpu(), swapped ? a : b, swapped ? Place{1, "a"} : Place{2, "b"});
    first->wait(cpu(), after(5000));
    second->wait(cpu(), after(5000));
  }, {0, 1, 2}, "rank ", Milliseconds(1000), Milliseconds(3000));
}

TEST_CASE("gloo: a rank that does not come ends the others at the timeout", "[cpu]") {
  expect_failures([](Communicator& c) {
    if (c.rank() == 2) return std::this_thread::sleep_for(Milliseconds(4000));
    c.all_reduce_sum(cpu(), host_zeros({10}, DType::f32), {1, "bucket 3 of step 5"})->wait(cpu(), after(5000));
  }, {0, 1}, "bucket 3 of step 5: lost a peer", Milliseconds(1000), Milliseconds(3000));
}

TEST_CASE("gloo: a handle's deadline and abort() end what waits, soon", "[cpu]") {
  expect_failures([](Communicator& c) {
    if (c.rank() == 2) return std::this_thread::sleep_for(Milliseconds(2000));
    c.all_reduce_sum(cpu(), host_zeros({10}, DType::f32), {1, "trailer of step 5"})->wait(cpu(), after(200));
  }, {0, 1}, "trailer of step 5: ", Milliseconds(10000), Milliseconds(1500));
  expect_failures([](Communicator& c) {
    if (c.rank() == 2) return std::this_thread::sleep_for(Milliseconds(2000));
    std::thread other([&] {
      std::this_thread::sleep_for(Milliseconds(100));
      c.abort("stopped by a test");
    });
    const auto work = c.all_reduce_sum(cpu(), host_zeros({10}, DType::f32), {1, "sum"});
    try {
      work->wait(cpu(), after(5000));
    } catch (const CommError&) {
      other.join();
      throw;
    }
    other.join();
  }, {0, 1}, "", Milliseconds(10000), Milliseconds(1500));
}

TEST_CASE("gloo: after an error every call says the first reason", "[cpu]") {
  std::vector<std::vector<std::string>> texts(2);
  const auto thrown = run_ranks(2, [&](const Meeting& meeting) {
    const auto communicator = communicator_of(meet(meeting));
    communicator->barrier(Milliseconds(20000), "start");
    communicator->abort("the first reason");
    communicator->abort("another");
    const std::vector<std::function<void()>> calls = {
        [&] { communicator->all_reduce_sum(cpu(), host_zeros({1}, DType::f32), {1, "sum"}); },
        [&] { communicator->barrier(Milliseconds(100), "end"); },
        [&] { communicator->watch(cpu(), after(100), "step"); },
    };
    for (const auto& call : calls) {
      try {
        call();
      } catch (const CommError& error) {
        texts[static_cast<std::size_t>(meeting.rank)].emplace_back(error.what());
      }
    }
  });
  for (const auto& of_rank : texts) CHECK(of_rank == std::vector<std::string>(3, "the first reason"));
  for (const std::string& text : thrown) CHECK(text.empty());
}

TEST_CASE("gloo: the caller goes on while a bucket waits for its peers", "[cpu]") {
  Clock::duration until_finish{}, in_finish{};
  const auto thrown = run_ranks(2, [&](const Meeting& meeting) {
    const auto communicator = communicator_of(meet(meeting));
    const Layout layout = make_layout({{"a", DType::f32, {64}}, {"b", DType::f32, {64}}, {"c", DType::f32, {64}}}, {256, 256});
    Bucketer bucketer(*communicator, layout, host_zeros({layout.total}, DType::f32), cpu());
    communicator->barrier(Milliseconds(20000), "start");
    if (meeting.rank == 1) std::this_thread::sleep_for(Milliseconds(1500));
    const Clock::time_point start = Clock::now();
    bucketer.begin(0);
    for (const int parameter : {0, 1, 2}) bucketer.mark_ready(parameter);
    const Clock::time_point marked = Clock::now();
    bucketer.finish();
    if (meeting.rank == 0) {
      until_finish = marked - start;
      in_finish = Clock::now() - marked;
    }
    communicator->barrier(Milliseconds(20000), "end");
  });
  for (const std::string& text : thrown) CHECK(text.empty());
  CHECK(until_finish < Milliseconds(700));
  CHECK(in_finish > Milliseconds(700));
}

TEST_CASE("gloo: a barrier names who is missing", "[cpu]") {
  const auto thrown = run_ranks(3, [&](const Meeting& meeting) {
    const auto communicator = communicator_of(meet(meeting));
    if (meeting.rank == 1) return std::this_thread::sleep_for(Milliseconds(1000));
    communicator->barrier(Milliseconds(meeting.rank == 0 ? 300 : 5000), "save");
  });
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}}) CHECK(thrown[rank].find("rank 1: has not come to save by its deadline") != std::string::npos);
}

TEST_CASE("gloo: all ranks get every rank's part, of every dtype", "[cpu]") {
  for (int size = 2; size <= 4; ++size) {
    std::vector<int> wrong(static_cast<std::size_t>(size), -1);
    const auto thrown = run_ranks(size, [&](const Meeting& meeting) {
      const auto communicator = communicator_of(meet(meeting));
      int count = 0;
      std::uint64_t tag = 0;
      for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::i64, DType::u8}) {
        for (const std::int64_t length : {0, 1, 3, 1000, 100'001}) {
          const auto part = [&](int rank) {   // any bytes
            std::mt19937 draw(static_cast<unsigned>(rank * 1000 + length));
            Tensor bytes = host_zeros({length * size_of(dtype)}, DType::u8);
            for (std::uint8_t& byte : bytes.span<std::uint8_t>()) byte = static_cast<std::uint8_t>(draw());
            return bytes;
          };
          const bool in_place = length == 3;
          const Tensor all = host_zeros({size, length}, dtype);
          const Tensor mine = in_place ? all.slice(meeting.rank, meeting.rank + 1).reshape({length}) : host_zeros({length}, dtype);
          if (length > 0) std::memcpy(mine.raw(), part(meeting.rank).raw(), static_cast<std::size_t>(mine.bytes()));
          communicator->all_gather(cpu(), mine, all, {++tag, "statistics"})->wait(cpu(), after(20000));
          for (int rank = 0; rank < size && length > 0; ++rank) {
            count += std::memcmp(static_cast<const char*>(all.raw()) + rank * mine.bytes(), part(rank).raw(), static_cast<std::size_t>(mine.bytes())) != 0 ? 1 : 0;
          }
        }
      }
      communicator->barrier(Milliseconds(20000), "end");
      wrong[static_cast<std::size_t>(meeting.rank)] = count;
    });
    for (const std::string& text : thrown) CHECK(text == "");
    CHECK(wrong == std::vector<int>(static_cast<std::size_t>(size), 0));
  }
}

TEST_CASE("gloo: sums of bf16 round to the nearest at every hop, ties to even", "[cpu]") {
  // Of two: 1 + 2^-8 is a tie between 1 and 1 + 2^-7, 1 + 2^-7 + 2^-8 one between 1 + 2^-7 and 1 + 2^-6; beside a tie; infinity; NaN.
  const float small = std::ldexp(1.0F, -8), step = std::ldexp(1.0F, -7), infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> a = {1, 1 + step, 1, -1, infinity, infinity}, b = {small, small, small + std::ldexp(1.0F, -15), -small, 1, -infinity};
  const std::vector<float> wanted = {1, 1 + 2 * step, 1 + step, -1, infinity};
  // Of three: a large value at one rank, two halves of its step at the others. What order they are added in depends on where the value lies, but
  // not what a sum in that order gives: 1 where the large value comes first or second, 1 + 2^-7 where it comes last.
  const std::int64_t count = 3 * 999;
  Tensor two, three;
  const auto thrown2 = run_ranks(2, [&](const Meeting& meeting) {
    const auto communicator = communicator_of(meet(meeting));
    const Tensor tensor = host_zeros({6}, DType::bf16);
    for (std::size_t i = 0; i < 6; ++i) tensor.data<BFloat16>()[i] = to_bf16(meeting.rank == 0 ? a[i] : b[i]);
    communicator->all_reduce_sum(cpu(), tensor, {1, "sum"})->wait(cpu(), after(20000));
    communicator->barrier(Milliseconds(20000), "end");
    if (meeting.rank == 0) two = tensor;
  });
  const auto thrown3 = run_ranks(3, [&](const Meeting& meeting) {
    const auto communicator = communicator_of(meet(meeting));
    const Tensor tensor = host_zeros({count}, DType::bf16);
    for (std::int64_t i = 0; i < count; ++i) tensor.data<BFloat16>()[i] = to_bf16(i % 3 == meeting.rank ? 1.0F : small);
    communicator->all_reduce_sum(cpu(), tensor, {1, "sum"})->wait(cpu(), after(20000));
    communicator->barrier(Milliseconds(20000), "end");
    if (meeting.rank == 0) three = tensor;
  });
  for (const auto& thrown : {thrown2, thrown3}) {
    for (const std::string& text : thrown) REQUIRE(text == "");
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) CHECK(to_float(two.data<BFloat16>()[i]) == wanted[i]);
  CHECK(std::isnan(to_float(two.data<BFloat16>()[5])));
  std::int64_t first = 0, last = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const float sum = to_float(three.data<BFloat16>()[i]);
    first += sum == 1.0F ? 1 : 0;
    last += sum == 1.0F + step ? 1 : 0;
  }
  CHECK(first + last == count);
  CHECK(std::abs(last - count / 3) < 6);   // of each of the six segments, cut anywhere, one of the three ranks comes last
}

TEST_CASE("gloo: who waits for a device learns that a peer is gone", "[cpu]") {
  expect_failures([](Communicator& c) {
    if (c.rank() == 2) throw DeviceError("rank 2 goes");
    c.watch([] { return false; }, after(20000), "step 5");
  }, {0, 1}, "step 5: rank 2: ", Milliseconds(20000), Milliseconds(3000));
  expect_failures([](Communicator& c) {
    if (c.rank() == 2) return std::this_thread::sleep_for(Milliseconds(2000));
    c.watch([] { return false; }, after(200), "step 5");
  }, {0, 1}, "", Milliseconds(20000), Milliseconds(1500));
}

TEST_CASE("gloo: the record of collectives says what was issued and what has ended", "[cpu]") {
  std::vector<std::vector<Flight>> records(2);
  const auto thrown = run_ranks(2, [&](const Meeting& meeting) {
    const auto communicator = communicator_of(meet(meeting));
    const Tensor x = host_zeros({10}, DType::f32), all = host_zeros({2, 10}, DType::f32);
    communicator->all_reduce_sum(cpu(), x, {5, "bucket 0 of step 1"})->wait(cpu(), after(20000));
    communicator->all_gather(cpu(), x, all, {6, "statistics"})->wait(cpu(), after(20000));
    communicator->barrier(Milliseconds(20000), "last");
    if (meeting.rank == 0) {
      const auto work = communicator->broadcast(cpu(), x, 0, {7, "alone"});
      const auto open = communicator->all_reduce_sum(cpu(), x, {8, "without the other"});
      try {
        open->wait(cpu(), after(200));
      } catch (const CommError&) {
      }
    } else {
      std::this_thread::sleep_for(Milliseconds(1000));
    }
    records[static_cast<std::size_t>(meeting.rank)] = communicator->record().flights();
  });
  for (const std::string& text : thrown) CHECK(text == "");
  REQUIRE(records[0].size() == 4);
  CHECK(records[0][1].bytes == 40);
  CHECK(records[0][1].ended_s >= records[0][1].issued_s);
  CHECK(records[0][3].ended_s < 0);
  const auto difference = first_difference(records[0], records[1]);
  REQUIRE(difference);
  CHECK(difference->a->phase == "alone");
  CHECK_FALSE(difference->b);
}

}  // namespace
}  // namespace detr::dist

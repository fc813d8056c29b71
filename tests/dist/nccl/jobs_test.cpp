// NCCL and staged Gloo with one process a rank. Several ranks share a GPU where there are not enough.
//
// Ranks are forked, which a process may not do once it has used CUDA, as the question for a device does. So each test starts this program anew for
// itself alone, and there it forks.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "dist/bucketer.h"
#include "dist/gloo/communicator.h"
#include "dist/nccl/communicator.h"
#include "runtime/gpus.h"
#include "tests/dist/ranks.h"
#include "tests/dist/steps.h"
#include "tests/gpu.h"

namespace detr::dist {
namespace {

using test::values;

constexpr Milliseconds kTime{60000};
Clock::time_point soon() { return Clock::now() + kTime; }

constexpr const char* kInside = "DETR_TEST_INSIDE";   // set in the program that forks

/// Runs this test case (its name has no comma) in a new process, and there `job`, which checks.
void in_a_new_process(const std::function<void()>& job) {
  if (std::getenv(kInside)) return job();
  if (!detr::test::cuda_available()) SKIP("no CUDA device");
  std::string program = "/proc/self/exe", name = Catch::getResultCapture().getCurrentTestName();
  char* const arguments[] = {program.data(), name.data(), nullptr};
  pid_t process = 0;
  REQUIRE(::setenv(kInside, "1", 1) == 0);
  const int started = ::posix_spawn(&process, program.c_str(), nullptr, nullptr, arguments, environ);
  ::unsetenv(kInside);
  REQUIRE(started == 0);
  const Clock::time_point deadline = Clock::now() + std::chrono::minutes(8);
  int status = 0;
  bool ended = false;
  while (!(ended = ::waitpid(process, &status, WNOHANG) == process) && Clock::now() < deadline) std::this_thread::sleep_for(Milliseconds(20));
  if (!ended) {
    static_cast<void>(::kill(process, SIGKILL));
    static_cast<void>(::waitpid(process, &status, 0));
  }
  CHECK(ended);
  CHECK(status == 0);
}

/// Counts what is wrong on a rank and says the first few.
class Checks {
 public:
  explicit Checks(int rank) : rank_(rank) {}
  void expect(bool holds, const std::string& what) {
    if (!holds && ++wrong_ <= 5) std::fprintf(stderr, "rank %d: %s\n", rank_, what.c_str());
  }
  int code() const { return wrong_ == 0 ? 0 : 1; }

 private:
  int rank_, wrong_ = 0;
};

/// The stream of a rank, whose GPU it shares with other ranks if need be.
Stream stream_of(const Meeting& meeting) {
  let_ranks_share_a_gpu(meeting.rank);
  static_cast<void>(set_nccl_environment());
  return Stream::cuda(meeting.rank % static_cast<int>(list_gpus().size()), 1);
}

void expect_endings(int size, const std::function<int(const Meeting&)>& body, int code, const std::vector<int>& dead = {}, bool stopped = false) {
  const auto endings = test::run_processes(size, body, Milliseconds(120000), stopped ? dead : std::vector<int>{}, Milliseconds(60000));
  for (int rank = 0; rank < size; ++rank) {
    const test::Ending& ending = endings[static_cast<std::size_t>(rank)];
    INFO("rank " << rank << " of " << size << ": exit " << ending.code << ", signal " << ending.signal);
    if (std::ranges::find(dead, rank) != dead.end()) CHECK(ending.signal == SIGKILL);
    else CHECK(ending.code == code);
  }
}

/// The sum of the ranks' integers.
Tensor exact_sum(DType dtype, std::int64_t count, int size) {
  Tensor sum = values(dtype, count, 0, true);
  for (int rank = 1; rank < size; ++rank) {
    const Tensor part = values(dtype, count, rank, true);
    for (std::int64_t i = 0; i < count; ++i) {
      if (dtype == DType::f32) sum.data<float>()[i] += part.data<float>()[i];
      if (dtype == DType::f64) sum.data<double>()[i] += part.data<double>()[i];
      if (dtype == DType::bf16) sum.data<BFloat16>()[i] = to_bf16(to_float(sum.data<BFloat16>()[i]) + to_float(part.data<BFloat16>()[i]));
      if (dtype == DType::i64) sum.data<std::int64_t>()[i] += part.data<std::int64_t>()[i];
    }
  }
  return sum;
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.bytes() == b.bytes() && (a.bytes() == 0 || std::memcmp(a.raw(), b.raw(), static_cast<std::size_t>(a.bytes())) == 0);
}

/// A copy on the GPU of its own.
Tensor uploaded(const Stream& stream, const Tensor& host) {
  Tensor there = stream.empty(host.shape(), host.dtype());
  stream.copy(host, there);
  stream.wait();
  return there;
}

/// Sums, gathers, a broadcast from each rank and a barrier.
void check_collectives(Communicator& c, const Stream& stream, Checks& checks) {
  std::uint64_t tag = 0;
  for (const std::int64_t length : {0, 1, 1000, 2'000'003}) {
    for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::i64, DType::u8}) {
      const std::string what = concat(c.engine(), ", ", dtype, ", ", length, ": ");
      const Tensor own = values(dtype, length, c.rank(), true), summed = uploaded(stream, own), mine = uploaded(stream, own);
      const Tensor all = stream.zeros({c.size(), length}, dtype);
      std::vector<std::shared_ptr<Work>> works;
      if (dtype != DType::u8) works.push_back(c.all_reduce_sum(stream, summed, {++tag, what + "sum"}));
      works.push_back(c.all_gather(stream, mine, all, {++tag, what + "gather"}));
      for (const auto& work : works) work->wait(stream, soon());
      c.watch(stream.record(), soon(), what + "watch");
      if (dtype != DType::u8) checks.expect(same_bytes(stream.to_host(summed), exact_sum(dtype, length, c.size())), what + "the sum is wrong");
      const Tensor gathered = stream.to_host(all);
      for (int rank = 0; rank < c.size(); ++rank) {
        checks.expect(same_bytes(gathered.slice(rank, rank + 1), values(dtype, length, rank, true)), concat(what, "the gathered part of rank ", rank, " is wrong"));
      }
      const int root = static_cast<int>(tag) % c.size();
      c.broadcast(stream, mine, root, {++tag, what + "broadcast"})->wait(stream, soon());
      c.watch(stream, soon(), what + "watch");
      checks.expect(same_bytes(stream.to_host(mine), values(dtype, length, root, true)), concat(what, "the broadcast of rank ", root, " is wrong"));
    }
  }
  c.barrier(kTime, "end");
  const auto flights = c.record().flights();
  checks.expect(flights.size() == tag, "the record has not all collectives");
  checks.expect(std::ranges::all_of(flights, [](const Flight& f) { return f.ended_s >= f.issued_s; }), "the record does not say that all have ended");
}

/// Made-up steps of training on a GPU: an exchange of statistics, then buckets and the trailer. What a rank reaches is the same in each step, as in a
/// captured one.
class GpuSteps {
 public:
  GpuSteps(Communicator& c, const Stream& stream, bool integers)
      : c_(&c), stream_(stream), grads_(stream.zeros({layout_.total}, DType::f32)), source_(stream.zeros({layout_.total}, DType::f32)),
        mine_(stream.zeros({7}, DType::f64)),
        all_(stream.zeros({c.size(), 7}, DType::f64)), bucketer_(c, layout_, grads_, stream, {.timeout = kTime, .slots_before = 1}) {
    made_up_.integers = integers;
  }

  /// Uploads the gradients of a step.
  void set(int step) {
    const Tensor host = gradients(step, c_->rank());
    stream_.copy(host, source_);
    stream_.copy(statistics(step, c_->rank()), mine_);
    stream_.wait();
  }
  /// What a step enqueues.
  void enqueue(int step) {
    stream_.copy(source_, grads_);
    bucketer_.begin(step);
    c_->all_gather(stream_, mine_, all_, {bucketer_.tag(0), concat("statistics of step ", step)})->wait(stream_, soon());
    for (int p = 0; p < static_cast<int>(layout_.parameters.size()); ++p) {
      if (made_up_.reached(0, c_->rank(), p)) bucketer_.mark_ready(p);
    }
    bucketer_.finish();
  }
  void check(int step, Checks& checks, const std::string& how) {
    c_->watch(stream_.record(), soon(), concat("step ", step));
    const Tensor grads = stream_.to_host(grads_), all = stream_.to_host(all_), used = stream_.to_host(bucketer_.used());
    if (made_up_.integers) {
      Tensor sum = gradients(step, 0);
      for (int rank = 1; rank < c_->size(); ++rank) {
        const Tensor part = gradients(step, rank);
        for (std::int64_t i = 0; i < layout_.total; ++i) sum.data<float>()[i] += part.data<float>()[i];
      }
      checks.expect(same_bytes(grads, sum), concat(how, ", step ", step, ": the sums are wrong"));
    }
    for (int rank = 0; rank < c_->size(); ++rank) {
      checks.expect(same_bytes(all.slice(rank, rank + 1), statistics(step, rank)), concat(how, ", step ", step, ": the statistics are wrong"));
    }
    for (int p = 0; p < static_cast<int>(layout_.parameters.size()); ++p) {
      double count = 0;
      for (int rank = 0; rank < c_->size(); ++rank) count += made_up_.reached(0, rank, p) ? 1.0 : 0.0;
      checks.expect(used.data<double>()[p] == count, concat(how, ", step ", step, ": the count of parameter ", p, " is wrong"));
    }
  }
  Tensor grads() const { return stream_.to_host(grads_); }
  const Tensor& grads_there() const { return grads_; }

 private:
  Tensor gradients(int step, int rank) const {
    Tensor out = host_zeros({layout_.total}, DType::f32);
    for (std::size_t p = 0; p < layout_.parameters.size(); ++p) {
      if (!made_up_.reached(0, rank, static_cast<int>(p))) continue;
      const std::int64_t begin = layout_.offsets[p];
      for (std::int64_t i = begin; i < begin + layout_.parameters[p].shape.numel(); ++i) out.data<float>()[i] = made_up_.gradient(step, rank, i);
    }
    return out;
  }
  static Tensor statistics(int step, int rank) {
    Tensor out = host_zeros({7}, DType::f64);
    for (std::int64_t i = 0; i < 7; ++i) out.data<double>()[i] = 100.0 * step + 10.0 * rank + static_cast<double>(i);
    return out;
  }

  test::Steps made_up_;
  Layout layout_ = test::Steps::layout();
  Communicator* c_;
  Stream stream_;
  Tensor grads_, source_, mine_, all_;
  Bucketer bucketer_;
};

constexpr int kReplays = 20;

/// An eager step, replays of a captured one, an eager one; then everything goes in order, soon. Returns each step's gradients.
std::vector<Tensor> eager_and_captured(const std::shared_ptr<Control>& control, const Stream& stream, bool integers, Checks& checks) {
  std::vector<Tensor> grads;
  auto c = nccl_communicator(control, stream, kTime, kTime);
  checks.expect(c->capturable(), "not capturable");
  {
    GpuSteps steps(*c, stream, integers);
    const auto eager = [&](int step) {
      steps.set(step);
      steps.enqueue(step);
      steps.check(step, checks, "eager");
      grads.push_back(steps.grads());
    };
    eager(0);
    const Graph graph = stream.capture([&] { steps.enqueue(1); });
    for (int step = 1; step <= kReplays; ++step) {
      steps.set(step);
      graph.launch(stream);
      steps.check(step, checks, "captured");
      grads.push_back(steps.grads());
    }
    eager(kReplays + 1);   // beside the graph
    c->barrier(kTime, "end");
  }
  const Clock::time_point start = Clock::now();
  c.reset();
  checks.expect(Clock::now() - start < Milliseconds(5000), "the clean end took longer than 5 s");
  return grads;
}

/// Steps until the last rank kills or stops itself in step 5; the others end with a CommError by the deadline, and everything of theirs goes, soon.
/// Returns 10 then.
int outlive(const Meeting& meeting, bool captured, int signal, Milliseconds deadline) {
  const bool failing = meeting.rank == meeting.size - 1;
  Clock::time_point start = Clock::now();
  std::string text;
  try {
    const Stream stream = stream_of(meeting);
    const auto c = nccl_communicator(test::meet(meeting), stream, kTime, kTime);
    GpuSteps steps(*c, stream, true);
    steps.set(0);
    steps.enqueue(0);
    c->watch(stream.record(), soon(), "step 0");
    Graph graph;
    if (captured) graph = stream.capture([&] { steps.enqueue(1); });
    for (int step = 1;; ++step) {
      if (step == 5) {
        c->barrier(kTime, "step 5");
        if (failing) {
          std::this_thread::sleep_for(Milliseconds(300));   // all have left the barrier
          static_cast<void>(std::raise(signal));
        }
        start = Clock::now();
      }
      if (captured) graph.launch(stream);
      else steps.enqueue(step);
      c->watch(stream.record(), Clock::now() + (step < 5 ? kTime : deadline), concat("step ", step));
    }
  } catch (const CommError& error) {
    text = error.what();
  }
  const auto took = std::chrono::duration_cast<Milliseconds>(Clock::now() - start);
  std::fprintf(stderr, "rank %d: %s after %lld ms\n", meeting.rank, text.c_str(), static_cast<long long>(took.count()));
  if (text.find(concat("rank ", meeting.rank, ": ")) != 0 || text.find("step 5") == std::string::npos) return 12;
  return took < deadline + Milliseconds(4000) ? 10 : 11;
}

TEST_CASE("nccl: collectives of several processes", "[gpu]") {
  in_a_new_process([] {
    for (const int size : {2, 4}) {
      expect_endings(size, [](const Meeting& meeting) {
        Checks checks(meeting.rank);
        const Stream stream = stream_of(meeting);
        const auto c = nccl_communicator(test::meet(meeting), stream, kTime, kTime);
        check_collectives(*c, stream, checks);
        return checks.code();
      }, 0);
    }
  });
}

TEST_CASE("nccl: eager and captured steps of several processes", "[gpu]") {
  in_a_new_process([] {
    for (const int size : {2, 4}) {
      expect_endings(size, [](const Meeting& meeting) {
        Checks checks(meeting.rank);
        const Stream stream = stream_of(meeting);
        eager_and_captured(test::meet(meeting), stream, true, checks);
        return checks.code();
      }, 0);
    }
  });
}

TEST_CASE("nccl: a peer is killed", "[gpu]") {
  in_a_new_process([] {
    for (const bool captured : {false, true}) {
      expect_endings(3, [&](const Meeting& meeting) { return outlive(meeting, captured, SIGKILL, Milliseconds(20000)); }, 10, {2});
    }
  });
}

TEST_CASE("nccl: a peer stops", "[gpu]") {
  in_a_new_process([] {
    for (const bool captured : {false, true}) {
      expect_endings(3, [&](const Meeting& meeting) { return outlive(meeting, captured, SIGSTOP, Milliseconds(2000)); }, 10, {2}, true);
    }
  });
}

#if DETR_HAS_GLOO
TEST_CASE("gloo-staged: collectives and steps of several processes with a GPU", "[gpu]") {
  in_a_new_process([] {
    for (const int size : {2, 4}) {
      expect_endings(size, [](const Meeting& meeting) {
        Checks checks(meeting.rank);
        const Stream stream = stream_of(meeting);
        const auto c = staged_gloo_communicator(test::meet(meeting), stream, kTime, {"127.0.0.1", kTime});
        check_collectives(*c, stream, checks);
        GpuSteps steps(*c, stream, true);
        for (int step = 0; step < 5; ++step) {
          steps.set(step);
          steps.enqueue(step);
          steps.check(step, checks, "staged");
        }
        bool refused = false;
        try {
          stream.capture([&] { c->all_reduce_sum(stream, steps.grads_there(), {1'000'000, "captured"}); });
        } catch (const InvalidArgument&) {
          refused = true;
        }
        checks.expect(refused, "a capture is not refused");
        c->barrier(kTime, "end");
        return checks.code();
      }, 0);
    }
  });
}

/// Of two values there is one sum.
TEST_CASE("gloo-staged: the bits of NCCL with two ranks", "[gpu]") {
  in_a_new_process([] {
    expect_endings(2, [](const Meeting& meeting) {
      Checks checks(meeting.rank);
      const Stream stream = stream_of(meeting);
      const auto control = test::meet(meeting);
      const std::vector<Tensor> grads = eager_and_captured(control, stream, false, checks);
      const auto nccl = nccl_communicator(control, stream, kTime, kTime), staged = staged_gloo_communicator(control, stream, kTime, {"127.0.0.1", kTime});
      GpuSteps steps(*staged, stream, false);
      for (int step = 0; step < static_cast<int>(grads.size()); ++step) {
        steps.set(step);
        steps.enqueue(step);
        steps.check(step, checks, "staged");
        checks.expect(same_bytes(steps.grads(), grads[static_cast<std::size_t>(step)]), concat("step ", step, ": the engines differ"));
      }
      for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
        const Tensor own = values(dtype, 300'007, meeting.rank, false), a = uploaded(stream, own), b = uploaded(stream, own);
        nccl->all_reduce_sum(stream, a, {1, "sum"})->wait(stream, soon());
        staged->all_reduce_sum(stream, b, {2, "sum"})->wait(stream, soon());
        nccl->watch(stream, soon(), "sum");
        checks.expect(same_bytes(stream.to_host(a), stream.to_host(b)), concat(dtype, ": the engines differ"));
        checks.expect(!same_bytes(stream.to_host(a), own), concat(dtype, ": nothing was summed"));
      }
      nccl->barrier(kTime, "end");
      return checks.code();
    }, 0);
  });
}
#endif

}  // namespace
}  // namespace detr::dist

#include "dist/gloo/communicator.h"

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/broadcast.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "dist/gloo/mesh.h"
#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::dist {
namespace {

template <class T>
void add(void* out, const void* a, const void* b, std::size_t count) {
  const T *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
  T* z = static_cast<T*>(out);
  for (std::size_t i = 0; i < count; ++i) z[i] = x[i] + y[i];
}

void add_bf16(void* out, const void* a, const void* b, std::size_t count) {
  const auto *x = static_cast<const BFloat16*>(a), *y = static_cast<const BFloat16*>(b);
  auto* z = static_cast<BFloat16*>(out);
  for (std::size_t i = 0; i < count; ++i) z[i] = to_bf16(to_float(x[i]) + to_float(y[i]));
}

constexpr Milliseconds kLook{100};             // how often a wait looks whether the peers are still there
constexpr std::chrono::microseconds kNap{50};  // between two questions to a GPU

/// What the caller, its handles and the communication thread share.
struct State {
  State(std::shared_ptr<Control> connection, std::shared_ptr<FlightRecord> flights)
      : control(std::move(connection)), record(std::move(flights)), rank(control->rank()), size(control->size()) {}

  /// Remembers the first reason; later ones are consequences.
  void fail(const std::string& reason) {
    const std::lock_guard lock(mutex);
    if (failed.empty()) failed = reason.empty() ? "closed" : reason;
    changed.notify_all();
  }
  bool has_failed() {
    const std::lock_guard lock(mutex);
    return !failed.empty();
  }

  const std::shared_ptr<Control> control;
  const std::shared_ptr<FlightRecord> record;
  const int rank, size;
  std::shared_ptr<MeshContext> context;
  std::mutex mutex;
  std::condition_variable changed;
  struct Job {
    std::uint64_t number, flight;   // here and in the record
    std::string phase;
    Stream stream;
    Event ready;                    // passed once the tensors are there
    std::function<void()> run;
  };
  std::deque<Job> queue;
  std::uint64_t issued = 0, done = 0;   // jobs; they end in the order of issue
  bool stopping = false;
  std::string failed;
};

/// Waits, on the communication thread, for the work that makes a job's tensors. Throws CommError after `timeout` or once the communicator is dead.
void wait_until_ready(State& state, const State::Job& job, Milliseconds timeout) {
  job.stream.enter_thread();
  const Clock::time_point deadline = Clock::now() + timeout;
  while (!job.ready.passed()) {
    if (state.has_failed()) throw CommError("closed");
    if (Clock::now() >= deadline) throw CommError("the device has not come to it within ", timeout.count(), " ms");
    std::this_thread::sleep_for(kNap);
  }
}

/// The communication thread. It ends at the first failure, or when the communicator stops.
void communicate(State& state, Milliseconds timeout) {
  while (true) {
    std::optional<State::Job> job;
    {
      std::unique_lock lock(state.mutex);
      state.changed.wait(lock, [&] { return state.stopping || !state.failed.empty() || !state.queue.empty(); });
      if (state.stopping || !state.failed.empty()) return;
      job = std::move(state.queue.front());
      state.queue.pop_front();
    }
    const auto fail = [&](const char* what, const std::exception& error) {
      state.fail(concat("rank ", state.rank, ": ", job->phase, ": ", what, escape_control(error.what())));
    };
    try {
      wait_until_ready(state, *job, timeout);
    } catch (const std::exception& error) {
      return fail("", error);
    }
    try {
      job->run();
    } catch (const std::exception& error) {
      return fail("lost a peer: ", error);
    }
    state.record->end(job->flight);
    const std::lock_guard lock(state.mutex);
    state.done = job->number;
    state.changed.notify_all();
  }
}

/// Tells the hub before the peers see connections close, which they would blame.
void abort_state(State& state, const std::string& reason) noexcept {
  try {
    state.fail(reason);
  } catch (const std::exception&) {   // no memory for the text; the connections close all the same
  }
  state.control->fail(kPeerCode, reason);
  state.context->poison();
}

class GlooWork final : public Work {
 public:
  GlooWork(std::shared_ptr<State> state, std::uint64_t number, std::string phase) : state_(std::move(state)), number_(number), phase_(std::move(phase)) {}
  void wait(const Stream&, Clock::time_point deadline) override {
    std::unique_lock lock(state_->mutex);
    const auto ended = [&] { return state_->done >= number_ || !state_->failed.empty(); };
    // Gloo may miss that a peer has gone and wait until its timeout; the control connections tell.
    while (!state_->changed.wait_until(lock, std::min(deadline, Clock::now() + kLook), ended)) {
      std::string why = state_->control->lost_peer();
      if (why.empty() && Clock::now() < deadline) continue;
      if (why.empty()) why = "not done by its deadline; a peer is late or stuck";
      lock.unlock();
      abort_state(*state_, concat("rank ", state_->rank, ": ", phase_, ": ", why));
      lock.lock();
      break;
    }
    if (state_->done >= number_) return;
    throw CommError(state_->failed);
  }

 private:
  std::shared_ptr<State> state_;
  std::uint64_t number_;
  std::string phase_;
};

class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(std::shared_ptr<Control> control, Milliseconds connect_timeout, const GlooOptions& options)
      : control_(std::move(control)), timeout_(options.timeout), state_(std::make_shared<State>(control_, record_)) {
    DETR_CHECK(size() >= 2, "gloo: a group of one needs no engine");
    DETR_CHECK(timeout_.count() > 0, "gloo: the timeout must be positive, got ", timeout_.count(), " ms");
    const WithoutSigpipe guard;   // for Gloo's own thread and ours
    state_->context = std::make_shared<MeshContext>(rank(), size());
    try {
      state_->context->connect(*control_, options.host, Clock::now() + connect_timeout);
    } catch (const CommError&) {
      throw;
    } catch (const std::exception& error) {
      const std::string reason = concat("rank ", rank(), ": connecting: ", escape_control(error.what()));
      control_->fail(kPeerCode, reason);
      throw CommError(reason);
    }
    thread_ = std::thread([state = state_, timeout = timeout_] { communicate(*state, timeout); });
  }
  ~GlooCommunicator() override {
    bool busy = false;
    {
      const std::lock_guard lock(state_->mutex);
      state_->stopping = true;
      busy = state_->done < state_->issued;
      if (busy && state_->failed.empty()) state_->failed = concat("rank ", rank(), ": closed with collectives under way");
      state_->changed.notify_all();
    }
    if (busy) state_->context->poison();
    thread_.join();
  }

  int rank() const override { return state_->rank; }
  int size() const override { return state_->size; }
  const char* engine() const override { return "gloo"; }
  bool capturable() const override { return false; }

  std::shared_ptr<Work> all_reduce_sum(const Stream& stream, const Tensor& tensor, const Place& place) override {
    expect_summable(tensor, place.phase);
    expect_cpu(tensor, place);
    return issue(stream, tensor, place, [this, tensor, tag = place.tag] { sum(tensor, tag); });
  }
  std::shared_ptr<Work> all_gather(const Stream& stream, const Tensor& mine, const Tensor& all, const Place& place) override {
    expect_gatherable(mine, all, size(), place.phase);
    expect_cpu(mine, place);
    return issue(stream, mine, place, [this, mine, all, tag = place.tag] {
      if (mine.numel() == 0) return;
      char* const out = static_cast<char*>(all.raw());
      char* const own = out + mine.bytes() * rank();
      if (own != mine.raw()) std::memcpy(own, mine.raw(), static_cast<std::size_t>(mine.bytes()));
      ::gloo::AllgatherOptions options(state_->context);
      options.setOutput(out, static_cast<std::size_t>(all.bytes()));
      options.setTag(static_cast<std::uint32_t>(tag));
      options.setTimeout(timeout_);
      ::gloo::allgather(options);
    });
  }
  std::shared_ptr<Work> broadcast(const Stream& stream, const Tensor& tensor, int root, const Place& place) override {
    expect_root(root, size(), place.phase);
    expect_cpu(tensor, place);
    return issue(stream, tensor, place, [this, tensor, root, tag = place.tag] {
      if (tensor.numel() == 0) return;
      ::gloo::BroadcastOptions options(state_->context);
      options.setOutput(static_cast<char*>(tensor.raw()), static_cast<std::size_t>(tensor.bytes()));
      options.setRoot(root);
      options.setTag(static_cast<std::uint32_t>(tag));
      options.setTimeout(timeout_);
      ::gloo::broadcast(options);
    });
  }
  void barrier(Milliseconds timeout, const std::string& phase) override {
    expect_alive();
    barrier_over(*control_, timeout, phase);
  }
  void check(const std::string& phase) override {
    expect_alive();
    const std::string why = control_->lost_peer();
    if (why.empty()) return;
    const std::string reason = concat("rank ", rank(), ": ", phase, ": ", why);
    abort(reason);
    throw CommError(reason);
  }
  void abort(const std::string& reason) noexcept override { abort_state(*state_, reason); }

 private:
  void expect_cpu(const Tensor& tensor, const Place& place) const {
    DETR_CHECK(tensor.defined() && tensor.device().is_cpu(), "gloo, ", place.phase, ": a tensor on the CPU, got ", tensor);
  }
  void expect_alive() const {
    const std::lock_guard lock(state_->mutex);
    if (!state_->failed.empty()) throw CommError(state_->failed);
  }
  std::shared_ptr<Work> issue(const Stream& stream, const Tensor& tensor, const Place& place, std::function<void()> run) {
    expect_alive();
    Event ready = stream.record();
    const std::uint64_t flight = record_->issue(place.tag, place.phase, tensor.bytes());
    const std::lock_guard lock(state_->mutex);
    const std::uint64_t number = ++state_->issued;
    state_->queue.push_back({number, flight, place.phase, stream, std::move(ready), std::move(run)});
    state_->changed.notify_all();
    return std::make_shared<GlooWork>(state_, number, place.phase);
  }

  void sum(const Tensor& tensor, std::uint64_t tag) const {
    if (tensor.numel() == 0) return;
    ::gloo::AllreduceOptions options(state_->context);
    const auto count = static_cast<std::size_t>(tensor.numel());
    switch (tensor.dtype()) {
      case DType::f32: options.setOutput(tensor.data<float>(), count); options.setReduceFunction(&add<float>); break;
      case DType::f64: options.setOutput(tensor.data<double>(), count); options.setReduceFunction(&add<double>); break;
      case DType::bf16: options.setOutput(tensor.data<BFloat16>(), count); options.setReduceFunction(&add_bf16); break;
      default: options.setOutput(tensor.data<std::int64_t>(), count); options.setReduceFunction(&add<std::int64_t>);
    }
    options.setAlgorithm(::gloo::detail::AllreduceOptionsImpl::RING);   // repeatable; the automatic choice depends on the size
    options.setTag(static_cast<std::uint32_t>(tag));
    options.setTimeout(timeout_);
    ::gloo::allreduce(options);
  }

  std::shared_ptr<Control> control_;
  Milliseconds timeout_;
  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Communicator> gloo_communicator(std::shared_ptr<Control> control, Milliseconds connect_timeout, const GlooOptions& options) {
  return std::make_unique<GlooCommunicator>(std::move(control), connect_timeout, options);
}

}  // namespace detr::dist

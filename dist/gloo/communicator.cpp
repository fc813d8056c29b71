#include "dist/gloo/communicator.h"

#include <gloo/allreduce.h>
#include <gloo/broadcast.h>
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <functional>
#include <thread>

#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::dist {
namespace {

/// While it lives SIGPIPE is blocked in this thread and in threads that it starts: Gloo writes to connections whose peer may have gone. A
/// signal that came meanwhile is taken away, so the process needs no handler.
class WithoutSigpipe {
 public:
  WithoutSigpipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~WithoutSigpipe() {
    const timespec at_once{0, 0};
    if (!was_pending_) static_cast<void>(sigtimedwait(&pipe_, nullptr, &at_once));
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSigpipe(const WithoutSigpipe&) = delete;
  WithoutSigpipe& operator=(const WithoutSigpipe&) = delete;

 private:
  sigset_t pipe_, before_;
  bool was_pending_ = false;
};

/// A Gloo context whose pairs find each other by the control.
class MeshContext final : public ::gloo::Context {
 public:
  MeshContext(int own_rank, int ranks) : ::gloo::Context(own_rank, ranks) {}

  void connect(Control& control, const std::string& host, Clock::time_point deadline) {
    ::gloo::transport::tcp::attr attributes;
    attributes.hostname = host;
    device_ = ::gloo::transport::tcp::CreateDevice(attributes);
    transportContext_ = device_->createContext(rank, size);
    transportContext_->setTimeout(std::max(Milliseconds(1), std::chrono::ceil<Milliseconds>(deadline - Clock::now())));
    std::string own;   // for each peer the address of the socket that waits for it; a block of zeros at our own place
    std::size_t block = 0;
    std::vector<std::string> addresses(static_cast<std::size_t>(size));
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const std::vector<char> bytes = transportContext_->createPair(peer)->address().bytes();
      block = bytes.size();
      addresses[static_cast<std::size_t>(peer)].assign(bytes.begin(), bytes.end());
    }
    addresses[static_cast<std::size_t>(rank)].assign(block, '\0');
    for (const std::string& address : addresses) own += address;
    const std::vector<std::string> all = control.all_gather(own, "addresses", deadline);
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      const std::string& theirs = all[static_cast<std::size_t>(peer)];
      if (theirs.size() != own.size()) throw CommError("rank ", rank, ": addresses: rank ", peer, " runs another version of Gloo");
      const auto first = theirs.begin() + static_cast<std::ptrdiff_t>(block) * rank;
      transportContext_->getPair(peer)->connect(std::vector<char>(first, first + static_cast<std::ptrdiff_t>(block)));
    }
  }

  /// Fails what other threads wait for in this context: Gloo closes all pairs after a wait that timed out, so one is made to. A pair that
  /// is closed already refuses, hence every peer is tried.
  void poison() noexcept {
    const WithoutSigpipe guard;
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      try {
        char byte = 0;
        const auto buffer = createUnboundBuffer(&byte, 1);
        buffer->recv(peer, ~std::uint64_t{0}, 0, 1);   // a slot that no collective uses
        buffer->waitRecv(Milliseconds(1));
      } catch (const std::exception&) {   // the time that ran out, or a pair that is closed
      }
    }
  }
};

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

constexpr Milliseconds kLook{100};   // how often a wait looks whether the peers are still there

/// What the caller, its handles and the communication thread share.
struct State {
  explicit State(std::shared_ptr<Control> meeting) : control(std::move(meeting)), rank(control->rank()), size(control->size()) {}

  /// Remembers the first reason; later ones are consequences.
  void fail(const std::string& reason) {
    const std::lock_guard lock(mutex);
    if (failed.empty()) failed = reason.empty() ? "closed" : reason;
    changed.notify_all();
  }

  const std::shared_ptr<Control> control;
  const int rank, size;
  std::shared_ptr<MeshContext> context;
  std::mutex mutex;
  std::condition_variable changed;
  struct Job {
    std::uint64_t number;
    std::string phase;
    std::function<void()> run;
  };
  std::deque<Job> queue;
  std::uint64_t issued = 0, done = 0;   // jobs; they end in the order of issue
  bool stopping = false;
  std::string failed;
};

/// The communication thread. It ends at the first failure, or when the communicator stops.
void communicate(State& state) {
  while (true) {
    State::Job job;
    {
      std::unique_lock lock(state.mutex);
      state.changed.wait(lock, [&] { return state.stopping || !state.failed.empty() || !state.queue.empty(); });
      if (state.stopping || !state.failed.empty()) return;
      job = std::move(state.queue.front());
      state.queue.pop_front();
    }
    try {
      job.run();
    } catch (const std::exception& error) {
      state.fail(concat("rank ", state.rank, ": ", job.phase, ": lost a peer: ", escape_control(error.what())));
      return;
    }
    const std::lock_guard lock(state.mutex);
    state.done = job.number;
    state.changed.notify_all();
  }
}

void abort_state(State& state, const std::string& reason) {
  state.fail(reason);
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
      : control_(std::move(control)), timeout_(options.timeout), state_(std::make_shared<State>(control_)) {
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
      control_->fail(reason);
      throw CommError(reason);
    }
    thread_ = std::thread([state = state_] { communicate(*state); });
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

  std::shared_ptr<Work> all_reduce_sum(const Stream&, const Tensor& tensor, const Place& place) override {
    expect_summable(tensor, place.phase);
    expect_cpu(tensor, place);
    return issue(place, [this, tensor, tag = place.tag] { sum(tensor, tag); });
  }
  std::shared_ptr<Work> broadcast(const Stream&, const Tensor& tensor, int root, const Place& place) override {
    DETR_CHECK(root >= 0 && root < size(), "broadcast, ", place.phase, ": root ", root, " in a group of ", size());
    expect_cpu(tensor, place);
    return issue(place, [this, tensor, root, tag = place.tag] {
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
    try {
      control_->all_gather("", phase, Clock::now() + timeout);
    } catch (const CommError& error) {
      abort(error.what());
      throw;
    }
  }
  void watch(const Stream&, Clock::time_point, const std::string&) override { expect_alive(); }
  void abort(const std::string& reason) noexcept override {
    try {
      abort_state(*state_, reason);
    } catch (const std::exception&) {   // no memory for the text; the connections close below
    }
    control_->fail(reason);
  }

 private:
  void expect_cpu(const Tensor& tensor, const Place& place) const {
    DETR_CHECK(tensor.defined() && tensor.device().is_cpu(), "gloo, ", place.phase, ": a tensor on the CPU, got ", tensor);
  }
  void expect_alive() const {
    const std::lock_guard lock(state_->mutex);
    if (!state_->failed.empty()) throw CommError(state_->failed);
  }
  std::shared_ptr<Work> issue(const Place& place, std::function<void()> run) {
    expect_alive();
    const std::lock_guard lock(state_->mutex);
    const std::uint64_t number = ++state_->issued;
    state_->queue.push_back({number, place.phase, std::move(run)});
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

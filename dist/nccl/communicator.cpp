#include "dist/nccl/communicator.h"

#include <nccl.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "runtime/cuda/stream_state.h"
#include "runtime/cuda/try.h"

namespace detr::dist {
namespace {

constexpr Milliseconds kFinalizeTime{10000}, kAbortTime{1000};
constexpr std::chrono::microseconds kNap{20};

using SharedEvent = std::shared_ptr<CUevent_st>;

/// Events are made for each use: recorded in a capture they belong to it, and may go before the graph does.
SharedEvent make_event() {
  cudaEvent_t event = nullptr;
  DETR_TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return {event, [](cudaEvent_t e) { static_cast<void>(cudaEventDestroy(e)); }};
}

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return ncclFloat32;
    case DType::f64: return ncclFloat64;
    case DType::bf16: return ncclBfloat16;
    case DType::i64: return ncclInt64;
    case DType::u8: return ncclUint8;
  }
  return ncclUint8;
}

/// What the communicator shares with a thread that aborts it, which may outlive it.
class State {
 public:
  /// Remembers the first reason. Does not wait for a thread that is inside NCCL.
  void fail(const std::string& reason) {
    const std::lock_guard lock(reason_mutex_);
    if (reason_.empty()) reason_ = reason.empty() ? "closed" : reason;
  }
  bool has_failed() {
    const std::lock_guard lock(reason_mutex_);
    return !reason_.empty();
  }
  void expect_alive() {
    const std::lock_guard lock(reason_mutex_);
    if (!reason_.empty()) throw CommError(reason_);
  }

  std::mutex mutex;                    // one call into NCCL at a time, so that an abort finds no thread inside
  ncclComm_t communicator = nullptr;   // there is one while nothing has failed

 private:
  std::mutex reason_mutex_;
  std::string reason_;
};

/// Aborts on a thread of its own and waits for it a while: NCCL's call waits for graphs that hold collectives of the communicator to go, and those
/// may be the caller's. Whether it was done in time.
bool abort_within(const std::shared_ptr<State>& state, int device, Milliseconds time) noexcept {
  struct Progress {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  try {
    const auto progress = std::make_shared<Progress>();
    std::thread([state, progress, device] {
      static_cast<void>(cudaSetDevice(device));
      {
        const std::lock_guard lock(state->mutex);
        if (state->communicator != nullptr) static_cast<void>(ncclCommAbort(std::exchange(state->communicator, nullptr)));
      }
      const std::lock_guard lock(progress->mutex);
      progress->done = true;
      progress->changed.notify_all();
    }).detach();
    std::unique_lock lock(progress->mutex);
    return progress->changed.wait_for(lock, time, [&] { return progress->done; });
  } catch (const std::exception&) {   // no memory or no thread left; the process is about to end
    return false;
  }
}

class NcclWork final : public Work {
 public:
  NcclWork(Tensor from, Tensor to, SharedEvent done) : from_(std::move(from)), to_(std::move(to)), done_(std::move(done)) {}
  void wait(const Stream& stream, Clock::time_point) override { DETR_TRY(cudaStreamWaitEvent(cuda::native(stream), done_.get(), cudaEventWaitDefault)); }

 private:
  Tensor from_, to_;
  SharedEvent done_;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<Control> control, const Stream& stream, Milliseconds connect_timeout, Milliseconds timeout)
      : control_(std::move(control)), side_(stream.beside()), timeout_(timeout) {
    const Clock::time_point deadline = Clock::now() + connect_timeout;
    DETR_TRY(cudaSetDevice(stream.device().index));
    ncclUniqueId id{};
    if (rank() == 0) expect_success(ncclGetUniqueId(&id), "unique id");
    const std::string all = control_->all_gather(std::string_view(id.internal, sizeof id.internal), "unique id", deadline).front();
    if (all.size() != sizeof id.internal) throw CommError("rank ", rank(), ": unique id: rank 0 runs another version of NCCL");
    std::memcpy(id.internal, all.data(), sizeof id.internal);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;   // only such a communicator can be aborted safely
    expect_success(ncclCommInitRankConfig(&state_->communicator, size(), id, rank(), &config), "connecting");
    settle("connecting", deadline);
  }
  ~NcclCommunicator() override {
    if (state_->has_failed()) return;   // an abort has it
    bool finalized = false;
    {
      const std::lock_guard lock(state_->mutex);
      const Clock::time_point deadline = Clock::now() + kFinalizeTime;
      ncclResult_t status = ncclCommFinalize(state_->communicator);
      while (status == ncclInProgress && Clock::now() < deadline) {
        std::this_thread::sleep_for(kNap);
        if (ncclCommGetAsyncError(state_->communicator, &status) != ncclSuccess) break;
      }
      finalized = status == ncclSuccess;
      if (finalized) static_cast<void>(ncclCommDestroy(std::exchange(state_->communicator, nullptr)));
    }
    if (!finalized) abort_within(state_, side_.device().index, kAbortTime);
  }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  const char* engine() const override { return "nccl"; }
  bool capturable() const override { return true; }

  std::shared_ptr<Work> all_reduce_sum(const Stream& stream, const Tensor& tensor, const Place& place) override {
    expect_summable(tensor, place.phase);
    return issue(stream, tensor, tensor, place, [&](cudaStream_t queue) {
      return ncclAllReduce(tensor.raw(), tensor.raw(), static_cast<std::size_t>(tensor.numel()), type_of(tensor.dtype()), ncclSum, state_->communicator, queue);
    });
  }
  std::shared_ptr<Work> all_gather(const Stream& stream, const Tensor& mine, const Tensor& all, const Place& place) override {
    expect_gatherable(mine, all, size(), place.phase);
    return issue(stream, mine, all, place, [&](cudaStream_t queue) {
      return ncclAllGather(mine.raw(), all.raw(), static_cast<std::size_t>(mine.bytes()), ncclUint8, state_->communicator, queue);
    });
  }
  std::shared_ptr<Work> broadcast(const Stream& stream, const Tensor& tensor, int root, const Place& place) override {
    expect_root(root, size(), place.phase);
    return issue(stream, tensor, tensor, place, [&](cudaStream_t queue) {
      return ncclBroadcast(tensor.raw(), tensor.raw(), static_cast<std::size_t>(tensor.bytes()), ncclUint8, root, state_->communicator, queue);
    });
  }
  void barrier(Milliseconds timeout, const std::string& phase) override {
    state_->expect_alive();
    barrier_over(*control_, timeout, phase);
  }
  void check(const std::string& phase) override {
    static_cast<void>(poll(phase));
    const std::string why = control_->lost_peer();
    if (!why.empty()) give_up(concat("rank ", rank(), ": ", phase, ": ", why));
  }
  void abort(const std::string& reason) noexcept override {
    try {
      state_->fail(reason);
    } catch (const std::exception&) {   // no memory for the text
    }
    control_->fail(kPeerCode, reason);   // before the peers see connections close
    abort_within(state_, side_.device().index, kAbortTime);
  }

 private:
  struct Pending {
    std::uint64_t flight;   // in the record
    SharedEvent done;
  };

  void update_record() noexcept override {
    const std::lock_guard lock(pending_mutex_);
    while (!pending_.empty()) {
      if (cudaEventQuery(pending_.front().done.get()) != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        return;
      }
      record_->end(pending_.front().flight);
      pending_.pop_front();
    }
  }

  /// Starts the collective on the side queue, after what is enqueued on `stream`. In a capture it becomes part of the graph: the record says then when it
  /// was captured.
  template <class Call>
  std::shared_ptr<Work> issue(const Stream& stream, const Tensor& from, const Tensor& to, const Place& place, const Call& call) {
    DETR_CHECK(to.defined() && to.device() == side_.device(), "nccl, ", place.phase, ": a tensor on ", side_.device(), ", got ", to);
    state_->expect_alive();
    const bool captured = stream.is_capturing();
    if (!captured) update_record();
    const std::uint64_t flight = record_->issue(place.tag, captured ? place.phase + " (captured)" : place.phase, from.bytes());
    const SharedEvent before = make_event(), done = make_event();
    const cudaStream_t queue = cuda::native(side_);
    DETR_TRY(cudaEventRecord(before.get(), cuda::native(stream)));
    DETR_TRY(cudaStreamWaitEvent(queue, before.get(), cudaEventWaitDefault));
    if (to.numel() > 0) {
      ncclResult_t status = ncclSuccess;
      {
        const std::lock_guard lock(state_->mutex);
        state_->expect_alive();
        status = call(queue);
      }
      expect_success(status, place.phase);
      settle(place.phase, Clock::now() + timeout_);   // nothing may be enqueued behind a call that NCCL has not launched yet
    }
    DETR_TRY(cudaEventRecord(done.get(), queue));
    if (captured) {
      record_->end(flight);
    } else {
      const std::lock_guard lock(pending_mutex_);
      pending_.push_back({flight, done});
      if (pending_.size() > FlightRecord::kLength) pending_.pop_front();
    }
    return std::make_shared<NcclWork>(from, to, done);
  }

  /// Whether NCCL is done with the last call. Throws CommError once the communicator is dead.
  bool poll(const std::string& phase) {
    ncclResult_t state = ncclSuccess;
    state_->expect_alive();   // before the lock, which an abort may hold for long
    {
      const std::lock_guard lock(state_->mutex);
      state_->expect_alive();
      const ncclResult_t status = ncclCommGetAsyncError(state_->communicator, &state);
      if (status != ncclSuccess) state = status;
    }
    expect_success(state, phase);
    return state == ncclSuccess;
  }
  void settle(const std::string& phase, Clock::time_point deadline) {
    while (!poll(phase)) {
      const std::string why = control_->lost_peer();
      if (!why.empty()) give_up(concat("rank ", rank(), ": ", phase, ": ", why));
      if (Clock::now() >= deadline) give_up(concat("rank ", rank(), ": ", phase, ": NCCL is not ready by the deadline; a peer is late or stuck"));
      std::this_thread::sleep_for(kNap);
    }
  }
  void expect_success(ncclResult_t status, const std::string& phase) {
    if (status != ncclSuccess && status != ncclInProgress) give_up(concat("rank ", rank(), ": ", phase, ": NCCL: ", ncclGetErrorString(status)));
  }
  /// Throws the first reason.
  [[noreturn]] void give_up(const std::string& reason) {
    abort(reason);
    state_->expect_alive();
    throw CommError(reason);
  }

  std::shared_ptr<Control> control_;
  Stream side_;
  Milliseconds timeout_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::mutex pending_mutex_;
  std::deque<Pending> pending_;   // collectives that are not known to have ended
};

}  // namespace

std::vector<std::pair<std::string, std::string>> set_nccl_environment() {
  std::vector<std::pair<std::string, std::string>> set;
  for (const auto& [name, value] : {std::pair{"NCCL_ALGO", "allreduce:ring"}, {"NCCL_NVLS_ENABLE", "0"}, {"NCCL_RAS_ENABLE", "0"}}) {
    static_cast<void>(::setenv(name, value, 0));
    set.emplace_back(name, std::getenv(name));
  }
  int version = 0;
  if (ncclGetVersion(&version) == ncclSuccess) set.emplace_back("NCCL version", concat(version / 10000, ".", version / 100 % 100, ".", version % 100));
  return set;
}

void let_ranks_share_a_gpu(int rank) {
  static_cast<void>(::setenv("NCCL_HOSTID", concat("detrtrain-rank-", rank).c_str(), 0));
  static_cast<void>(::setenv("NCCL_SOCKET_IFNAME", "lo", 0));
}

std::unique_ptr<Communicator> nccl_communicator(std::shared_ptr<Control> control, const Stream& stream, Milliseconds connect_timeout, Milliseconds timeout) {
  DETR_CHECK(!stream.device().is_cpu() && !stream.is_planning(), "nccl: a stream on a GPU, got one on ", stream.device());
  return std::make_unique<NcclCommunicator>(std::move(control), stream, connect_timeout, timeout);
}

}  // namespace detr::dist

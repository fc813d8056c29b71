#include "dist/nccl/communicator.h"

#include <nccl.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "runtime/cuda/stream_state.h"
#include "runtime/cuda/try.h"

namespace detr::dist {
namespace {

constexpr Milliseconds kFinalizeTime{10000};

std::shared_ptr<CUevent_st> make_event() {
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

class NcclWork final : public Work {
 public:
  NcclWork(Tensor tensor, std::shared_ptr<CUevent_st> done) : tensor_(std::move(tensor)), done_(std::move(done)) {}
  void wait(const Stream& stream, Clock::time_point) override { DETR_TRY(cudaStreamWaitEvent(cuda::native(stream), done_.get(), cudaEventWaitDefault)); }

 private:
  Tensor tensor_;
  std::shared_ptr<CUevent_st> done_;
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
    expect_success(ncclCommInitRankConfig(&communicator_, size(), id, rank(), &config), "connecting");
    settle("connecting", deadline);
  }
  ~NcclCommunicator() override {
    const std::lock_guard lock(mutex_);
    if (communicator_ == nullptr) return;
    const Clock::time_point deadline = Clock::now() + kFinalizeTime;
    ncclResult_t state = ncclCommFinalize(communicator_);
    while (state == ncclInProgress && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (ncclCommGetAsyncError(communicator_, &state) != ncclSuccess) break;
    }
    static_cast<void>(state == ncclSuccess ? ncclCommDestroy(communicator_) : ncclCommAbort(communicator_));
  }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  const char* engine() const override { return "nccl"; }

  std::shared_ptr<Work> all_reduce_sum(const Stream& stream, const Tensor& tensor, const Place& place) override {
    expect_summable(tensor, place.phase);
    return issue(stream, tensor, place, [&](cudaStream_t queue) {
      return ncclAllReduce(tensor.raw(), tensor.raw(), static_cast<std::size_t>(tensor.numel()), type_of(tensor.dtype()), ncclSum, communicator_, queue);
    });
  }
  std::shared_ptr<Work> broadcast(const Stream& stream, const Tensor& tensor, int root, const Place& place) override {
    DETR_CHECK(root >= 0 && root < size(), "broadcast, ", place.phase, ": root ", root, " in a group of ", size());
    return issue(stream, tensor, place, [&](cudaStream_t queue) {
      return ncclBroadcast(tensor.raw(), tensor.raw(), static_cast<std::size_t>(tensor.bytes()), ncclUint8, root, communicator_, queue);
    });
  }
  void barrier(Milliseconds timeout, const std::string& phase) override {
    try {
      control_->all_gather("", phase, Clock::now() + timeout);
    } catch (const CommError& error) {
      abort(error.what());
      throw;
    }
  }
  void watch(const Stream& stream, Clock::time_point deadline, const std::string& phase) override {
    const std::shared_ptr<CUevent_st> event = make_event();
    DETR_TRY(cudaEventRecord(event.get(), cuda::native(stream)));
    for (cudaError_t state = cudaEventQuery(event.get()); state != cudaSuccess; state = cudaEventQuery(event.get())) {
      if (state != cudaErrorNotReady) cuda::expect_success(state, "cudaEventQuery");
      static_cast<void>(poll(phase));
      if (Clock::now() >= deadline) {
        abort(concat("rank ", rank(), ": ", phase, ": the GPU is not done by the deadline; a peer is late or stuck"));
        expect_alive();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  void abort(const std::string& reason) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      if (failed_.empty()) failed_ = reason.empty() ? "closed" : reason;
      if (communicator_ != nullptr) static_cast<void>(ncclCommAbort(communicator_));
      communicator_ = nullptr;
    }
    control_->fail(reason);
  }

 private:
  /// Starts the collective on the side queue, after what is enqueued on `stream`.
  template <class Call>
  std::shared_ptr<Work> issue(const Stream& stream, const Tensor& tensor, const Place& place, const Call& call) {
    DETR_CHECK(tensor.defined() && tensor.device() == side_.device(), "nccl, ", place.phase, ": a tensor on ", side_.device(), ", got ", tensor);
    const std::shared_ptr<CUevent_st> before = make_event(), done = make_event();
    const cudaStream_t queue = cuda::native(side_);
    DETR_TRY(cudaEventRecord(before.get(), cuda::native(stream)));
    DETR_TRY(cudaStreamWaitEvent(queue, before.get(), cudaEventWaitDefault));
    if (tensor.numel() > 0) {
      ncclResult_t status = ncclSuccess;
      {
        const std::lock_guard lock(mutex_);
        if (!failed_.empty()) throw CommError(failed_);
        status = call(queue);
      }
      expect_success(status, place.phase);
      settle(place.phase, Clock::now() + timeout_);   // nothing may be enqueued behind a call that NCCL has not launched yet
    }
    DETR_TRY(cudaEventRecord(done.get(), queue));
    return std::make_shared<NcclWork>(tensor, done);
  }

  void expect_alive() {
    const std::lock_guard lock(mutex_);
    if (!failed_.empty()) throw CommError(failed_);
  }
  /// Whether NCCL is done with the last call. Throws CommError once the communicator is dead.
  bool poll(const std::string& phase) {
    ncclResult_t state = ncclSuccess;
    {
      const std::lock_guard lock(mutex_);
      if (!failed_.empty()) throw CommError(failed_);
      const ncclResult_t status = ncclCommGetAsyncError(communicator_, &state);
      if (status != ncclSuccess) state = status;
    }
    expect_success(state, phase);
    return state == ncclSuccess;
  }
  void settle(const std::string& phase, Clock::time_point deadline) {
    while (!poll(phase)) {
      if (Clock::now() >= deadline) {
        abort(concat("rank ", rank(), ": ", phase, ": NCCL is not ready by the deadline; a peer is late or stuck"));
        expect_alive();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  void expect_success(ncclResult_t status, const std::string& phase) {
    if (status == ncclSuccess || status == ncclInProgress) return;
    const std::string reason = concat("rank ", rank(), ": ", phase, ": NCCL: ", ncclGetErrorString(status));
    abort(reason);
    throw CommError(reason);
  }

  std::shared_ptr<Control> control_;
  Stream side_;
  Milliseconds timeout_;
  std::mutex mutex_;   // one call into NCCL at a time, so that abort() finds no thread inside
  ncclComm_t communicator_ = nullptr;
  std::string failed_;
};

}  // namespace

std::vector<std::pair<std::string, std::string>> set_nccl_environment() {
  std::vector<std::pair<std::string, std::string>> set;
  for (const auto& [name, value] : {std::pair{"NCCL_ALGO", "allreduce:ring"}, {"NCCL_NVLS_ENABLE", "0"}, {"NCCL_RAS_ENABLE", "0"}}) {
    static_cast<void>(::setenv(name, value, 0));
    set.emplace_back(name, std::getenv(name));
  }
  return set;
}

std::unique_ptr<Communicator> nccl_communicator(std::shared_ptr<Control> control, const Stream& stream, Milliseconds connect_timeout, Milliseconds timeout) {
  DETR_CHECK(!stream.device().is_cpu() && !stream.is_planning(), "nccl: a stream on a GPU, got one on ", stream.device());
  return std::make_unique<NcclCommunicator>(std::move(control), stream, connect_timeout, timeout);
}

}  // namespace detr::dist

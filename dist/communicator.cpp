#include "dist/communicator.h"

#include <algorithm>
#include <mutex>
#include <thread>

#include "dist/control.h"
#include "runtime/error.h"

namespace detr::dist {
namespace {

class Done final : public Work {
 public:
  void wait(const Stream&, Clock::time_point) override {}
};

class Single final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  const char* engine() const override { return "single"; }
  bool capturable() const override { return true; }
  std::shared_ptr<Work> all_reduce_sum(const Stream&, const Tensor& tensor, const Place& place) override {
    expect_summable(tensor, place.phase);
    return done(place, tensor);
  }
  std::shared_ptr<Work> all_gather(const Stream& stream, const Tensor& mine, const Tensor& all, const Place& place) override {
    expect_gatherable(mine, all, 1, place.phase);
    Tensor to = all.reshape(mine.shape());
    stream.copy(mine, to);
    return done(place, mine);
  }
  std::shared_ptr<Work> broadcast(const Stream&, const Tensor& tensor, int root, const Place& place) override {
    expect_root(root, 1, place.phase);
    return done(place, tensor);
  }
  void barrier(Milliseconds, const std::string& phase) override { check(phase); }
  void check(const std::string&) override {
    const std::lock_guard lock(mutex_);
    if (!failed_.empty()) throw CommError(failed_);
  }
  void abort(const std::string& reason) noexcept override {
    const std::lock_guard lock(mutex_);
    if (failed_.empty()) failed_ = reason.empty() ? "closed" : reason;
  }

 private:
  std::shared_ptr<Work> done(const Place& place, const Tensor& tensor) {
    check(place.phase);
    record_->end(record_->issue(place.tag, place.phase, tensor.bytes()));
    return std::make_shared<Done>();
  }

  std::mutex mutex_;
  std::string failed_;
};

constexpr std::chrono::microseconds kNap{20};
constexpr Milliseconds kLook{5};   // how often a wait asks for errors and peers

}  // namespace

void Communicator::watch(const Event& event, Clock::time_point deadline, const std::string& phase) {
  watch([&] { return event.passed(); }, deadline, phase);
}

void Communicator::watch(const std::function<bool()>& passed, Clock::time_point deadline, const std::string& phase) {
  check(phase);
  for (Clock::time_point look = Clock::now() + kLook; !passed();) {
    const Clock::time_point now = Clock::now();
    if (now >= deadline) {
      const std::string reason = concat("rank ", rank(), ": ", phase, ": the device is not done by the deadline; a peer is late or stuck");
      abort(reason);
      throw CommError(reason);
    }
    if (now >= look) {
      check(phase);
      update_record();
      look = now + kLook;
    }
    std::this_thread::sleep_for(kNap);
  }
  update_record();
}

void Communicator::barrier_over(Control& control, Milliseconds timeout, const std::string& phase) {
  try {
    static_cast<void>(control.all_gather("", phase, Clock::now() + timeout));
  } catch (const CommError& error) {
    abort(error.what());
    throw;
  }
}

std::unique_ptr<Communicator> single_communicator() { return std::make_unique<Single>(); }

void expect_summable(const Tensor& tensor, const std::string& phase) {
  DETR_CHECK(tensor.defined(), "all_reduce_sum, ", phase, ": the tensor is undefined");
  DETR_CHECK(tensor.dtype() != DType::u8, "all_reduce_sum, ", phase, ": f32, f64, bf16 or i64, got ", tensor);
}

void expect_gatherable(const Tensor& mine, const Tensor& all, int size, const std::string& phase) {
  DETR_CHECK(mine.defined() && all.defined(), "all_gather, ", phase, ": a tensor is undefined");
  DETR_CHECK(all.dtype() == mine.dtype() && all.device() == mine.device() && all.rank() == mine.rank() + 1 && all.dim(0) == size &&
                 std::ranges::equal(all.shape().dims().subspan(1), mine.shape().dims()),
             "all_gather, ", phase, ": ", mine, " of each of ", size, " ranks into ", all);
}

void expect_root(int root, int size, const std::string& phase) {
  DETR_CHECK(root >= 0 && root < size, "broadcast, ", phase, ": root ", root, " in a group of ", size == 1 ? std::string("one") : std::to_string(size));
}

}  // namespace detr::dist

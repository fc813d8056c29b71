#include <algorithm>

#include "dist/gloo/communicator.h"
#include "runtime/error.h"

namespace detr::dist {
namespace {

/// A page-locked block. It is used again only after the copy from it to the device, in the order of the queue and of the host.
struct Block {
  Tensor memory;           // (bytes) u8
  Event free;              // passed once the last copy from it is done
  bool busy = false;       // from the issue to the wait of a collective
};

/// The blocks of a communicator, touched by the thread that issues. A step's collectives repeat, so each finds a block of its size.
class Blocks {
 public:
  Blocks() = default;
  ~Blocks() {
    for (const auto& block : blocks_) {
      try {
        block->free.wait();
      } catch (const DeviceError&) {   // nothing runs there any more
      }
    }
  }
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;
  Block& take(const Stream& stream, std::int64_t bytes) {
    Block* best = nullptr;
    for (const auto& block : blocks_) {
      if (!block->busy && block->memory.bytes() >= bytes && (best == nullptr || block->memory.bytes() < best->memory.bytes())) best = block.get();
    }
    if (best == nullptr) best = blocks_.emplace_back(std::make_unique<Block>(Block{stream.empty_host({bytes}, DType::u8), {}, false})).get();
    best->busy = true;
    return *best;
  }

 private:
  std::vector<std::unique_ptr<Block>> blocks_;
};

/// Holds `from` as long as the queue beside the stream reads it. `to` is undefined where nothing is to be copied back.
class StagedWork final : public Work {
 public:
  StagedWork(std::shared_ptr<Work> exchange, std::shared_ptr<Blocks> blocks, Block& block, Stream side, Event arrived, Tensor host, Tensor from, Tensor to)
      : exchange_(std::move(exchange)), blocks_(std::move(blocks)), block_(&block), side_(std::move(side)), arrived_(std::move(arrived)), host_(std::move(host)),
        from_(std::move(from)), to_(std::move(to)) {}
  void wait(const Stream& stream, Clock::time_point deadline) override {
    try {
      exchange_->wait(side_, deadline);
    } catch (const CommError&) {
      static_cast<void>(arrived_.passed());   // where the device has failed, that is the cause, and this throws it
      throw;
    }
    if (to_.defined()) {
      stream.copy(host_, to_);
      block_->free = stream.record();
    }
    block_->busy = false;
  }

 private:
  std::shared_ptr<Work> exchange_;
  std::shared_ptr<Blocks> blocks_;   // keeps the block
  Block* block_;
  Stream side_;
  Event arrived_;
  Tensor host_, from_, to_;
};

class Staged final : public Communicator {
 public:
  Staged(std::unique_ptr<Communicator> gloo, const Stream& stream) : gloo_(std::move(gloo)), side_(stream.beside()) {}

  int rank() const override { return gloo_->rank(); }
  int size() const override { return gloo_->size(); }
  const char* engine() const override { return "gloo-staged"; }
  bool capturable() const override { return false; }

  std::shared_ptr<Work> all_reduce_sum(const Stream& stream, const Tensor& tensor, const Place& place) override {
    expect_summable(tensor, place.phase);
    return stage(stream, tensor, 0, tensor, true, place, [&](const Tensor& host) { return gloo_->all_reduce_sum(side_, host, place); });
  }
  std::shared_ptr<Work> all_gather(const Stream& stream, const Tensor& mine, const Tensor& all, const Place& place) override {
    expect_gatherable(mine, all, size(), place.phase);
    const std::int64_t begin = rank() * mine.numel();
    return stage(stream, mine, begin, all, true, place, [&](const Tensor& host) { return gloo_->all_gather(side_, host.view(begin, mine.shape()), host, place); });
  }
  std::shared_ptr<Work> broadcast(const Stream& stream, const Tensor& tensor, int root, const Place& place) override {
    expect_root(root, size(), place.phase);
    const bool sends = rank() == root;
    return stage(stream, sends ? tensor : Tensor(), 0, tensor, !sends, place, [&](const Tensor& host) { return gloo_->broadcast(side_, host, root, place); });
  }
  void barrier(Milliseconds timeout, const std::string& phase) override { gloo_->barrier(timeout, phase); }
  void check(const std::string& phase) override { gloo_->check(phase); }
  void abort(const std::string& reason) noexcept override { gloo_->abort(reason); }
  FlightRecord& record() override { return gloo_->record(); }

 private:
  /// Copies `from`, if there is one, to a host tensor like `to` (from its element `begin` on), gives that to `exchange`, and leaves the copy back to
  /// the work's wait().
  template <class Exchange>
  std::shared_ptr<Work> stage(const Stream& stream, const Tensor& from, std::int64_t begin, const Tensor& to, bool back, const Place& place,
                              const Exchange& exchange) {
    DETR_CHECK(to.defined() && to.device() == side_.device(), "gloo-staged, ", place.phase, ": a tensor on ", side_.device(), ", got ", to);
    DETR_CHECK(!stream.is_capturing(), "gloo-staged, ", place.phase, ": a graph cannot hold it");
    Block& block = blocks_->take(side_, to.bytes());
    const Tensor host(std::shared_ptr<std::byte>(blocks_, static_cast<std::byte*>(block.memory.raw())), 0, to.shape(), to.dtype(), Device::cpu());
    side_.wait_for(stream.record());
    side_.wait_for(block.free);
    if (from.defined()) {
      Tensor part = host.view(begin, from.shape());
      side_.copy(from, part);
    }
    Event arrived = side_.record();
    return std::make_shared<StagedWork>(exchange(host), blocks_, block, side_, std::move(arrived), host, from, back ? to : Tensor());
  }

  std::unique_ptr<Communicator> gloo_;
  Stream side_;
  std::shared_ptr<Blocks> blocks_ = std::make_shared<Blocks>();
};

}  // namespace

std::unique_ptr<Communicator> staged_gloo_communicator(std::shared_ptr<Control> control, const Stream& stream, Milliseconds connect_timeout,
                                                       const GlooOptions& options) {
  DETR_CHECK(!stream.is_planning(), "gloo-staged: nothing runs on a planning stream");
  return std::make_unique<Staged>(gloo_communicator(std::move(control), connect_timeout, options), stream);
}

}  // namespace detr::dist

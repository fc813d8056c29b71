#include "dist/communicator.h"

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
  std::shared_ptr<Work> all_reduce_sum(const Stream&, const Tensor& tensor, const Place& place) override {
    expect_summable(tensor, place.phase);
    return std::make_shared<Done>();
  }
  std::shared_ptr<Work> broadcast(const Stream&, const Tensor&, int root, const Place& place) override {
    DETR_CHECK(root == 0, "broadcast, ", place.phase, ": root ", root, " in a group of one");
    return std::make_shared<Done>();
  }
  void barrier(Milliseconds, const std::string&) override {}
  void watch(const Stream& stream, Clock::time_point, const std::string&) override { stream.wait(); }
  void abort(const std::string&) noexcept override {}
};

}  // namespace

std::unique_ptr<Communicator> single_communicator() { return std::make_unique<Single>(); }

void expect_summable(const Tensor& tensor, const std::string& phase) {
  DETR_CHECK(tensor.defined(), "all_reduce_sum, ", phase, ": the tensor is undefined");
  DETR_CHECK(tensor.dtype() != DType::u8, "all_reduce_sum, ", phase, ": f32, f64, bf16 or i64, got ", tensor);
}

}  // namespace detr::dist

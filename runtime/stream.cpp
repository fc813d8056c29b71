#include "runtime/stream.h"

#include <algorithm>
#include <cstring>

#include "runtime/build.h"
#include "runtime/error.h"

namespace detr {

Stream Stream::cpu(int threads, const std::shared_ptr<MemorySource>& memory) {
  const auto allocator = Allocator::make(memory);
  return {allocator, allocator, std::make_shared<ThreadPool>(threads > 0 ? threads : default_threads()), nullptr};
}

Stream Stream::cuda(int index, int threads) {
  if constexpr (kHasCuda) {
    cuda::StreamParts parts = cuda::open_stream(index);
    return {parts.device, parts.pinned, std::make_shared<ThreadPool>(threads > 0 ? threads : default_threads()), parts.state};
  } else {
    throw DeviceError("cuda:", index, ": this build has no CUDA code");
  }
}

Stream Stream::planning(Device device) {
  return {Allocator::make(planned_memory(device)), Allocator::make(host_memory()), std::make_shared<ThreadPool>(1), nullptr, true};
}

namespace {

Tensor made(Allocator& allocator, const Shape& shape, DType dtype) {
  return {allocator.allocate(static_cast<std::size_t>(shape.numel() * size_of(dtype))), 0, shape, dtype, allocator.device()};
}

}  // namespace

Tensor Stream::empty(const Shape& shape, DType dtype) const { return made(*allocator_, shape, dtype); }

Tensor Stream::empty_host(const Shape& shape, DType dtype) const { return made(*host_allocator_, shape, dtype); }

Tensor Stream::zeros(const Shape& shape, DType dtype) const {
  Tensor result = empty(shape, dtype);
  if (!result.bytes() || planning_) return result;
  if (device().is_cpu()) std::memset(result.raw(), 0, static_cast<std::size_t>(result.bytes()));
  else if constexpr (kHasCuda) cuda::clear(*this, result);
  return result;
}

void Stream::copy(const Tensor& from, Tensor& to) const {
  DETR_CHECK(from.defined() && to.defined() && from.shape() == to.shape() && from.dtype() == to.dtype(), "copy: ", from, " to ", to);
  for (const Tensor* side : {&from, static_cast<const Tensor*>(&to)})
    DETR_CHECK(side->device().is_cpu() || side->device() == device(), "copy: a tensor on ", side->device(), ", the stream is on ", device());
  if (!to.bytes() || from.raw() == to.raw() || planning_) return;
  if (device().is_cpu()) std::memcpy(to.raw(), from.raw(), static_cast<std::size_t>(to.bytes()));
  else if constexpr (kHasCuda) cuda::copy(*this, from, to);
}

Tensor Stream::to_device(const Tensor& tensor) const {
  if (!tensor.defined() || tensor.device() == device()) return tensor;
  Tensor result = empty_like(tensor);
  copy(tensor, result);
  return result;
}

Tensor Stream::to_host(const Tensor& tensor) const {
  DETR_CHECK(!planning_, "to_host: on a planning stream nothing has been computed: ", tensor);
  if (!tensor.defined() || tensor.device().is_cpu()) return tensor;
  Tensor result = empty_host(tensor.shape(), tensor.dtype());
  copy(tensor, result);
  wait();
  return result;
}

void Stream::wait() const {
  if constexpr (kHasCuda) {
    if (cuda_) cuda::wait(*this);
  }
}

Event Stream::record() const {
  if constexpr (kHasCuda) {
    if (cuda_) return Event(cuda::record(*this));
  }
  return {};
}

void Event::wait() const {
  if constexpr (kHasCuda) {
    if (event_) cuda::wait_event(event_.get());
  }
}

bool Event::passed() const {
  if constexpr (kHasCuda) {
    if (event_) return cuda::has_passed(event_.get());
  }
  return true;
}

double Event::milliseconds_since(const Event& earlier) const {
  DETR_CHECK(event_ && earlier.event_, "event: the CPU has no times");
  if constexpr (kHasCuda) return cuda::milliseconds_between(earlier.event_.get(), event_.get());
  else return 0;
}

void Stream::wait_for(const Event& event) const {
  if constexpr (kHasCuda) {
    if (event.event_) cuda::wait_for(*this, event.event_.get());
  }
}

Stream Stream::beside() const {
  Stream stream = lasting();
  if constexpr (kHasCuda) {
    if (cuda_) stream.cuda_ = cuda::state_beside(*this);
  }
  return stream;
}

void Stream::enter_thread() const {
  if constexpr (kHasCuda) {
    if (cuda_) cuda::enter_thread(*this);
  }
}

Stream Stream::with_arena() const {
  Stream stream = *this;
  stream.allocator_ = Allocator::make(lasting_allocator_->source());
  return stream;
}

Stream Stream::lasting() const {
  Stream stream = *this;
  stream.allocator_ = lasting_allocator_;
  return stream;
}

Graph Stream::capture(const std::function<void()>& enqueue) const {
  DETR_CHECK(!planning_, "capture: a planning stream has no graphs");
  DETR_CHECK(!device().is_cpu(), "capture: a stream on the CPU has no graphs");
  allocator_->keep_cache();
  if constexpr (kHasCuda) return Graph(cuda::capture(*this, enqueue));
  else return {};
}

bool Stream::is_capturing() const {
  if constexpr (kHasCuda) return cuda_ && cuda::is_capturing(*this);
  else return false;
}

void Graph::launch(const Stream& stream) const {
  if constexpr (kHasCuda) cuda::launch(stream, *state_);
}

std::int64_t Graph::kernels() const {
  if constexpr (kHasCuda) return cuda::count_kernels(*state_);
  else return 0;
}

std::int64_t Graph::nodes() const {
  if constexpr (kHasCuda) return cuda::count_nodes(*state_);
  else return 0;
}

void Stream::parallel_blocks(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& task) const {
  DETR_CHECK(grain >= 1, "parallel_blocks: grain must be >= 1, got ", grain);
  pool_->parallel_for((count + grain - 1) / grain, [&](std::int64_t block) { task(block * grain, std::min(count, (block + 1) * grain)); });
}

}  // namespace detr

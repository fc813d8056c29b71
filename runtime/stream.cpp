#include "runtime/stream.h"

#include <algorithm>
#include <cstring>

#include "runtime/error.h"

namespace detr {

Stream Stream::cpu(int threads) {
  return {Allocator::make(host_memory()), std::make_shared<ThreadPool>(threads > 0 ? threads : default_threads())};
}

Tensor Stream::empty(const Shape& shape, DType dtype) const {
  return {allocator_->allocate(static_cast<std::size_t>(shape.numel() * size_of(dtype))), 0, shape, dtype, device()};
}

Tensor Stream::zeros(const Shape& shape, DType dtype) const {
  Tensor result = empty(shape, dtype);
  if (result.bytes()) std::memset(result.raw(), 0, static_cast<std::size_t>(result.bytes()));
  return result;
}

void Stream::parallel_blocks(std::int64_t count, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& task) const {
  DETR_CHECK(grain >= 1, "parallel_blocks: grain must be >= 1, got ", grain);
  pool_->parallel_for((count + grain - 1) / grain, [&](std::int64_t block) { task(block * grain, std::min(count, (block + 1) * grain)); });
}

}  // namespace detr

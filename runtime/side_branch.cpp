#include "runtime/side_branch.h"

#include <algorithm>
#include <utility>

#include "runtime/build.h"

namespace detr {
namespace {

constexpr std::size_t kMostInFlight = 32;   // each wait costs a GPU a little, and work in flight holds its tensors

Event mark(const Stream& stream) {
  if constexpr (kHasCuda) {
    if (!stream.device().is_cpu() && !stream.is_planning()) return Event(cuda::mark(stream));
  }
  return {};   // the work has run when its call returns
}

bool share_memory(const Tensor& a, const Tensor& b) {
  const auto *a_begin = static_cast<const std::byte*>(a.raw()), *b_begin = static_cast<const std::byte*>(b.raw());
  return a.bytes() > 0 && b.bytes() > 0 && a_begin < b_begin + b.bytes() && b_begin < a_begin + a.bytes();
}

}  // namespace

SideBranch::SideBranch(const Stream& stream) : stream_(stream), side_(stream.beside().with_arena()) {
  side_.allocator().keep_cache();   // a graph that holds a branch writes to its scratch at each launch
}

void SideBranch::run(std::vector<Tensor> touched, const std::function<void(const Stream& side)>& work) {
  if (in_flight_.size() == kMostInFlight) wait_for_oldest(kMostInFlight / 2);
  side_.wait_for(mark(stream_));
  work(side_);
  in_flight_.push_back({std::move(touched), mark(side_)});
}

void SideBranch::settle(const Tensor& tensor) {
  for (std::size_t count = in_flight_.size(); count > 0; --count) {
    const std::vector<Tensor>& touched = in_flight_[count - 1].touched;
    if (std::ranges::any_of(touched, [&](const Tensor& t) { return share_memory(t, tensor); })) return wait_for_oldest(count);
  }
}

void SideBranch::join() { wait_for_oldest(in_flight_.size()); }

void SideBranch::wait_for_oldest(std::size_t count) {
  if (count == 0) return;
  stream_.wait_for(in_flight_[count - 1].done);   // and so for those before it
  in_flight_.erase(in_flight_.begin(), in_flight_.begin() + static_cast<std::ptrdiff_t>(count));
}

}  // namespace detr

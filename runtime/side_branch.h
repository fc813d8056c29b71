#pragma once
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/stream.h"

namespace detr {

/// A second queue beside a stream's, for work whose results are wanted late: on a GPU its kernels run where the stream's leave room. It has
/// library handles, workspaces and scratch memory of its own, so the work gives the same bits. Captured with the stream, it is a branch of the graph.
///
/// Note [Two queues, one memory]
/// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
/// On one queue a block may be dropped or written again as soon as the work that uses it is enqueued. Between two it may not. So the
/// branch keeps each tensor that its work touches until the stream has waited for the work, and who lets the stream write to what such work may
/// read, or read what it writes, calls settle() or join() before.
class SideBranch {
 public:
  explicit SideBranch(const Stream& stream);

  /// Enqueues work that starts once all that the stream was given so far is done. touched: the tensors that it reads or writes. Where much
  /// is in flight the stream waits for the older half first.
  void run(std::vector<Tensor> touched, const std::function<void(const Stream& side)>& work);
  /// What the stream is given from here on starts once the work in flight that touches the tensor's memory is done.
  void settle(const Tensor& tensor);
  /// The same for all work in flight.
  void join();

 private:
  struct Work {
    std::vector<Tensor> touched;
    Event done;
  };
  void wait_for_oldest(std::size_t count);

  Stream stream_, side_;
  std::deque<Work> in_flight_;   // what the stream has not waited for, in the order of the branch
};

namespace cuda {
/// An event after the work that the stream was given so far. In a capture it is an edge to what waits for it, where record()'s is a node.
std::shared_ptr<void> mark(const Stream& stream);
}  // namespace cuda

}  // namespace detr

#pragma once
#include "runtime/stream.h"

namespace detr {

/// Ranks whose batch norms take their statistics over the rows of all of them (Context::statistics). All ranks make the same forward calls
/// in the same order, then the same backward calls in the same order, which need not be the reverse.
class SharedStatistics {
 public:
  virtual ~SharedStatistics() = default;
  virtual int ranks() const = 0;

  /// all = every rank's `mine`, by rank: f64 tensors of K and ranks() K elements, in memory that the caller may drop once the call has
  /// returned. Like an op on the stream: it sees what was enqueued there before, what is enqueued after sees `all`, and on a planning
  /// stream it counts and does no more. Returns the number of the call in this pass, from 0.
  virtual int gather_forward(const Stream& stream, const Tensor& mine, Tensor& all) = 0;
  /// The same in the backward pass, for the norm whose forward was call `call`. Not called for norms whose input wants no gradient, which
  /// the model decides and not the data.
  virtual void gather_backward(const Stream& stream, int call, const Tensor& mine, Tensor& all) = 0;
};

}  // namespace detr

#pragma once
#include "runtime/tensor.h"

namespace detr {

/// A value in a computation and its place on the tape, if a gradient may be wanted for it.
class Variable {
 public:
  Variable() = default;
  /// A constant.
  explicit Variable(Tensor value) : value_(std::move(value)) {}
  Variable(Tensor value, int node) : value_(std::move(value)), node_(node) {}

  const Tensor& value() const { return value_; }
  const Shape& shape() const { return value_.shape(); }
  std::int64_t dim(int i) const { return value_.dim(i); }
  bool defined() const { return value_.defined(); }
  bool wants_grad() const { return node_ >= 0; }
  /// Index of its node on the tape, -1 for a constant.
  int node() const { return node_; }

  /// The same value as a constant: no gradient flows through.
  Variable detach() const { return Variable(value_); }

 private:
  Tensor value_;
  int node_ = -1;
};

}  // namespace detr

#pragma once
#include <functional>
#include <initializer_list>
#include <span>
#include <vector>

#include "autograd/tape.h"
#include "runtime/random.h"
#include "runtime/side_branch.h"
#include "runtime/stream.h"

namespace detr {

class SharedStatistics;

/// What every op is handed: a stream, a tape or none (inference), and whether the model trains.
class Context {
 public:
  Context(Stream stream, Tape* tape, bool training) : stream_(std::move(stream)), tape_(tape), training_(training) {}

  const Stream& stream() const { return stream_; }
  Tape* tape() const { return tape_; }
  bool training() const { return training_; }
  /// The same without a tape: what is computed in it is constant.
  Context without_tape() const {
    Context context(stream_, nullptr, training_);
    context.made = made;
    context.after_op = after_op;
    context.statistics = statistics;
    return context;
  }

  /// Where each tensor that is made in this context is listed, in order, null for nowhere (a debugging aid). Two passes over one
  /// model list tensors of the same shapes.
  std::vector<Tensor>* made = nullptr;

  /// Where batch norms that take the statistics of the batch exchange them with other ranks (autograd/statistics.h); null where the
  /// batch is this process's alone. Must outlive the backward pass.
  SharedStatistics* statistics = nullptr;

  /// Where gradients that backward itself does not need are computed; null: in turn with the others. Whoever runs the pass joins the branch
  /// before parameters' gradients are read.
  SideBranch* side = nullptr;
  /// For the part of an op's backward that makes gradients of weights: does the work on the side branch if there is one, else at once. touched: the
  /// tensors that it reads or writes.
  void beside(std::vector<Tensor> touched, const std::function<void(const Stream&)>& work) const {
    if (side) side->run(std::move(touched), work);
    else work(stream_);
  }

  /// During an op's backward: whether what input i's destination holds is to be kept and added to. Only for inputs that the op named
  /// in GradientRules when it was recorded; the tape adds the others' contributions itself.
  bool adds(unsigned i) const { return (adds_ >> i & 1U) != 0; }
  /// The same for an input that a ReLU made: whether its gradient, with all that it is added to, is to be taken back through that ReLU, which makes
  /// it 0 where the input is not above 0. So the last op that adds to the gradient of a ReLU's output saves the ReLU a pass.
  bool masks(unsigned i) const { return (masks_ >> i & 1U) != 0; }
  /// In the backward of an op that ends in a ReLU: whether dy has been taken back through it.
  bool before_relu() const { return before_relu_; }
  void set_rules(unsigned adds, unsigned masks, bool before_relu) {
    adds_ = adds;
    masks_ = masks;
    before_relu_ = before_relu;
  }

  /// Called after each op of the forward pass with its name, where it is set (a measuring aid; backward has Tape::observer).
  std::function<void(const std::string& op)> after_op;

  Tensor empty(const Shape& shape, DType dtype) const {
    Tensor tensor = stream_.empty(shape, dtype);
    if (made) made->push_back(tensor);
    return tensor;
  }
  Tensor empty_like(const Tensor& tensor) const { return empty(tensor.shape(), tensor.dtype()); }

  /// A parameter, or its rows [begin, end), as a variable.
  Variable leaf(const Parameter& parameter);
  Variable leaf(const Parameter& parameter, std::int64_t begin, std::int64_t end);

  /// Wraps an op's result; appends a node if there is a tape and one of the inputs wants a gradient.
  Variable record(const char* name, std::initializer_list<Variable> inputs, const Tensor& y, Backward backward, GradientRules rules = {});
  Variable record(const char* name, std::span<const Variable> inputs, const Tensor& y, Backward backward, GradientRules rules = {});

 private:
  Stream stream_;
  Tape* tape_ = nullptr;
  bool training_ = false;
  unsigned adds_ = 0, masks_ = 0;
  bool before_relu_ = false;
};

}  // namespace detr

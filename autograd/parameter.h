#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/random.h"
#include "runtime/tensor.h"

namespace detr {

/// Writes the initial values of a tensor, in our layout, from a key of its own.
using Init = std::function<void(RandomKey key, std::span<double> values)>;

/// A named tensor of a model: a parameter (trained unless frozen) or a buffer (a batch norm's running statistics, say).
/// A handle; the values and the gradient are slices of the parameter store, which points `value` and `grad` at them.
class Parameter {
 public:
  enum class Kind { parameter, buffer };

  struct State {
    std::string name;        ///< the reference's
    std::string init_name;   ///< tensors that start with equal values share it; `name` otherwise
    Shape shape;             ///< ours: convolution weights are (out, kh, kw, in)
    Kind kind = Kind::parameter;
    bool trainable = true;
    bool wide = false;       ///< stays in f32 where the model computes in bf16: buffers, and what belongs to norms
    Init init;
    Tensor value;            ///< what ops read, in the compute dtype unless wide
    Tensor exact;            ///< the same in the store's own dtype, f32 or f64
    Tensor grad;             ///< never bf16; undefined for what is not trained
    std::int64_t index = 0;  ///< place in its ParameterList
    std::vector<std::pair<std::int64_t, std::int64_t>> written;   ///< rows of `grad` that hold a gradient of this step
  };

  Parameter() = default;
  explicit Parameter(std::shared_ptr<State> state) : state_(std::move(state)) {}

  const std::string& name() const { return state_->name; }
  const Shape& shape() const { return state_->shape; }
  std::int64_t index() const { return state_->index; }
  bool trainable() const { return state_->trainable; }
  bool is_buffer() const { return state_->kind == Kind::buffer; }
  const Tensor& value() const { return state_->value; }
  const Tensor& exact() const { return state_->exact; }
  const Tensor& grad() const { return state_->grad; }
  State& state() const { return *state_; }

 private:
  std::shared_ptr<State> state_;
};

/// Rows [begin, end) of a parameter's value or gradient; a tensor without dimensions is one row.
Tensor rows_of(const Tensor& tensor, std::int64_t begin, std::int64_t end);

/// All parameters and buffers of a model in the order in which its layers registered them.
class ParameterList {
 public:
  /// Throws InvalidArgument if the name is taken.
  Parameter add(const std::string& name, const Shape& shape, Init init);
  Parameter add_buffer(const std::string& name, const Shape& shape, Init init);

  const std::vector<Parameter>& all() const { return all_; }
  /// Throws InvalidArgument for an unknown name.
  const Parameter& find(const std::string& name) const;
  bool contains(const std::string& name) const;

 private:
  Parameter add(const std::string& name, const Shape& shape, Init init, Parameter::Kind kind);

  std::vector<Parameter> all_;
};

}  // namespace detr

#pragma once
#include <cstdint>
#include <vector>

#include "autograd/parameter.h"
#include "runtime/stream.h"

namespace detr::train {

/// Memory of a model: flat buffers of weights, gradients, both moments and the exponential moving average, in which every
/// Parameter is a slice. Trainable parameters come first, in reverse registration order (backward fills the gradients front to
/// back, so a bucket of a reducer is a slice), then frozen ones and buffers. Slices start at multiples of 256 bytes; the padding
/// is zero and stays so. A model that computes in bf16 has a bf16 copy of the weights beside them, the shadow, which its ops read
/// for all but the wide parameters.
class ParameterStore {
 public:
  /// dtype f32 or f64; compute: dtype, or bf16 beside f32. Points the parameters' `value` and `grad` at the store. All values are zero
  /// until initialise() or a load.
  ParameterStore(const ParameterList& list, const Stream& stream, DType dtype, DType compute);
  ParameterStore(const ParameterList& list, const Stream& stream, DType dtype) : ParameterStore(list, stream, dtype, dtype) {}

  /// Draws all initial values and copies them to the moving average.
  void initialise(std::uint64_t seed);
  /// Start of a step: zeroes the gradients and forgets which rows were written.
  void clear_gradients(const Stream& stream);
  void clear_gradients() { clear_gradients(stream_); }
  /// The moving average becomes a copy of the weights.
  void reset_ema();
  /// After a change of weights(): writes the shadow, if there is one.
  void refresh_shadow(const Stream& stream);
  void refresh_shadow() { refresh_shadow(stream_); }

  /// A buffer on the host, to be read or changed: its own memory on the CPU, else a copy that from_host() brings back.
  Tensor on_host(const Tensor& buffer) const { return stream_.to_host(buffer); }
  void from_host(const Tensor& host, Tensor& buffer);

  const ParameterList& list() const { return *list_; }
  /// Trainable parameters in the order of the gradient buffer.
  const std::vector<Parameter>& trainable() const { return trainable_; }
  /// First element of a parameter in weights() and ema() (and, if trainable, in the other buffers).
  std::int64_t offset(const Parameter& parameter) const { return offsets_[static_cast<std::size_t>(parameter.index())]; }

  Tensor& weights() { return weights_; }         ///< trainable part first, then the rest
  Tensor& ema() { return ema_; }                 ///< like weights()
  Tensor trained_weights() const;                ///< the trainable part of weights()
  Tensor& grads() { return grads_; }
  Tensor& exp_avg() { return exp_avg_; }
  Tensor& exp_avg_sq() { return exp_avg_sq_; }
  /// A parameter's slice of a buffer, in its own shape.
  Tensor slice(const Tensor& buffer, const Parameter& parameter) const;

  std::int64_t trainable_values() const { return trainable_values_; }
  DType dtype() const { return weights_.dtype(); }
  /// What the model's ops compute in.
  DType compute_dtype() const { return compute_; }

  /// While it lives the parameters' values are those of the moving average.
  class UseEma {
   public:
    explicit UseEma(ParameterStore& store) : store_(store) { store_.point_values(store_.ema_); }
    ~UseEma();
    UseEma(const UseEma&) = delete;
    UseEma& operator=(const UseEma&) = delete;

   private:
    ParameterStore& store_;
  };

 private:
  void point_values(const Tensor& buffer);
  void shadow(const Stream& stream, const Tensor& buffer);

  const ParameterList* list_;
  Stream stream_;
  std::vector<Parameter> trainable_;
  std::vector<std::int64_t> offsets_;
  std::int64_t trainable_values_ = 0;
  DType compute_;
  Tensor weights_, ema_, grads_, exp_avg_, exp_avg_sq_, shadow_;
};

}  // namespace detr::train

#include "train/store.h"

#include <cstring>

#include "kernels/pointwise.h"
#include "models/nn/init.h"
#include "runtime/error.h"

namespace detr::train {

ParameterStore::ParameterStore(const ParameterList& list, const Stream& stream, DType dtype) : list_(&list), stream_(stream) {
  DETR_CHECK(dtype == DType::f32 || dtype == DType::f64, "parameter store: f32 or f64, got ", dtype);
  const std::vector<Parameter>& all = list.all();
  offsets_.resize(all.size());
  const std::int64_t unit = 256 / size_of(dtype);
  std::int64_t end = 0;
  const auto place = [&](const Parameter& p) {
    offsets_[static_cast<std::size_t>(p.index())] = end;
    end += (p.shape().numel() + unit - 1) / unit * unit;
  };
  for (auto p = all.rbegin(); p != all.rend(); ++p) {
    if (!p->trainable()) continue;
    place(*p);
    trainable_.push_back(*p);
    trainable_values_ += p->shape().numel();
  }
  const std::int64_t trained = end;
  for (const Parameter& p : all) {
    if (!p.trainable()) place(p);
  }
  weights_ = stream.zeros({end}, dtype);
  ema_ = stream.zeros({end}, dtype);
  grads_ = stream.zeros({trained}, dtype);
  exp_avg_ = stream.zeros({trained}, dtype);
  exp_avg_sq_ = stream.zeros({trained}, dtype);
  point_values(weights_);
  for (const Parameter& p : trainable_) p.state().grad = slice(grads_, p);
}

Tensor ParameterStore::trained_weights() const { return weights_.slice(0, grads_.numel()); }

Tensor ParameterStore::slice(const Tensor& buffer, const Parameter& parameter) const {
  return buffer.view(offset(parameter), parameter.shape());
}

void ParameterStore::point_values(const Tensor& buffer) {
  for (const Parameter& p : list_->all()) p.state().value = slice(buffer, p);
}

void ParameterStore::initialise(std::uint64_t seed) {
  for (const Parameter& p : list_->all()) {
    Tensor values = slice(weights_, p);
    models::init::apply(p, seed, values);
  }
  reset_ema();
}

void ParameterStore::reset_ema() { std::memcpy(ema_.raw(), weights_.raw(), static_cast<std::size_t>(weights_.bytes())); }

void ParameterStore::clear_gradients() {
  kernels::fill(stream_, 0, grads_);
  for (const Parameter& p : trainable_) p.state().written.clear();
}

}  // namespace detr::train

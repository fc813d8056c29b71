#include "train/store.h"

#include "kernels/pointwise.h"
#include "models/nn/init.h"
#include "runtime/error.h"

namespace detr::train {

ParameterStore::ParameterStore(const ParameterList& list, const Stream& stream, DType dtype, DType compute)
    : list_(&list), stream_(stream.lasting()), compute_(compute) {
  DETR_CHECK(dtype == DType::f32 || dtype == DType::f64, "parameter store: f32 or f64, got ", dtype);
  DETR_CHECK(compute == dtype || (compute == DType::bf16 && dtype == DType::f32), "parameter store: ", dtype, " weights for a model in ", compute);
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
  weights_ = stream_.zeros({end}, dtype);
  ema_ = stream_.zeros({end}, dtype);
  grads_ = stream_.zeros({trained}, dtype);
  exp_avg_ = stream_.zeros({trained}, dtype);
  exp_avg_sq_ = stream_.zeros({trained}, dtype);
  if (compute != dtype) shadow_ = stream_.zeros({end}, compute);
  point_values(weights_);
  for (const Parameter& p : trainable_) p.state().grad = slice(grads_, p);
}

Tensor ParameterStore::trained_weights() const { return weights_.slice(0, grads_.numel()); }

Tensor ParameterStore::slice(const Tensor& buffer, const Parameter& parameter) const {
  return buffer.view(offset(parameter), parameter.shape());
}

void ParameterStore::point_values(const Tensor& buffer) {
  for (const Parameter& p : list_->all()) {
    p.state().exact = slice(buffer, p);
    p.state().value = shadow_.defined() && !p.state().wide ? slice(shadow_, p) : p.exact();
  }
  shadow(stream_, buffer);
}

void ParameterStore::shadow(const Stream& stream, const Tensor& buffer) {
  if (shadow_.defined()) kernels::cast(stream, buffer, shadow_);
}

void ParameterStore::refresh_shadow(const Stream& stream) { shadow(stream, weights_); }

ParameterStore::UseEma::~UseEma() {
  try {
    store_.point_values(store_.weights_);
  } catch (const Error&) {   // a device that failed; whoever uses it next is told
  }
}

void ParameterStore::from_host(const Tensor& host, Tensor& buffer) {
  stream_.copy(host, buffer);
  stream_.wait();   // the host's memory may go
}

void ParameterStore::initialise(std::uint64_t seed) {
  const Tensor host = on_host(weights_);
  for (const Parameter& p : list_->all()) {
    Tensor values = slice(host, p);
    models::init::apply(p, seed, values);
  }
  from_host(host, weights_);
  refresh_shadow();
  reset_ema();
}

void ParameterStore::reset_ema() { stream_.copy(weights_, ema_); }

void ParameterStore::clear_gradients(const Stream& stream) {
  kernels::fill(stream, 0, grads_);
  for (const Parameter& p : trainable_) p.state().written.clear();
}

}  // namespace detr::train

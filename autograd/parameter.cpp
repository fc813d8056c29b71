#include "autograd/parameter.h"

#include <algorithm>

#include "runtime/error.h"

namespace detr {

Tensor rows_of(const Tensor& tensor, std::int64_t begin, std::int64_t end) {
  return tensor.rank() ? tensor.slice(begin, end) : tensor;
}

Parameter ParameterList::add(const std::string& name, const Shape& shape, Init init) {
  return add(name, shape, std::move(init), Parameter::Kind::parameter);
}

Parameter ParameterList::add_buffer(const std::string& name, const Shape& shape, Init init) {
  Parameter buffer = add(name, shape, std::move(init), Parameter::Kind::buffer);
  buffer.state().trainable = false;
  return buffer;
}

Parameter ParameterList::add(const std::string& name, const Shape& shape, Init init, Parameter::Kind kind) {
  DETR_CHECK(!contains(name), "parameter list: ", name, " is registered twice");
  auto state = std::make_shared<Parameter::State>();
  state->name = state->init_name = name;
  state->shape = shape;
  state->kind = kind;
  state->wide = kind == Parameter::Kind::buffer;
  state->init = std::move(init);
  state->index = static_cast<std::int64_t>(all_.size());
  return all_.emplace_back(std::move(state));
}

bool ParameterList::contains(const std::string& name) const {
  return std::any_of(all_.begin(), all_.end(), [&](const Parameter& p) { return p.name() == name; });
}

const Parameter& ParameterList::find(const std::string& name) const {
  const auto found = std::find_if(all_.begin(), all_.end(), [&](const Parameter& p) { return p.name() == name; });
  DETR_CHECK(found != all_.end(), "parameter list: no ", name);
  return *found;
}

}  // namespace detr

#include "runtime/tensor.h"

#include <cstring>

#include "runtime/allocator.h"
#include "runtime/error.h"

namespace detr {

Tensor::Tensor(std::shared_ptr<std::byte> memory, std::size_t offset_bytes, Shape shape, DType dtype, Device device)
    : memory_(std::move(memory)), offset_(offset_bytes), shape_(shape), dtype_(dtype), device_(device), defined_(true) {}

std::int64_t Tensor::rows() const {
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < rank(); ++i) rows *= dim(i);
  return rows;
}

Tensor Tensor::reshape(const Shape& shape) const {
  DETR_CHECK(shape.numel() == numel(), "reshape: ", *this, " to ", shape);
  Tensor result = *this;
  result.shape_ = shape;
  return result;
}

Tensor Tensor::slice(std::int64_t begin, std::int64_t end) const {
  DETR_CHECK(rank() >= 1 && 0 <= begin && begin <= end && end <= dim(0), "slice: [", begin, ", ", end, ") of ", *this);
  std::vector<std::int64_t> dims(shape_.dims().begin(), shape_.dims().end());
  const std::int64_t row = dims[0] ? numel() / dims[0] : 0;
  dims[0] = end - begin;
  return view(begin * row, Shape(dims));
}

Tensor Tensor::view(std::int64_t offset, const Shape& shape) const {
  DETR_CHECK(offset >= 0 && offset + shape.numel() <= numel(), "view: ", shape, " at ", offset, " of ", *this);
  Tensor result = *this;
  result.shape_ = shape;
  result.offset_ = offset_ + static_cast<std::size_t>(offset * size_of(dtype_));
  return result;
}

void Tensor::expect_dtype(DType wanted) const {
  DETR_CHECK(defined_, "tensor: undefined");
  DETR_CHECK(wanted == dtype_, "tensor: ", *this, " read as ", wanted);
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  if (!tensor.defined()) return out << "undefined";
  return out << tensor.dtype() << tensor.shape();
}

Tensor host_zeros(const Shape& shape, DType dtype) {
  static const std::shared_ptr<Allocator> allocator = Allocator::make(host_memory());
  const auto bytes = static_cast<std::size_t>(shape.numel() * size_of(dtype));
  Tensor result(allocator->allocate(bytes), 0, shape, dtype, Device::cpu());
  if (bytes) std::memset(result.raw(), 0, bytes);
  return result;
}

template <class T>
Tensor host_tensor(const Shape& shape, std::span<const T> values) {
  DETR_CHECK(static_cast<std::int64_t>(values.size()) == shape.numel(), "host_tensor: ", values.size(), " values for ", shape);
  Tensor result = host_zeros(shape, dtype_of<T>);
  if (!values.empty()) std::memcpy(result.raw(), values.data(), values.size_bytes());
  return result;
}
template Tensor host_tensor<float>(const Shape&, std::span<const float>);
template Tensor host_tensor<double>(const Shape&, std::span<const double>);
template Tensor host_tensor<std::int64_t>(const Shape&, std::span<const std::int64_t>);
template Tensor host_tensor<std::uint8_t>(const Shape&, std::span<const std::uint8_t>);

void expect_tensor(const Tensor& like, const char* what, const Tensor& tensor, const Shape& shape, DType dtype) {
  DETR_CHECK(tensor.defined() && tensor.shape() == shape && tensor.dtype() == dtype, what, " must be ", dtype, shape, ", got ", tensor);
  DETR_CHECK(tensor.device() == like.device(), what, " must be on ", like.device(), ", is on ", tensor.device());
}

void expect_tensor(const Tensor& like, const char* what, const Tensor* tensor, const Shape& shape, DType dtype) {
  if (tensor) expect_tensor(like, what, *tensor, shape, dtype);
}

void expect_wide(const Tensor& like, const char* what, const Tensor& tensor, const Shape& shape) {
  expect_tensor(like, what, tensor, shape, wide_dtype(like.dtype()));
}

void expect_wide(const Tensor& like, const char* what, const Tensor* tensor, const Shape& shape) {
  expect_tensor(like, what, tensor, shape, wide_dtype(like.dtype()));
}

void expect_like(const Tensor& like, const char* what, const Tensor& tensor, const Shape& shape) {
  expect_tensor(like, what, tensor, shape, like.dtype());
}

void expect_like(const Tensor& like, const char* what, const Tensor* tensor, const Shape& shape) {
  if (tensor) expect_like(like, what, *tensor, shape);
}

}  // namespace detr

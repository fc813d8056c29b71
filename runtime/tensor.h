#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <span>
#include <vector>

#include "runtime/device.h"
#include "runtime/dtype.h"
#include "runtime/shape.h"

namespace detr {

/// A cheap handle on shared memory: shape, dtype, device, offset. Always contiguous and row-major; copies share the memory.
/// A default-constructed Tensor is undefined: `defined()` is false and nothing else may be asked of it but shape and numel.
class Tensor {
 public:
  Tensor() = default;
  Tensor(std::shared_ptr<std::byte> memory, std::size_t offset_bytes, Shape shape, DType dtype, Device device);

  bool defined() const { return defined_; }
  const Shape& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  int rank() const { return shape_.rank(); }
  std::int64_t dim(int i) const { return shape_.dim(i); }
  std::int64_t numel() const { return shape_.numel(); }
  std::int64_t bytes() const { return numel() * size_of(dtype_); }
  /// Number of rows when all but the last dimension are flattened.
  std::int64_t rows() const;

  /// Pointer to the first element. Throws InvalidArgument if T is not the tensor's dtype.
  template <class T>
  T* data() const {
    expect_dtype(dtype_of<T>);
    return static_cast<T*>(raw());
  }
  /// All elements of a CPU tensor.
  template <class T>
  std::span<T> span() const {
    return {data<T>(), static_cast<std::size_t>(numel())};
  }
  void* raw() const { return memory_ ? memory_.get() + offset_ : nullptr; }

  /// The same memory in another shape of equal size.
  Tensor reshape(const Shape& shape) const;
  /// Elements [begin, end) of the first dimension; a view.
  Tensor slice(std::int64_t begin, std::int64_t end) const;
  /// A view of `shape` that starts `offset` elements into this tensor's memory.
  Tensor view(std::int64_t offset, const Shape& shape) const;

 private:
  void expect_dtype(DType wanted) const;

  std::shared_ptr<std::byte> memory_;
  std::size_t offset_ = 0;
  Shape shape_;
  DType dtype_ = DType::f32;
  Device device_;
  bool defined_ = false;
};

/// Prints f32(2, 3).
std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

/// A CPU tensor of its own with these values, row-major.
template <class T>
Tensor host_tensor(const Shape& shape, std::span<const T> values);
template <class T>
Tensor host_tensor(const Shape& shape, const std::vector<T>& values) {
  return host_tensor<T>(shape, std::span<const T>(values));
}
/// A CPU tensor of its own, all bytes zero.
Tensor host_zeros(const Shape& shape, DType dtype);

/// Throws InvalidArgument unless `tensor` is defined and has this shape, and the dtype and device of `like`.
/// A null pointer passes: a gradient nobody wants.
void expect_like(const Tensor& like, const char* what, const Tensor& tensor, const Shape& shape);
void expect_like(const Tensor& like, const char* what, const Tensor* tensor, const Shape& shape);
/// The same with a dtype of its own.
void expect_tensor(const Tensor& like, const char* what, const Tensor& tensor, const Shape& shape, DType dtype);
void expect_tensor(const Tensor& like, const char* what, const Tensor* tensor, const Shape& shape, DType dtype);
/// The same with the wide dtype of `like`: f32 where that is bf16.
void expect_wide(const Tensor& like, const char* what, const Tensor& tensor, const Shape& shape);
void expect_wide(const Tensor& like, const char* what, const Tensor* tensor, const Shape& shape);

}  // namespace detr

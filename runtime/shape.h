#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <span>

namespace detr {

/// Sizes of a contiguous, row-major tensor; at most six dimensions. A Shape of rank 0 has one element.
class Shape {
 public:
  static constexpr int kMaxRank = 6;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);
  explicit Shape(std::span<const std::int64_t> dims);

  int rank() const { return rank_; }
  /// Size of dimension i; negative i counts from the end. Throws InvalidArgument when out of range.
  std::int64_t dim(int i) const;
  std::int64_t operator[](int i) const { return dim(i); }
  /// Number of elements.
  std::int64_t numel() const;
  std::span<const std::int64_t> dims() const { return {dims_.data(), static_cast<std::size_t>(rank_)}; }

  friend bool operator==(const Shape& a, const Shape& b) { return a.rank_ == b.rank_ && a.dims_ == b.dims_; }

 private:
  std::array<std::int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

/// Prints (2, 3).
std::ostream& operator<<(std::ostream& out, const Shape& shape);

}  // namespace detr

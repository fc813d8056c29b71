#include "runtime/shape.h"

#include "runtime/error.h"

namespace detr {

Shape::Shape(std::initializer_list<std::int64_t> dims) : Shape(std::span<const std::int64_t>(dims.begin(), dims.size())) {}

Shape::Shape(std::span<const std::int64_t> dims) {
  DETR_CHECK(dims.size() <= kMaxRank, "shape: at most ", kMaxRank, " dimensions, got ", dims.size());
  for (const std::int64_t d : dims) {
    DETR_CHECK(d >= 0, "shape: a dimension must be >= 0, got ", d);
    dims_[static_cast<std::size_t>(rank_++)] = d;
  }
}

std::int64_t Shape::dim(int i) const {
  const int index = i < 0 ? i + rank_ : i;
  DETR_CHECK(index >= 0 && index < rank_, "shape: dimension ", i, " of ", *this);
  return dims_[static_cast<std::size_t>(index)];
}

std::int64_t Shape::numel() const {
  std::int64_t count = 1;
  for (const std::int64_t d : dims()) count *= d;
  return count;
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '(';
  for (int i = 0; i < shape.rank(); ++i) out << (i ? ", " : "") << shape[i];
  return out << ')';
}

}  // namespace detr

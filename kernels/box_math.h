#pragma once
#include <algorithm>
#include <array>
#include <cmath>

/// Marks what host and device code share.
#ifdef __CUDACC__
#define DETR_HOST_DEVICE __host__ __device__
#else
#define DETR_HOST_DEVICE
#endif

namespace detr::kernels {

/// A box (cx, cy, w, h) by its sides, with its area; a negative size counts as none.
template <class T>
struct BoxSides {
  T left, top, right, bottom;

  template <class U>
  DETR_HOST_DEVICE explicit BoxSides(const U* box)
      : left(T(box[0]) - T(0.5) * T(box[2])),
        top(T(box[1]) - T(0.5) * T(box[3])),
        right(T(box[0]) + T(0.5) * T(box[2])),
        bottom(T(box[1]) + T(0.5) * T(box[3])) {}

  DETR_HOST_DEVICE T width() const { return std::max(right - left, T(0)); }
  DETR_HOST_DEVICE T height() const { return std::max(bottom - top, T(0)); }
  DETR_HOST_DEVICE T area() const { return width() * height(); }
};

/// Areas up to this count as zero: in f32 the quotients of the gradient would overflow.
inline constexpr double kNoArea = 1e-30;

/// How two boxes lie to each other, and its gradient. Rezatofighi et al. 2019, arXiv:1902.09630, algorithm 1.
template <class T>
class BoxOverlap {
 public:
  /// a, b point to (cx, cy, w, h) of any floating type; the arithmetic is in T.
  template <class U>
  DETR_HOST_DEVICE BoxOverlap(const U* a, const U* b)
      : a_(a),
        b_(b),
        width_(std::min(a_.right, b_.right) - std::max(a_.left, b_.left)),
        height_(std::min(a_.bottom, b_.bottom) - std::max(a_.top, b_.top)),
        hull_width_(std::max(a_.right, b_.right) - std::min(a_.left, b_.left)),
        hull_height_(std::max(a_.bottom, b_.bottom) - std::min(a_.top, b_.top)) {
    const T intersection = std::max(width_, T(0)) * std::max(height_, T(0));
    union_ = a_.area() + b_.area() - intersection;
    hull_ = std::max(hull_width_, T(0)) * std::max(hull_height_, T(0));
    // Compared this way round, NaN is not taken for no area and shows in the result.
    iou_ = union_ <= T(kNoArea) ? T(0) : intersection / union_;
    giou_ = hull_ <= T(kNoArea) ? iou_ : iou_ - (hull_ - union_) / hull_;
  }

  /// Intersection over union, 0 if the union has no area.
  DETR_HOST_DEVICE T iou() const { return iou_; }
  /// IoU minus the part of the enclosing box that is outside the union; IoU if the enclosing box has no area.
  DETR_HOST_DEVICE T giou() const { return giou_; }

  /// d giou / d (cx, cy, w, h) of a. Equal sides share the gradient of their max or min half and half; a size or an
  /// intersection of exactly 0 still passes it.
  DETR_HOST_DEVICE std::array<T, 4> giou_gradient() const {
    // giou = I / U + U / E - 1 with U = area(a) + area(b) - I, intersection I and enclosing area E
    const T by_iou = union_ <= T(kNoArea) ? T(0) : 1 / union_;
    const T by_hull = hull_ <= T(kNoArea) ? T(0) : 1 / hull_;
    const T d_intersection = (1 + iou_) * by_iou - by_hull;
    const T d_area = by_hull - iou_ * by_iou;
    const T d_hull = -union_ * by_hull * by_hull;

    const T d_width = width_ >= 0 ? d_intersection * std::max(height_, T(0)) : T(0);
    const T d_height = height_ >= 0 ? d_intersection * std::max(width_, T(0)) : T(0);
    const T d_hull_width = hull_width_ >= 0 ? d_hull * std::max(hull_height_, T(0)) : T(0);
    const T d_hull_height = hull_height_ >= 0 ? d_hull * std::max(hull_width_, T(0)) : T(0);
    const T d_own_width = a_.right >= a_.left ? d_area * a_.height() : T(0);
    const T d_own_height = a_.bottom >= a_.top ? d_area * a_.width() : T(0);

    const T d_right = share(a_.right < b_.right, a_.right == b_.right) * d_width +
                      share(a_.right > b_.right, a_.right == b_.right) * d_hull_width + d_own_width;
    const T d_left = -share(a_.left > b_.left, a_.left == b_.left) * d_width -
                     share(a_.left < b_.left, a_.left == b_.left) * d_hull_width - d_own_width;
    const T d_bottom = share(a_.bottom < b_.bottom, a_.bottom == b_.bottom) * d_height +
                       share(a_.bottom > b_.bottom, a_.bottom == b_.bottom) * d_hull_height + d_own_height;
    const T d_top = -share(a_.top > b_.top, a_.top == b_.top) * d_height -
                    share(a_.top < b_.top, a_.top == b_.top) * d_hull_height - d_own_height;
    return {d_left + d_right, d_top + d_bottom, T(0.5) * (d_right - d_left), T(0.5) * (d_bottom - d_top)};
  }

 private:
  /// Part of the gradient that the first operand of a max or min gets.
  DETR_HOST_DEVICE static T share(bool chosen, bool tie) { return tie ? T(0.5) : chosen ? T(1) : T(0); }

  BoxSides<T> a_, b_;
  T width_, height_;             // of the intersection, negative where the boxes are apart
  T hull_width_, hull_height_;   // of the enclosing box
  T union_, hull_, iou_, giou_;
};

/// sum |a - b| over (cx, cy, w, h).
template <class T, class U>
DETR_HOST_DEVICE T box_distance(const U* a, const U* b) {
  T sum = 0;
  for (int i = 0; i < 4; ++i) sum += std::abs(T(a[i]) - T(b[i]));
  return sum;
}

}  // namespace detr::kernels

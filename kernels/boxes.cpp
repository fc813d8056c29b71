#include "kernels/boxes.h"

#include "kernels/dispatch.h"
#include "runtime/error.h"

namespace detr::kernels {

void refine_boxes_forward(const Stream& stream, const Tensor& delta, const Tensor& reference, Tensor& box) {
  DETR_CHECK(delta.rank() >= 1 && delta.dim(-1) == 4, "refine_boxes: delta must be (..., 4), got ", delta);
  expect_like(delta, "refine_boxes: reference", reference, delta.shape());
  expect_like(delta, "refine_boxes: box", box, delta.shape());
  DETR_DISPATCH(delta.device(), refine_boxes_forward, stream, delta, reference, box);
}

void refine_boxes_backward(const Stream& stream, const Tensor& dbox, const Tensor& box, const Tensor& reference, Tensor* ddelta,
                           Tensor* dreference) {
  DETR_CHECK(box.rank() >= 1 && box.dim(-1) == 4, "refine_boxes: box must be (..., 4), got ", box);
  expect_like(box, "refine_boxes: dbox", dbox, box.shape());
  expect_like(box, "refine_boxes: reference", reference, box.shape());
  expect_like(box, "refine_boxes: ddelta", ddelta, box.shape());
  expect_like(box, "refine_boxes: dreference", dreference, box.shape());
  DETR_DISPATCH(box.device(), refine_boxes_backward, stream, dbox, box, reference, ddelta, dreference);
}

}  // namespace detr::kernels

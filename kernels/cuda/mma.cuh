#pragma once

namespace detr::kernels::cuda {

/// c (16, 8) += a (16, 16) b (16, 8) by a warp, in bf16 with sums in f32. A thread has rows lane / 4 and lane / 4 + 8 of a and c, and of each 8 columns
/// 2 (lane % 4) and the one after; of b column lane / 4, and of each 8 rows those two.
__device__ inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace detr::kernels::cuda

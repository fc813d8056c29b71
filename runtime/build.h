#pragma once

namespace detr {

/// Whether this build has CUDA code. In `if constexpr`, so that a discarded call needs no definition.
inline constexpr bool kHasCuda = DETR_HAS_CUDA != 0;

}  // namespace detr

#pragma once

namespace detr::dist {

/// Whether this build has the engines. In `if constexpr`, so that a discarded call needs no definition.
inline constexpr bool kHasGloo = DETR_HAS_GLOO != 0;
inline constexpr bool kHasNccl = DETR_HAS_NCCL != 0;

}  // namespace detr::dist

#pragma once
#include <string>

namespace detr {

/// Whether this build has CUDA code. In `if constexpr`, so that a discarded call needs no definition.
inline constexpr bool kHasCuda = DETR_HAS_CUDA != 0;

/// What the linker has derived from the content of this program's file, in hexadecimal digits: another text for another program. Empty if the
/// linker was told to leave it out.
std::string build_id();

}  // namespace detr

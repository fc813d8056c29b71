#include "runtime/gpus.h"

namespace detr {
namespace {

#ifdef DETR_HAS_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

}  // namespace

std::vector<Gpu> list_gpus() {
  // A discarded branch needs no definition, so a build without CUDA links without one.
  if constexpr (kHasCuda) return cuda::list_gpus();
  else return {};
}

}  // namespace detr

#include "runtime/gpus.h"

#include "runtime/build.h"

namespace detr {

std::vector<Gpu> list_gpus() {
  if constexpr (kHasCuda) return cuda::list_gpus();
  else return {};
}

}  // namespace detr

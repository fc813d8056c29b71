#include "runtime/gpus.h"

#include "runtime/build.h"
#include "runtime/error.h"

namespace detr {

std::vector<Gpu> list_gpus() {
  if constexpr (kHasCuda) return cuda::list_gpus();
  else return {};
}

GpuMemory memory_info(Device device) {
  DETR_CHECK(!device.is_cpu(), "memory_info: wanted a GPU, got ", device);
  if constexpr (kHasCuda) return cuda::memory_info(device.index);
  else throw DeviceError(device, ": this build has no CUDA code");
}

}  // namespace detr

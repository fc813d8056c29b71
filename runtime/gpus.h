#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/device.h"

namespace detr {

/// A graphics processor of this machine.
struct Gpu {
  std::string name;
  std::int64_t memory_bytes = 0;
  int compute_major = 0, compute_minor = 0;   ///< compute capability, such as 9.0
};

/// The GPUs that this process may use; none without a driver, without a device, or in a build without CUDA.
/// Throws DeviceError where the driver is there but fails.
std::vector<Gpu> list_gpus();

/// Memory of a GPU at this moment, in bytes.
struct GpuMemory {
  std::int64_t free_bytes = 0, total_bytes = 0;
};
/// Throws InvalidArgument for the CPU, DeviceError where the build has no CUDA code or the driver fails.
GpuMemory memory_info(Device device);

namespace cuda {
std::vector<Gpu> list_gpus();
GpuMemory memory_info(int index);
}  // namespace cuda

}  // namespace detr

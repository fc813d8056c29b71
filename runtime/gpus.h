#pragma once
#include <cstdint>
#include <string>
#include <vector>

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

namespace cuda {
std::vector<Gpu> list_gpus();
}  // namespace cuda

}  // namespace detr

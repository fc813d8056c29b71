#pragma once
#include <cstdint>
#include <string>

namespace detr::bench {

/// What figures depend on beside the code.
struct Machine {
  std::string device, bus_id, cuda, cudnn;   ///< the GPU's name and PCI address; versions of the libraries
  std::int64_t l2_bytes = 0;
};
/// Throws DeviceError where there is no such GPU.
Machine describe_gpu(int index);

/// What the driver's own tool says of a GPU. Fields it does not tell are "unknown".
struct Clocks {
  std::string driver = "unknown", sm_clock_mhz = "unknown", power_cap_w = "unknown", throttled = "unknown";   ///< throttled: "no", or why
};
Clocks read_clocks(const std::string& bus_id);

/// The reasons in a mask of clock event reasons that slow a busy GPU down; "no" where there is none. Idleness and clocks that somebody set do not count.
std::string throttle_text(std::uint64_t reasons);

}  // namespace detr::bench

#pragma once
#include <ostream>

namespace detr {

/// Where memory lies and code runs.
struct Device {
  enum class Kind { cpu, cuda };
  Kind kind = Kind::cpu;
  int index = 0;

  static Device cpu() { return {}; }
  static Device cuda(int index) { return {Kind::cuda, index}; }
  bool is_cpu() const { return kind == Kind::cpu; }
  friend bool operator==(const Device&, const Device&) = default;
};

inline std::ostream& operator<<(std::ostream& out, const Device& device) {
  return device.is_cpu() ? out << "cpu" : out << "cuda:" << device.index;
}

}  // namespace detr

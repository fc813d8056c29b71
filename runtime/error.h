#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace detr {

/// All parts written one after the other with operator<<.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// Base of everything this project throws. The text says what, where and what to do, in one line.
class Error : public std::runtime_error {
 public:
  template <class... Parts>
  explicit Error(const Parts&... parts) : std::runtime_error(concat(parts...)) {}
};

/// A broken contract of a function in this library; names op, argument, wanted and got.
class InvalidArgument : public Error { using Error::Error; };
/// A flag or configuration key; names the nearest known one.
class ConfigError : public Error { using Error::Error; };
/// A data set, annotation or image; names file and id.
class DataError : public Error { using Error::Error; };
/// A checkpoint or weights file: missing, corrupt, unfit or not written; names path and reason.
class StorageError : public Error { using Error::Error; };
/// No usable device or library, or a failed call into one.
class DeviceError : public Error { using Error::Error; };
/// Memory that could not be had; names bytes asked, in use and cached.
class OutOfMemory : public Error { using Error::Error; };
/// A peer lost, late or in disagreement; names rank, step and phase.
class CommError : public Error { using Error::Error; };
/// Training that cannot go on; names step, tensor and image ids.
class Diverged : public Error { using Error::Error; };
/// A check that was asked for did not hold.
class CheckFailed : public Error { using Error::Error; };

}  // namespace detr

/// For the caller's mistakes: throws InvalidArgument with the parts as text.
#define DETR_CHECK(condition, ...)                                     \
  do {                                                                 \
    if (!(condition)) throw ::detr::InvalidArgument(__VA_ARGS__);      \
  } while (false)

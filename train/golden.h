#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/stream.h"

namespace detr::train {

/// Largest relative error of one kind of value in a recorded case, and where it is.
struct GoldenError {
  std::string kind;      ///< losses, outputs, features, gradients, statistics, weights, ema, ...
  double error = 0;      ///< relative to the largest value of the tensor it is in
  std::string tensor;    ///< the worst one
};

/// One recorded case compared with what this build computes.
struct GoldenReport {
  std::string name;
  std::vector<GoldenError> errors;
  std::vector<std::string> faults;   ///< what is not a matter of precision: a missing tensor, another matching, an unknown option
  double seconds = 0;

  double largest() const;
  bool passed(double tolerance) const { return faults.empty() && largest() <= tolerance; }
};

/// Runs a file of recorded values (train_*, eval_* or optim_*) in f32 or f64. In f32 the file's top-k indices are imposed where it
/// has them, since rounding may swap near ties. Throws DataError if the file is not such a case.
GoldenReport run_golden(const std::filesystem::path& file, DType dtype, const Stream& stream);

/// The recorded cases of a folder, by name. Throws DataError if there are none.
std::vector<std::filesystem::path> golden_files(const std::filesystem::path& folder);

}  // namespace detr::train

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

/// Runs a file of recorded values (train_*, eval_* or optim_*) in f32 or f64. A train_* file lists all gradients unless it says
/// "partial": true.
///
/// In f32 the file's top-k indices are imposed where it has them, since rounding may swap near ties, and a training case is checked in
/// two parts: the f32 forward against the file (losses, outputs, features, statistics) and, tensor by tensor, against our f64 forward
/// ("intermediates"); then the f32 backward, started from the f64 forward's values, against the file's gradients. A gradient of an
/// unaided f32 step is no measure: a sign before a ReLU or a sampled cell that flips in the last bit moves some gradients by several
/// percent of their largest value, in the reference as well. Throws DataError if the file is not such a case.
GoldenReport run_golden(const std::filesystem::path& file, DType dtype, const Stream& stream);

/// The recorded cases of a folder, by name. Throws DataError if there are none.
std::vector<std::filesystem::path> golden_files(const std::filesystem::path& folder);

}  // namespace detr::train

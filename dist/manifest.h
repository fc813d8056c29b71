#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dist/layout.h"
#include "dist/control.h"

namespace detr::dist {

/// All that ranks must agree on before they exchange a gradient, as an ordered list of named values. Ranks with equal manifests run the
/// same collectives with the same lengths; nobody else would notice a difference (an engine moves bytes).
class Manifest {
 public:
  /// A setting such as ("seed", "7"). Control characters are escaped.
  void add(std::string_view name, std::string_view value);
  /// The dtype, every parameter with its shape, and every bucket with its range.
  void add(const Layout& layout);

  const std::vector<std::pair<std::string, std::string>>& entries() const { return entries_; }
  /// The same for equal manifests, and different for different ones.
  std::string bytes() const;
  /// The inverse. Throws CommError for what bytes() does not make.
  static Manifest parse(std::string_view bytes);

 private:
  std::vector<std::pair<std::string, std::string>> entries_;
};

/// The first difference, such as "rank 2: parameter 117 neck.weight is (256, 1, 1, 384), rank 0 has (256, 1, 1, 256)"; empty if there is none.
std::string first_difference(const Manifest& manifest, int rank, const Manifest& reference, int reference_rank);

/// Throws CommError, the same text on every rank, with the first difference of the lowest rank that differs from rank 0. A collective.
void expect_equal_manifests(Control& control, const Manifest& manifest, Clock::time_point deadline);

}  // namespace detr::dist

#pragma once
#include <string>
#include <vector>

namespace detr::bench {

/// Two runs, case by case.
struct Comparison {
  std::vector<std::string> lines;   ///< for people
  int compared = 0;
  int slower = 0;                   ///< median more than 3 % above the old one
  int wrong = 0;                    ///< cases of the new run whose check failed

  bool passed() const { return slower == 0 && wrong == 0; }
};

/// `older` and `newer` are files' contents as `detr_bench --json` writes them: one JSON object in each line. A case that only one has is told and does not
/// count. Throws DataError where a line is no such object, or the two have no case in common.
Comparison compare_runs(const std::string& older, const std::string& newer);

}  // namespace detr::bench

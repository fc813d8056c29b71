#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace detr::train {

/// Columns of numbers read back from the metric files of a run. A cell that is empty or no number is NaN.
struct MetricTable {
  std::vector<std::string> names;
  std::vector<std::vector<double>> columns;   ///< one per name, all of one length

  std::size_t rows() const { return columns.empty() ? 0 : columns[0].size(); }
  bool has(const std::string& name) const;
  /// The column of that name; all NaN where there is none.
  std::vector<double> column(const std::string& name) const;
};

/// Reads metrics.csv or steps.csv: a header, then rows. A row with another number of cells than the header (a line that was being
/// written when the process died) is left out; a missing file is an empty table. Never throws for the content.
MetricTable read_metric_csv(const std::filesystem::path& file);

/// Reads log.txt: the numbers of each line's object by key, in order of first appearance. Lines that are no object are left out.
MetricTable read_metric_json_lines(const std::filesystem::path& file);

}  // namespace detr::train

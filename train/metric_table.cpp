#include "train/metric_table.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

namespace detr::train {
namespace {

constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();

std::vector<std::string_view> cells_of(std::string_view line) {
  std::vector<std::string_view> cells;
  for (std::size_t at = 0;;) {
    const std::size_t comma = line.find(',', at);
    cells.push_back(line.substr(at, comma - at));
    if (comma == std::string_view::npos) return cells;
    at = comma + 1;
  }
}

double number_of(std::string_view cell) {
  double value = kMissing;
  const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), value);
  return error == std::errc() && end == cell.data() + cell.size() ? value : kMissing;
}

}  // namespace

bool MetricTable::has(const std::string& name) const { return std::find(names.begin(), names.end(), name) != names.end(); }

std::vector<double> MetricTable::column(const std::string& name) const {
  const auto found = std::find(names.begin(), names.end(), name);
  return found == names.end() ? std::vector<double>(rows(), kMissing) : columns[static_cast<std::size_t>(found - names.begin())];
}

MetricTable read_metric_csv(const std::filesystem::path& file) {
  MetricTable table;
  std::ifstream in(file);
  std::string line;
  if (!std::getline(in, line)) return table;
  for (const std::string_view name : cells_of(line)) table.names.emplace_back(name);
  table.columns.resize(table.names.size());
  while (std::getline(in, line)) {
    const std::vector<std::string_view> cells = cells_of(line);
    if (cells.size() != table.names.size()) continue;
    for (std::size_t c = 0; c < cells.size(); ++c) table.columns[c].push_back(number_of(cells[c]));
  }
  return table;
}

MetricTable read_metric_json_lines(const std::filesystem::path& file) {
  MetricTable table;
  std::ifstream in(file);
  std::string line;
  std::size_t rows = 0;
  while (std::getline(in, line)) {
    const nlohmann::ordered_json object = nlohmann::ordered_json::parse(line, nullptr, false);
    if (!object.is_object()) continue;
    for (std::vector<double>& column : table.columns) column.push_back(kMissing);
    for (const auto& [key, value] : object.items()) {
      if (!value.is_number()) continue;
      std::size_t at = static_cast<std::size_t>(std::find(table.names.begin(), table.names.end(), key) - table.names.begin());
      if (at == table.names.size()) {
        table.names.push_back(key);
        table.columns.emplace_back(rows + 1, kMissing);
      }
      table.columns[at][rows] = value.get<double>();
    }
    ++rows;
  }
  return table;
}

}  // namespace detr::train

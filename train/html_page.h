#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "train/html_report.h"
#include "train/html_text.h"
#include "train/svg_chart.h"

namespace detr::train {

/// A chart with what stands around it.
struct Figure {
  std::string title, about;            ///< caption: a name, then what is shown; not yet escaped
  std::string legend, chart, table;    ///< HTML; the table has the numbers and is folded under the chart
  std::string style;                   ///< CSS classes of the figure
};

/// The body of a report in the making; numbers the figures.
class HtmlPage {
 public:
  /// Begins a section, ending the one before. `about` is one sentence or empty.
  void section(std::string_view title, std::string_view about = "");
  void figure(const Figure& figure);
  /// Begins and ends a group of figures in two columns.
  void begin_figures();
  void end_figures();
  /// HTML as it is.
  void add(const std::string& html) { html_ += html; }
  std::size_t size() const { return html_.size(); }
  /// The page's body; ends the last section.
  std::string finish();

 private:
  std::string html_;
  int figures_ = 0;
  bool in_section_ = false;
};

constexpr std::size_t kMaxListedClasses = 1000;   ///< rows of a table of classes

/// NaN for the COCO API's "there is no true box of that kind", which is -1.
double defined(double ap);

/// Sections "AP per class", "Precision and recall" and "Confusion" of the last evaluation.
void add_evaluation(HtmlPage& page, const ReportData& data);
/// Section "Data set".
void add_data_set(HtmlPage& page, const ReportData& data);

}  // namespace detr::train

#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace detr::data {

/// One entry of `categories`. The dense label of a category is its rank by id, so names and ids go out as they came in.
struct Category {
  std::int64_t id = 0;
  std::string name;
};

/// One entry of `annotations`. `box_xywh` is as written (pixels of the shown picture, x and y of the top left corner); the
/// metric uses it. `box_xyxy` is what training uses: clipped to the picture, kept only where `trainable`.
struct Annotation {
  std::int64_t id = 0;
  std::int64_t image = 0;      ///< index into CocoData::images
  std::int64_t label = 0;      ///< index into CocoData::categories
  std::array<double, 4> box_xywh{};
  std::array<double, 4> box_xyxy{};
  double area = 0;             ///< as written; width x height where the key is absent
  bool crowd = false;
  bool trainable = false;      ///< not a crowd, and width and height are left after clipping
};

/// One entry of `images`.
struct ImageRecord {
  std::int64_t id = 0;
  std::string file_name;       ///< relative to the image folder
  std::int64_t width = 0, height = 0;   ///< of the json; 0 where absent or a placeholder
  std::int64_t first = 0, count = 0;    ///< its annotations: CocoData::annotations[first, first + count)
};

/// One annotation file in memory: categories and images in ascending id, annotations grouped by image in that order, in
/// file order within an image.
struct CocoData {
  std::filesystem::path file;
  std::vector<Category> categories;
  std::vector<ImageRecord> images;
  std::vector<Annotation> annotations;
};

/// Something that was noticed about a data set: one kind, how often, and the first few places. A note needs no action, a
/// warning changes what is trained on, an error makes the data set unusable.
struct Finding {
  enum class Severity { note, warning, error };
  std::string kind;                 ///< stable identifier, such as "box-zero-area"
  Severity severity = Severity::warning;
  std::int64_t count = 0;
  std::vector<std::string> items;   ///< at most `max_items` places, such as "annotation 17 (image 3): width 0"
};

/// "note", "warning" or "error".
const char* name_of(Finding::Severity severity);

/// Findings by kind, in order of first appearance. Items hold no line breaks and no unescaped text of the data set.
class Findings {
 public:
  explicit Findings(std::size_t max_items = 10) : max_items_(max_items) {}
  void add(const std::string& kind, Finding::Severity severity, const std::string& item);
  /// Adds all of `other`, each item with `prefix` in front; a kind takes the higher of two severities.
  void merge(const Findings& other, const std::string& prefix = "");
  const std::vector<Finding>& all() const { return findings_; }
  bool has(Finding::Severity at_least) const;
  /// The finding of that kind, or null. Valid until the next `add` or `merge`.
  const Finding* find(const std::string& kind) const;
  /// How often that kind was seen.
  std::int64_t count(const std::string& kind) const;
  std::size_t max_items() const { return max_items_; }

 private:
  std::size_t max_items_;
  std::vector<Finding> findings_;
};

/// Reads a COCO annotation file. What drops or changes something goes to `findings` (a box without area, a box clipped, an
/// annotation of an unknown image); what makes the file unusable throws DataError with the file, the first records and what
/// to do, after all of it was read. Boxes that are not finite are dropped. Missing or null `area` is width x height, missing
/// `iscrowd` is 0, everything else is optional; ids are 64-bit integers, sparse, in any order. A key that we read and that
/// occurs twice in one object is an error, since readers disagree about which one counts. An annotation without id gets its
/// place in the list, from 1. The json's sizes are not checked against the pictures here (`prepare_for_training` does that): where
/// they are absent, boxes are not clipped yet.
CocoData read_coco(const std::filesystem::path& file, Findings& findings);

/// `read_coco` for a report: faults of records are findings of severity error and the record is left out. Throws DataError
/// only where the file as a whole cannot be read. With `report_all` false, boxes that do not fit the json's size are
/// clipped without a finding, for a caller who knows the real size (`set_image_size`).
CocoData inspect_coco(const std::filesystem::path& file, Findings& findings, bool report_all = true);

/// Throws DataError where `findings` has an error: file, kind, count, first places and what to do, in one line.
void refuse_errors(const std::filesystem::path& file, const Findings& findings, const std::string& classes = "");

/// "1 RBC, 2 WBC, 3 Platelets": ids and names for a message, the first `max` of them.
std::string class_list(const std::vector<Category>& categories, std::size_t max = 12);

/// Gives an image the size that it has when shown and clips its boxes again. A box that fits worse than before is a finding.
/// `image` is an index into `data.images`; width and height are >= 1 pixels.
void set_image_size(CocoData& data, std::int64_t image, std::int64_t width, std::int64_t height, Findings& findings);

/// The same data set with the images of these indices alone, in the order of the indices, which ascend.
CocoData select_images(const CocoData& data, const std::vector<std::int64_t>& images);

}  // namespace detr::data

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

/// Something that was noticed about a data set: one kind, how often, and the first few places.
struct Finding {
  enum class Severity { note, warning, error };
  std::string kind;                 ///< stable identifier, such as "box-zero-area"
  Severity severity = Severity::warning;
  std::int64_t count = 0;
  std::vector<std::string> items;   ///< at most `max_items` places, such as "annotation 17 (image 3): width 0"
};

/// Findings by kind, in order of first appearance.
class Findings {
 public:
  explicit Findings(std::size_t max_items = 10) : max_items_(max_items) {}
  void add(const std::string& kind, Finding::Severity severity, const std::string& item);
  const std::vector<Finding>& all() const { return findings_; }
  bool has(Finding::Severity at_least) const;
  const Finding* find(const std::string& kind) const;

 private:
  std::size_t max_items_;
  std::vector<Finding> findings_;
};

/// Reads a COCO annotation file. Faults that drop or change something (a box without area, a box clipped) go to `findings`;
/// faults that make the file unusable throw DataError with file and record. Missing `area` is width x height, missing
/// `iscrowd` is 0; ids are 64-bit integers, sparse, in any order. The json's sizes are not checked against the pictures here.
CocoData read_coco(const std::filesystem::path& file, Findings& findings);

}  // namespace detr::data

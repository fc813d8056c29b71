#include "data/coco_results.h"

#include <charconv>
#include <cmath>

#include "data/json_reader.h"
#include "data/text.h"
#include "runtime/error.h"
#include "runtime/files.h"

namespace detr::data {
namespace {

/// Reads records one by one and knows which one it is at, for messages.
class ResultsReader {
 public:
  explicit ResultsReader(const std::filesystem::path& file) : file_(file), json_(file) {}

  std::vector<Detection> read() {
    if (json_.peek() != JsonKind::array)
      throw DataError(printable(file_), ": not a list of results; wanted [{\"image_id\":, \"category_id\":, \"bbox\":, \"score\":}, ...]");
    json_.begin_array();
    while (json_.next_element()) detections_.push_back(record());
    json_.finish();
    return std::move(detections_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw DataError(printable(file_), ": record ", detections_.size(), ": ", what);
  }

  Detection record() {
    if (json_.peek() != JsonKind::object) refuse("not an object");
    Detection detection;
    bool image = false, category = false, box = false, score = false;
    json_.begin_object();
    while (json_.next_key(key_)) {
      if (key_ == "image_id") {
        detection.image_id = id("image_id");
        image = true;
      } else if (key_ == "category_id") {
        detection.category_id = id("category_id");
        category = true;
      } else if (key_ == "bbox") {
        detection.box_xywh = bbox();
        box = true;
      } else if (key_ == "score") {
        detection.score = number("score");
        score = true;
      } else {
        json_.skip();
      }
    }
    if (!image) refuse("no image_id");
    if (!category) refuse("no category_id");
    if (!box) refuse("no bbox");
    if (!score) refuse("no score");
    return detection;
  }

  std::int64_t id(const char* name) {
    if (json_.peek() != JsonKind::number) refuse(concat(name, " is not a number"));
    const JsonNumber number = json_.read_number();
    if (number.fits) return number.integer;
    // numpy writes whole numbers as 7.0, which is the id 7 as long as a double can tell it from the next
    if (number.whole || !(std::abs(number.value) <= 0x1p53) || number.value != std::floor(number.value))
      refuse(concat(name, " is not a 64-bit integer"));
    return static_cast<std::int64_t>(number.value);
  }

  double number(const char* name) {
    if (json_.peek() != JsonKind::number) refuse(concat(name, " is not a number"));
    const double value = json_.read_number().value;
    if (!std::isfinite(value)) refuse(concat(name, " is not finite"));
    return value;
  }

  std::array<double, 4> bbox() {
    if (json_.peek() != JsonKind::array) refuse("bbox is not a list");
    std::array<double, 4> box{};
    std::size_t count = 0;
    json_.begin_array();
    while (json_.next_element()) {
      const double value = number("a value of bbox");
      if (count < box.size()) box[count] = value;
      ++count;
    }
    if (count != box.size()) refuse(concat("bbox has ", count, " numbers, wanted x, y, width and height"));
    return box;
  }

  const std::filesystem::path& file_;
  JsonReader json_;
  std::string key_;
  std::vector<Detection> detections_;
};

/// Shortest text that reads back as the same double, -0 included.
void append(std::string& text, double value, std::size_t record) {
  if (!std::isfinite(value)) throw DataError("detection ", record, ": score or box is not a finite number");
  std::array<char, 32> digits{};
  text.append(digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr);
}

void write_records(int descriptor, const std::filesystem::path& file, std::span<const Detection> detections, const std::map<std::int64_t, std::string>* file_names) {
  constexpr std::size_t kFlushBytes = 1 << 20;
  std::string text = "[";
  const auto flush = [&] {
    write_all(descriptor, std::as_bytes(std::span(text.data(), text.size())), file);
    text.clear();
  };
  for (std::size_t i = 0; i < detections.size(); ++i) {
    const Detection& d = detections[i];
    text += i ? ",\n" : "\n";
    text += "{\"image_id\":" + std::to_string(d.image_id) + ",\"category_id\":" + std::to_string(d.category_id) + ",\"bbox\":[";
    for (std::size_t k = 0; k < d.box_xywh.size(); ++k) {
      if (k) text += ',';
      append(text, d.box_xywh[k], i);
    }
    text += "],\"score\":";
    append(text, d.score, i);
    if (file_names) {
      const auto name = file_names->find(d.image_id);
      if (name != file_names->end()) text += ",\"file_name\":" + json_quoted(name->second);
    }
    text += '}';
    if (text.size() >= kFlushBytes) flush();
  }
  text += detections.empty() ? "]\n" : "\n]\n";
  flush();
}

}  // namespace

std::vector<Detection> read_detections(const std::filesystem::path& file) { return ResultsReader(file).read(); }

void write_detections(const std::filesystem::path& file, std::span<const Detection> detections,
                      const std::map<std::int64_t, std::string>* file_names) {
  replace_file(file, 0, {}, [&](int descriptor) { write_records(descriptor, file, detections, file_names); });
}

}  // namespace detr::data

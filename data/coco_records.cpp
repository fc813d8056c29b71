#include "data/coco_records.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <span>

#include "data/json_reader.h"
#include "data/text.h"
#include "runtime/error.h"

namespace detr::data {
namespace {

using Severity = Finding::Severity;

constexpr std::int64_t kMaxSide = std::numeric_limits<std::int32_t>::max();

/// The value of one key: a scalar, or a list of numbers; of other containers only the kind.
struct Field {
  explicit Field(const char* key) : name(key) {}

  const char* name;
  bool present = false;
  JsonKind kind = JsonKind::null;
  JsonNumber number;
  bool boolean = false;
  std::string text;
  std::array<double, 4> numbers{};   ///< the first four of a list
  std::int64_t elements = 0;         ///< of a list
  std::string stranger;              ///< a list's first element that is no number, described
};

std::string describe(const Field& field) {
  if (!field.present) return "absent";
  switch (field.kind) {
    case JsonKind::null: return "null";
    case JsonKind::boolean: return field.boolean ? "true" : "false";
    case JsonKind::number: return field.number.fits ? std::to_string(field.number.integer) : number_text(field.number.value);
    case JsonKind::string: return "the text \"" + printable(field.text) + '"';
    case JsonKind::array: return "a list";
    case JsonKind::object: return "an object";
  }
  return "";
}

const char* kind_name(JsonKind kind) {
  constexpr std::array<const char*, 6> names = {"null", "true or false", "a number", "a text", "a list", "an object"};
  return names[static_cast<std::size_t>(kind)];
}

template <class T>
bool parse(const std::string& text, T& value) {
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  return result.ec == std::errc() && result.ptr == end;
}

/// A side of a picture: > 0 where usable, 0 for a placeholder (0 or negative), -1 for anything else.
std::int64_t picture_side(const Field& field) {
  if (field.kind != JsonKind::number || !std::isfinite(field.number.value)) return -1;
  const double value = field.number.value;
  if (value <= 0) return 0;
  return value <= static_cast<double>(kMaxSide) && value == std::floor(value) ? static_cast<std::int64_t>(value) : -1;
}

class RecordReader {
 public:
  RecordReader(const std::filesystem::path& file, ReadMode mode, Findings& findings)
      : file_(printable(file)), json_(file), repair_(mode == ReadMode::repair), findings_(findings) {}

  RawCoco read();

 private:
  using Where = std::function<std::string()>;

  /// Reads a list by calling `record` with the place of each object; returns its length.
  std::int64_t list(const char* key, bool& seen, const std::function<void(std::int64_t)>& record);
  void image(std::int64_t place);
  void category(std::int64_t place);
  void annotation(std::int64_t place);

  bool read_fields(std::span<Field> fields, const Where& where, std::string& extra);
  void read_value(Field& field);
  bool read_id(const Field& field, const Where& where, std::int64_t& id);
  bool read_box(const Field& field, const Where& where, std::array<double, 4>& box);
  bool read_crowd(const Field& field, const Where& where, bool& crowd);
  void read_size(const Field& width, const Field& height, RawImage& image);
  /// A fault that a repair gets rid of: a warning then, else an error.
  void fault(const char* kind, const std::string& item) {
    findings_.add(kind, repair_ ? Severity::warning : Severity::error, item);
  }

  std::string file_;
  JsonReader json_;
  bool repair_;
  Findings& findings_;
  RawCoco out_;
};

RawCoco RecordReader::read() {
  if (json_.peek() == JsonKind::array)
    throw DataError(file_, ": the top level is a list, as in a file of results; an annotation file is an object with images, "
                    "annotations and categories");
  if (json_.peek() != JsonKind::object)
    throw DataError(file_, ": the top level is ", kind_name(json_.peek()), "; an annotation file is an object");
  bool has_images = false, has_annotations = false;
  std::string key;
  json_.begin_object();
  while (json_.next_key(key)) {
    if (key == "images") {
      out_.listed_images = list("images", has_images, [&](std::int64_t place) { image(place); });
    } else if (key == "annotations") {
      list("annotations", has_annotations, [&](std::int64_t place) { annotation(place); });
    } else if (key == "categories") {
      out_.listed_categories = list("categories", out_.has_categories, [&](std::int64_t place) { category(place); });
    } else if (repair_) {
      out_.extra += ',' + json_quoted(key) + ':';
      json_.skip(&out_.extra);
    } else {
      json_.skip();
    }
  }
  json_.finish();
  if (!has_images) throw DataError(file_, ": no list images; is this a COCO annotation file?");
  if (!out_.has_categories) findings_.add("categories-absent", Severity::error, "no list categories");
  if (!has_annotations)
    findings_.add("annotations-absent", Severity::warning, "no list annotations; every image counts as background");
  return std::move(out_);
}

std::int64_t RecordReader::list(const char* key, bool& seen, const std::function<void(std::int64_t)>& record) {
  if (seen) throw DataError(file_, ": the key ", key, " occurs twice; join the two lists");
  seen = true;
  if (json_.peek() != JsonKind::array) throw DataError(file_, ": ", key, " is ", kind_name(json_.peek()), "; it must be a list");
  json_.begin_array();
  std::int64_t place = 0;
  for (; json_.next_element(); ++place) {
    const JsonKind kind = json_.peek();
    if (kind == JsonKind::object) {
      record(place);
    } else {
      fault("record-invalid", concat(key, "[", place, "] is ", kind_name(kind), ", not an object"));
      json_.skip();
    }
  }
  return place;
}

void RecordReader::read_value(Field& field) {
  field.kind = json_.peek();
  field.elements = 0;
  field.stranger.clear();
  switch (field.kind) {
    case JsonKind::null: return json_.read_null();
    case JsonKind::boolean: field.boolean = json_.read_boolean(); return;
    case JsonKind::number: field.number = json_.read_number(); return;
    case JsonKind::string: field.text = json_.read_string(); return;
    case JsonKind::object: return json_.skip();
    case JsonKind::array: break;
  }
  json_.begin_array();
  for (; json_.next_element(); ++field.elements) {
    double value = 0;
    const JsonKind kind = json_.peek();
    if (kind == JsonKind::number) {
      value = json_.read_number().value;
    } else if (kind == JsonKind::string) {
      const std::string text = json_.read_string();
      if ((!repair_ || !parse(text, value)) && field.stranger.empty()) field.stranger = "the text \"" + printable(text) + '"';
    } else {
      json_.skip();
      if (field.stranger.empty()) field.stranger = kind_name(kind);
    }
    if (field.elements < 4) field.numbers[static_cast<std::size_t>(field.elements)] = value;
  }
}

bool RecordReader::read_fields(std::span<Field> fields, const Where& where, std::string& extra) {
  std::string key, twice;
  json_.begin_object();
  while (json_.next_key(key)) {
    Field* field = nullptr;
    for (Field& known : fields) {
      if (key == known.name) field = &known;
    }
    if (field) {
      if (field->present) twice = key;
      field->present = true;
      read_value(*field);
    } else if (repair_) {
      extra += ',' + json_quoted(key) + ':';
      json_.skip(&extra);
    } else {
      json_.skip();
    }
  }
  if (twice.empty()) return true;
  fault("json-duplicate-key", concat(where(), ": the key ", twice, " occurs twice", repair_ ? "; the last one counts" : ""));
  return repair_;
}

bool RecordReader::read_id(const Field& field, const Where& where, std::int64_t& id) {
  if (field.present && field.kind == JsonKind::number && field.number.fits) {
    id = field.number.integer;
    return true;
  }
  const std::string what = concat(where(), ": ", field.name, " is ", describe(field));
  if (field.kind == JsonKind::string && parse(field.text, id)) {
    fault("id-as-text", what + (repair_ ? "; converted" : ", not a number"));
    return repair_;
  }
  const double value = field.number.value;
  if (field.kind == JsonKind::number && !field.number.whole && value == std::floor(value) && std::abs(value) < 9e15) {
    id = static_cast<std::int64_t>(value);
    fault("id-as-float", what + (repair_ ? "; converted" : " with a point or exponent, not a whole number"));
    return repair_;
  }
  findings_.add("id-invalid", Severity::error, what + "; a whole number of up to 64 bits is needed");
  return false;
}

bool RecordReader::read_box(const Field& field, const Where& where, std::array<double, 4>& box) {
  const auto invalid = [&](const std::string& what) {
    fault("box-invalid",
          concat(where(), ": bbox ", what, repair_ ? "; left out" : "; four numbers x, y, width, height are needed"));
    return false;
  };
  if (!field.present || field.kind != JsonKind::array) return invalid("is " + describe(field));
  if (!field.stranger.empty()) return invalid("holds " + field.stranger);
  if (field.elements != 4) return invalid(concat("has ", field.elements, field.elements == 1 ? " number" : " numbers"));
  box = field.numbers;
  for (const double value : box) {
    if (std::isfinite(value)) continue;
    findings_.add("box-not-finite", Severity::warning, concat(where(), ": bbox holds ", number_text(value), "; dropped"));
    return false;
  }
  return true;
}

bool RecordReader::read_crowd(const Field& field, const Where& where, bool& crowd) {
  crowd = false;
  if (!field.present || field.kind == JsonKind::null) return true;
  if (field.kind == JsonKind::boolean || (field.kind == JsonKind::number && std::isfinite(field.number.value))) {
    crowd = field.kind == JsonKind::boolean ? field.boolean : field.number.value != 0;
    return true;
  }
  std::int64_t value = 0;
  const bool text = field.kind == JsonKind::string && parse(field.text, value);
  const std::string what = concat(where(), ": iscrowd is ", describe(field), ", not 0 or 1");
  if (text) {
    fault("iscrowd-invalid", what + (repair_ ? "; converted" : ""));
    crowd = value != 0;
    return repair_;
  }
  findings_.add("iscrowd-invalid", Severity::error, what);
  return false;
}

void RecordReader::read_size(const Field& width, const Field& height, RawImage& image) {
  const std::int64_t w = picture_side(width), h = picture_side(height);
  if (w > 0 && h > 0) {
    image.width = w;
    image.height = h;
    return;
  }
  const std::string what = concat("image ", image.id, " (", printable(image.file_name), "): width is ", describe(width),
                                  ", height is ", describe(height), "; the file's own size counts");
  const auto absent = [](const Field& field) { return !field.present || field.kind == JsonKind::null; };
  if (absent(width) || absent(height)) return findings_.add("image-size-absent", Severity::warning, what);
  if (w == -1 || h == -1) return findings_.add("image-size-invalid", Severity::warning, what);
  findings_.add("image-size-placeholder", Severity::note, what);
}

void RecordReader::image(std::int64_t place) {
  std::array<Field, 4> fields = {Field("id"), Field("file_name"), Field("width"), Field("height")};
  const auto& [id, file_name, width, height] = fields;
  RawImage image;
  const Where where = [&] {
    const bool named = file_name.kind == JsonKind::string && !file_name.text.empty();
    return concat("images[", place, "]", named ? " (" + printable(file_name.text) + ")" : "");
  };
  if (!read_fields(fields, where, image.extra) || !read_id(id, where, image.id)) return;
  if (file_name.kind != JsonKind::string || file_name.text.empty() || file_name.text.find('\0') != std::string::npos)
    return findings_.add("image-no-file", Severity::error, concat("image ", image.id, ": file_name is ", describe(file_name)));
  image.file_name = file_name.text;
  read_size(width, height, image);
  out_.images.push_back(std::move(image));
}

void RecordReader::category(std::int64_t place) {
  std::array<Field, 2> fields = {Field("id"), Field("name")};
  const auto& [id, name] = fields;
  RawCategory category;
  const Where where = [&] {
    return concat("categories[", place, "]", name.kind == JsonKind::string ? " (" + printable(name.text) + ")" : "");
  };
  if (!read_fields(fields, where, category.extra) || !read_id(id, where, category.id)) return;
  category.name = name.text;
  if (name.kind != JsonKind::string) {
    category.name = std::to_string(category.id);
    findings_.add("category-no-name", Severity::warning,
                  concat("category ", category.id, ": name is ", describe(name), "; its id is taken"));
  }
  out_.categories.push_back(std::move(category));
}

void RecordReader::annotation(std::int64_t place) {
  std::array<Field, 6> fields = {Field("id"),   Field("image_id"), Field("category_id"),
                                 Field("bbox"), Field("area"),     Field("iscrowd")};
  const auto& [id, image_id, category_id, bbox, area, iscrowd] = fields;
  RawAnnotation annotation;
  const Where where = [&] {
    return (id.number.fits ? concat("annotation ", id.number.integer) : concat("annotations[", place, "]")) +
           (image_id.number.fits ? concat(" (image ", image_id.number.integer, ")") : "");
  };
  std::string extra;
  if (!read_fields(fields, where, extra)) return;
  if (!id.present) {
    annotation.has_id = false;
    annotation.id = place + 1;   // the COCO API never finds an annotation of id 0
    findings_.add("annotation-no-id", Severity::warning, concat(where(), ": no id; its place in the list, from 1, is taken"));
  } else if (!read_id(id, where, annotation.id)) {
    return;
  }
  if (!read_id(image_id, where, annotation.image_id) || !read_id(category_id, where, annotation.category_id)) return;
  if (!read_box(bbox, where, annotation.box_xywh) || !read_crowd(iscrowd, where, annotation.crowd)) return;
  constexpr double kLargest = std::numeric_limits<double>::max();
  annotation.area = std::clamp(annotation.box_xywh[2] * annotation.box_xywh[3], -kLargest, kLargest);
  if (area.kind == JsonKind::number && std::isfinite(area.number.value)) {
    annotation.area = area.number.value;
  } else if (area.present && area.kind != JsonKind::null) {
    findings_.add("area-invalid", Severity::warning, concat(where(), ": area is ", describe(area), "; width x height is taken"));
  }
  out_.annotations.push_back(annotation);
  if (repair_) out_.annotation_extra.push_back(std::move(extra));
}

}  // namespace

RawCoco read_records(const std::filesystem::path& file, ReadMode mode, Findings& findings) {
  return RecordReader(file, mode, findings).read();
}

}  // namespace detr::data

#include "data/fix.h"

#include <map>
#include <set>
#include <sstream>
#include <system_error>
#include <utility>

#include "data/coco_boxes.h"
#include "data/coco_records.h"
#include "data/pictures.h"
#include "data/text.h"
#include "runtime/error.h"
#include "runtime/files.h"

namespace detr::data {
namespace fs = std::filesystem;
namespace {

using Severity = Finding::Severity;

/// Leaves out records whose id was seen before with the same text (name or file); another text is an error.
template <class Record>
void drop_repeated(std::vector<Record>& records, std::string Record::* text, const std::string& what, Findings& findings) {
  std::map<std::int64_t, std::string> seen;
  std::vector<Record> kept;
  for (Record& record : records) {
    const auto [first, fresh] = seen.emplace(record.id, record.*text);
    if (fresh) {
      kept.push_back(std::move(record));
      continue;
    }
    const bool same = first->second == record.*text;
    findings.add(what + "-duplicate-id", same ? Severity::warning : Severity::error,
                 concat(what, " ", record.id, ": \"", printable(first->second), "\" and \"", printable(record.*text), '"',
                        same ? "; the second is left out" : ""));
  }
  records = std::move(kept);
}

/// Takes the sizes of the pictures and leaves out images whose file cannot be used.
void take_sizes(RawCoco& raw, const fs::path& folder, Exif exif, ThreadPool& pool, Findings& findings) {
  CocoData shell;
  for (const RawImage& image : raw.images) shell.images.push_back({image.id, image.file_name, image.width, image.height, 0, 0});
  const std::vector<Picture> pictures = look_at_pictures(shell, folder, {exif, {}, 0}, pool);
  report_pictures(shell, pictures, findings);
  std::vector<RawImage> kept;
  for (std::size_t i = 0; i < pictures.size(); ++i) {
    if (!pictures[i].fault.empty()) {
      findings.add(pictures[i].fault, Severity::warning, image_name(shell.images[i]) + ": " + pictures[i].reason + "; left out");
      continue;
    }
    kept.push_back(std::move(raw.images[i]));
    kept.back().width = pictures[i].width;
    kept.back().height = pictures[i].height;
  }
  if (kept.empty() && !raw.images.empty())
    throw DataError(printable(folder), ": none of ", raw.images.size(), " images can be used there; correct --images");
  raw.images = std::move(kept);
}

/// Gives out annotation ids: the wanted one where it is free, else the lowest that no annotation of the file has.
class Ids {
 public:
  explicit Ids(const std::vector<RawAnnotation>& annotations) {
    for (const RawAnnotation& annotation : annotations) {
      if (annotation.has_id) taken_.insert(annotation.id);
    }
  }
  std::int64_t give(const RawAnnotation& annotation) {
    if (annotation.has_id && given_.insert(annotation.id).second) return annotation.id;
    while (taken_.count(next_) > 0) ++next_;
    return next_++;
  }

 private:
  std::set<std::int64_t> taken_, given_;
  std::int64_t next_ = 1;
};

class Writer {
 public:
  Writer(const RawCoco& raw, Findings& findings) : raw_(raw), findings_(findings) {}

  /// The annotation file. Once.
  std::string text() {
    out_ << "{\"images\": [";
    list(raw_.images, [&](const RawImage& image) { write_image(image); });
    out_ << "],\n\"annotations\": [";
    write_annotations();
    out_ << "],\n\"categories\": [";
    list(raw_.categories, [&](const RawCategory& category) {
      out_ << "{\"id\": " << category.id << ", \"name\": " << json_quoted(category.name) << category.extra << '}';
    });
    out_ << ']' << raw_.extra << "}\n";
    return std::move(out_).str();
  }

 private:
  template <class Record, class Write>
  void list(const std::vector<Record>& records, Write write_record) {
    for (std::size_t i = 0; i < records.size(); ++i) {
      out_ << (i ? ",\n" : "\n");
      write_record(records[i]);
    }
  }

  void write_image(const RawImage& image) {
    out_ << "{\"id\": " << image.id << ", \"file_name\": " << json_quoted(image.file_name);
    if (image.width > 0) out_ << ", \"width\": " << image.width << ", \"height\": " << image.height;
    out_ << image.extra << '}';
  }

  void write_annotations() {
    std::map<std::int64_t, const RawImage*> images;
    std::set<std::int64_t> categories;
    for (const RawImage& image : raw_.images) images.emplace(image.id, &image);
    for (const RawCategory& category : raw_.categories) categories.insert(category.id);
    Ids ids(raw_.annotations);
    bool first = true;
    for (std::size_t i = 0; i < raw_.annotations.size(); ++i) {
      const RawAnnotation& annotation = raw_.annotations[i];
      const std::string where = concat("annotation ", annotation.id, " (image ", annotation.image_id, "): ");
      const auto image = images.find(annotation.image_id);
      if (image == images.end()) {
        findings_.add("image-unknown", Severity::warning, where + "no such image; left out");
      } else if (categories.count(annotation.category_id) == 0) {
        findings_.add("category-unknown", Severity::warning,
                      concat(where, "category_id ", annotation.category_id, " is not in categories; left out"));
      } else if (Annotation box; clipped(annotation, *image->second, box)) {
        const std::int64_t id = ids.give(annotation);
        if (id != annotation.id || !annotation.has_id)
          findings_.add("annotation-new-id", Severity::warning, concat(where, "the id is now ", id));
        out_ << (std::exchange(first, false) ? "\n" : ",\n");
        write_annotation(id, annotation, box, raw_.annotation_extra[i]);
      }
    }
  }

  /// The box as it is to be written, in `box`; false where it is left out.
  bool clipped(const RawAnnotation& annotation, const RawImage& image, Annotation& box) {
    box = {annotation.id, 0, 0, annotation.box_xywh, {}, annotation.area, annotation.crowd, false};
    const BoxFit fit = box_fit(box, image.width, image.height);
    report_fit({image.id, image.file_name, image.width, image.height, 0, 0}, box, fit, findings_);
    if (fit == BoxFit::empty) return false;
    if (fit == BoxFit::whole || annotation.crowd) return true;
    clip_box(box, image.width, image.height);
    if (!box.trainable) return false;
    const auto [x, y, w, h] = annotation.box_xywh;
    const auto [x0, y0, x1, y1] = box.box_xyxy;
    box.box_xywh = {x0, y0, x1 - x0, y1 - y0};
    if (annotation.area == w * h) box.area = (x1 - x0) * (y1 - y0);   // else it is the area of a mask, which stays
    return true;
  }

  void write_annotation(std::int64_t id, const RawAnnotation& annotation, const Annotation& box, const std::string& extra) {
    const auto [x, y, w, h] = box.box_xywh;
    out_ << "{\"id\": " << id << ", \"image_id\": " << annotation.image_id << ", \"category_id\": " << annotation.category_id
         << ", \"bbox\": [" << number_text(x) << ", " << number_text(y) << ", " << number_text(w) << ", " << number_text(h)
         << "], \"area\": " << number_text(box.area) << ", \"iscrowd\": " << (annotation.crowd ? 1 : 0) << extra << '}';
  }

  std::ostringstream out_;
  const RawCoco& raw_;
  Findings& findings_;
};

}  // namespace

void write_fixed(const fs::path& annotations, const fs::path& images, Exif exif, const fs::path& out, ThreadPool& pool,
                 Findings& findings) {
  std::error_code ignored;
  if (fs::equivalent(annotations, out, ignored))
    throw StorageError(printable(out), ": is the annotation file itself; write the repaired copy to another file");
  Findings own(findings.max_items());
  RawCoco raw = read_records(annotations, ReadMode::repair, own);
  drop_repeated(raw.categories, &RawCategory::name, "category", own);
  drop_repeated(raw.images, &RawImage::file_name, "image", own);
  if (!images.empty()) take_sizes(raw, images, exif, pool, own);
  refuse_errors(annotations, own);

  replace_file(out, Writer(raw, own).text(), [&](const fs::path& written) {
    try {
      Findings rest;
      read_coco(written, rest);
    } catch (const DataError& error) {
      throw DataError(printable(annotations), ": cannot be repaired: ", error.what());
    }
  });
  findings.merge(own);
}

}  // namespace detr::data

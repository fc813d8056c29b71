#include "data/coco.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>

#include "data/coco_boxes.h"
#include "data/coco_records.h"
#include "data/text.h"
#include "runtime/error.h"

namespace detr::data {
namespace {

using Severity = Finding::Severity;

/// What to do about an error that a reader cannot pass over.
std::string advice(const std::string& kind, const std::string& classes) {
  const std::map<std::string, std::string> texts = {
      {"id-as-text", "write ids without quotes (detrtrain check-data --fix-out converts them)"},
      {"id-as-float", "write ids as whole numbers (detrtrain check-data --fix-out converts them)"},
      {"id-invalid", "correct these ids"},
      {"box-invalid", "correct or remove these annotations (detrtrain check-data --fix-out removes them)"},
      {"iscrowd-invalid", "write iscrowd as 0 or 1"},
      {"json-duplicate-key", "keep one of the two values"},
      {"record-invalid", "remove these entries"},
      {"categories-absent", "add categories: [{\"id\": 1, \"name\": ...}, ...]"},
      {"categories-empty", "add a class to categories"},
      {"category-duplicate-id", "give each category an id of its own"},
      {"category-unknown", "categories has " + classes + ": add the class or remove these annotations"},
      {"image-duplicate-id", "give each image an id of its own"},
      {"image-no-file", "add file_name"},
      {"no-images", "add images, or choose another file"},
  };
  const auto found = texts.find(kind);
  return found == texts.end() ? "detrtrain check-data lists all" : found->second;
}

/// Removes records whose id was seen before (the first one stays) and sorts by id.
template <class Record>
void sort_by_id(std::vector<Record>& records, const std::function<void(const Record& kept, const Record& dropped)>& twice) {
  std::stable_sort(records.begin(), records.end(), [](const Record& a, const Record& b) { return a.id < b.id; });
  std::size_t kept = 0;
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (kept > 0 && records[kept - 1].id == records[i].id) {
      twice(records[kept - 1], records[i]);
    } else if (kept++ != i) {
      records[kept - 1] = std::move(records[i]);
    }
  }
  records.resize(kept);
}

template <class Record>
std::optional<std::int64_t> find_id(const std::vector<Record>& records, std::int64_t id) {
  const auto before = [](const Record& record, std::int64_t wanted) { return record.id < wanted; };
  const auto found = std::lower_bound(records.begin(), records.end(), id, before);
  if (found == records.end() || found->id != id) return std::nullopt;
  return found - records.begin();
}

void take_categories(RawCoco& file, CocoData& data, Findings& findings) {
  std::vector<RawCategory>& raw = file.categories;
  sort_by_id<RawCategory>(raw, [&](const RawCategory& kept, const RawCategory& dropped) {
    findings.add("category-duplicate-id", Severity::error,
                 concat("category ", kept.id, ": \"", printable(kept.name), "\" and \"", printable(dropped.name), '"'));
  });
  std::map<std::string, std::int64_t> names;
  for (RawCategory& category : raw) {
    const auto [seen, fresh] = names.emplace(category.name, category.id);
    if (!fresh)
      findings.add("category-duplicate-name", Severity::warning,
                   concat("categories ", seen->second, " and ", category.id, ": both are \"", printable(category.name), '"'));
    data.categories.push_back({category.id, std::move(category.name)});
  }
  if (file.has_categories && file.listed_categories == 0)
    findings.add("categories-empty", Severity::error, "the list categories is empty");
}

void take_images(RawCoco& file, CocoData& data, Findings& findings) {
  std::vector<RawImage>& raw = file.images;
  sort_by_id<RawImage>(raw, [&](const RawImage& kept, const RawImage& dropped) {
    findings.add("image-duplicate-id", Severity::error,
                 concat("image ", kept.id, ": \"", printable(kept.file_name), "\" and \"", printable(dropped.file_name), '"'));
  });
  data.images.reserve(raw.size());
  for (RawImage& image : raw) data.images.push_back({image.id, std::move(image.file_name), image.width, image.height, 0, 0});
  if (file.listed_images == 0)
    findings.add("no-images", Severity::error, "the list images is empty, so there is nothing to train on");

  std::vector<const ImageRecord*> by_name;
  for (const ImageRecord& image : data.images) by_name.push_back(&image);
  std::stable_sort(by_name.begin(), by_name.end(), [](const auto* a, const auto* b) { return a->file_name < b->file_name; });
  for (std::size_t i = 1; i < by_name.size(); ++i) {
    if (by_name[i - 1]->file_name != by_name[i]->file_name) continue;
    findings.add("image-duplicate-file", Severity::warning, concat("images ", by_name[i - 1]->id, " and ", by_name[i]->id,
                 ": both are \"", printable(by_name[i]->file_name), '"'));
  }
}

void report_duplicate_ids(const std::vector<RawAnnotation>& raw, Findings& findings) {
  std::vector<const RawAnnotation*> by_id;
  for (const RawAnnotation& annotation : raw) {
    if (annotation.has_id) by_id.push_back(&annotation);
  }
  std::stable_sort(by_id.begin(), by_id.end(), [](const auto* a, const auto* b) { return a->id < b->id; });
  for (std::size_t i = 1; i < by_id.size(); ++i) {
    if (by_id[i - 1]->id != by_id[i]->id) continue;
    findings.add("annotation-duplicate-id", Severity::warning,
                 concat("annotation ", by_id[i]->id, ": on images ", by_id[i - 1]->image_id, " and ", by_id[i]->image_id,
                        "; both count"));
  }
}

void take_annotations(const std::vector<RawAnnotation>& raw, CocoData& data, Findings& findings) {
  constexpr std::int64_t kDropped = -1;
  std::vector<std::int64_t> image_of(raw.size(), kDropped), label_of(raw.size(), 0);
  for (std::size_t i = 0; i < raw.size(); ++i) {
    const auto where = [&] { return concat("annotation ", raw[i].id, " (image ", raw[i].image_id, "): "); };
    const auto image = find_id(data.images, raw[i].image_id);
    const auto label = find_id(data.categories, raw[i].category_id);
    if (!image) {
      findings.add("image-unknown", Severity::warning, where() + "no such image; left out");
    } else if (!label) {
      if (!data.categories.empty())   // else one fault of the whole file is told already
        findings.add("category-unknown", Severity::error,
                     concat(where(), "category_id ", raw[i].category_id, " is not in categories"));
    } else {
      image_of[i] = *image;
      label_of[i] = *label;
      ++data.images[static_cast<std::size_t>(*image)].count;
    }
  }
  std::int64_t first = 0;
  for (ImageRecord& image : data.images) {
    image.first = first;
    first += image.count;
  }

  std::vector<std::int64_t> next;
  for (const ImageRecord& image : data.images) next.push_back(image.first);
  data.annotations.resize(static_cast<std::size_t>(first));
  for (std::size_t i = 0; i < raw.size(); ++i) {
    if (image_of[i] == kDropped) continue;
    const auto image = static_cast<std::size_t>(image_of[i]);
    Annotation& annotation = data.annotations[static_cast<std::size_t>(next[image]++)];
    annotation = {raw[i].id, image_of[i], label_of[i], raw[i].box_xywh, {}, raw[i].area, raw[i].crowd, false};
    clip_box(annotation, data.images[image].width, data.images[image].height);
  }
}

}  // namespace

const char* name_of(Severity severity) { return severity == Severity::error ? "error" : severity == Severity::warning ? "warning" : "note"; }

void Findings::add(const std::string& kind, Finding::Severity severity, const std::string& item) {
  auto found = std::find_if(findings_.begin(), findings_.end(), [&](const Finding& f) { return f.kind == kind; });
  if (found == findings_.end()) found = findings_.insert(findings_.end(), Finding{kind, severity, 0, {}});
  found->severity = std::max(found->severity, severity);
  ++found->count;
  if (found->items.size() < max_items_) found->items.push_back(item);
}

void Findings::merge(const Findings& other, const std::string& prefix) {
  for (const Finding& finding : other.findings_) {
    for (std::size_t i = 0; i < finding.items.size(); ++i) add(finding.kind, finding.severity, prefix + finding.items[i]);
    const auto unnamed = finding.count - static_cast<std::int64_t>(finding.items.size());
    if (unnamed == 0) continue;
    auto mine = std::find_if(findings_.begin(), findings_.end(), [&](const Finding& f) { return f.kind == finding.kind; });
    if (mine == findings_.end()) mine = findings_.insert(findings_.end(), Finding{finding.kind, finding.severity, 0, {}});
    mine->count += unnamed;
  }
}

bool Findings::has(Finding::Severity at_least) const {
  return std::any_of(findings_.begin(), findings_.end(), [&](const Finding& f) { return f.severity >= at_least; });
}

const Finding* Findings::find(const std::string& kind) const {
  const auto found = std::find_if(findings_.begin(), findings_.end(), [&](const Finding& f) { return f.kind == kind; });
  return found == findings_.end() ? nullptr : &*found;
}

std::int64_t Findings::count(const std::string& kind) const {
  const Finding* const found = find(kind);
  return found ? found->count : 0;
}

std::string class_list(const std::vector<Category>& categories, std::size_t max) {
  if (categories.empty()) return "no class";
  std::string text;
  for (std::size_t i = 0; i < std::min(categories.size(), max); ++i)
    text += concat(i ? ", " : "", categories[i].id, " ", printable(categories[i].name));
  return categories.size() <= max ? text : concat(text, " and ", categories.size() - max, " more");
}

void refuse_errors(const std::filesystem::path& file, const Findings& findings, const std::string& classes) {
  std::string text, others;
  for (const Finding& finding : findings.all()) {
    if (finding.severity != Severity::error) continue;
    if (!text.empty()) {
      others += concat(others.empty() ? "" : ", ", finding.count, " of kind ", finding.kind);
      continue;
    }
    if (finding.count > 1) text = concat(finding.count, " faults of kind ", finding.kind, ", first: ");
    for (std::size_t i = 0; i < finding.items.size(); ++i) text += (i ? " | " : "") + finding.items[i];
    text += "; " + advice(finding.kind, classes);
  }
  if (text.empty()) return;
  throw DataError(printable(file), ": ", text, others.empty() ? "" : " (also " + others + ")");
}

CocoData inspect_coco(const std::filesystem::path& file, Findings& findings, bool report_all) {
  RawCoco raw = read_records(file, ReadMode::strict, findings);
  CocoData data;
  data.file = file;
  take_categories(raw, data, findings);
  take_images(raw, data, findings);
  report_duplicate_ids(raw.annotations, findings);
  take_annotations(raw.annotations, data, findings);
  std::int64_t trainable = 0;
  for (const Annotation& annotation : data.annotations) {
    const ImageRecord& image = data.images[static_cast<std::size_t>(annotation.image)];
    const BoxFit fit = box_fit(annotation, image.width, image.height);
    if (report_all || fit == BoxFit::empty) report_fit(image, annotation, fit, findings);
    trainable += annotation.trainable;
  }
  if (trainable == 0 && !data.images.empty())
    findings.add("no-boxes", Severity::warning, concat("none of ", data.images.size(), " images has a box to learn"));
  return data;
}

CocoData read_coco(const std::filesystem::path& file, Findings& findings) {
  Findings own(findings.max_items());
  CocoData data = inspect_coco(file, own);
  refuse_errors(file, own, class_list(data.categories));
  findings.merge(own);
  return data;
}

void set_image_size(CocoData& data, std::int64_t image, std::int64_t width, std::int64_t height, Findings& findings) {
  DETR_CHECK(image >= 0 && image < static_cast<std::int64_t>(data.images.size()), "set_image_size: no image ", image);
  DETR_CHECK(width >= 1 && height >= 1, "set_image_size: size must be >= 1, got ", width, " x ", height);
  ImageRecord& record = data.images[static_cast<std::size_t>(image)];
  const std::int64_t old_width = record.width, old_height = record.height;
  record.width = width;
  record.height = height;
  for (std::int64_t i = record.first; i < record.first + record.count; ++i) {
    Annotation& annotation = data.annotations[static_cast<std::size_t>(i)];
    clip_box(annotation, width, height);
    const BoxFit fit = box_fit(annotation, width, height);
    if (fit > box_fit(annotation, old_width, old_height)) report_fit(record, annotation, fit, findings);
  }
}

CocoData select_images(const CocoData& data, const std::vector<std::int64_t>& images) {
  CocoData out;
  out.file = data.file;
  out.categories = data.categories;
  std::int64_t previous = -1;
  for (const std::int64_t index : images) {
    DETR_CHECK(index > previous && index < static_cast<std::int64_t>(data.images.size()),
               "select_images: indices must ascend below ", data.images.size(), ", got ", index);
    previous = index;
    ImageRecord record = data.images[static_cast<std::size_t>(index)];
    const auto begin = data.annotations.begin() + record.first;
    out.annotations.insert(out.annotations.end(), begin, begin + record.count);
    record.first = static_cast<std::int64_t>(out.annotations.size()) - record.count;
    for (std::int64_t i = record.first; i < record.first + record.count; ++i)
      out.annotations[static_cast<std::size_t>(i)].image = static_cast<std::int64_t>(out.images.size());
    out.images.push_back(std::move(record));
  }
  return out;
}

}  // namespace detr::data

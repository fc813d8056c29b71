#include "data/check.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "data/coco_boxes.h"
#include "data/discover.h"
#include "data/pictures.h"
#include "data/text.h"
#include "runtime/error.h"
#include "runtime/safetensors.h"

namespace detr::data {
namespace fs = std::filesystem;
namespace {

using Severity = Finding::Severity;

constexpr double kSmallPx2 = 32 * 32, kMediumPx2 = 96 * 96;

/// Size and hash of a file's bytes: equal for equal files, and 64 bits of hash beside the size make a chance meeting
/// of different pictures negligible.
using Fingerprint = std::pair<std::int64_t, std::uint64_t>;

Fingerprint fingerprint(const ImageFile& file) {
  constexpr std::int64_t kPiece = 1 << 20;
  Fingerprint print{0, 0};
  while (print.first < file.size()) {
    const std::vector<std::uint8_t> bytes = file.read(print.first, kPiece);
    if (bytes.empty()) break;
    print.second = hash_bytes(std::as_bytes(std::span(bytes)), print.second);
    print.first += std::ssize(bytes);
  }
  return print;
}

/// One split with what the checks across splits need.
struct Loaded {
  std::size_t split;   ///< index into the options
  CocoData data;
  std::vector<Picture> pictures;
};

void check_pictures(const CheckOptions& options, const CheckOptions::Split& split, Loaded& loaded, ThreadPool& pool,
                    Findings& findings) {
  std::error_code ignored;
  if (!fs::is_directory(split.images, ignored)) {
    findings.add("image-folder-missing", Severity::error, printable(split.images) + ": no such folder");
    return;
  }
  loaded.pictures = look_at_pictures(loaded.data, split.images, {options.exif, options.limits, options.decode}, pool);
  report_faults(loaded.data, loaded.pictures, findings);
  report_pictures(loaded.data, loaded.pictures, findings);
  Findings unused;   // every box is reported against its final size below
  set_real_sizes(loaded.data, loaded.pictures, unused);
}

void check_boxes(const CocoData& data, Findings& findings) {
  for (const Annotation& annotation : data.annotations) {
    const ImageRecord& image = data.images[static_cast<std::size_t>(annotation.image)];
    const BoxFit fit = box_fit(annotation, image.width, image.height);
    if (fit != BoxFit::empty) report_fit(image, annotation, fit, findings);   // empty ones were reported when reading
  }
  report_corner_boxes(data, findings);
}

CheckReport::Split check_split(const CheckOptions& options, std::size_t index, ThreadPool& pool, std::vector<Loaded>& loaded,
                               Findings& findings) {
  const CheckOptions::Split& split = options.splits[index];
  CheckReport::Split out;
  out.name = split.name;
  Loaded current{index, {}, {}};
  try {
    current.data = inspect_coco(split.annotations, findings, false);
  } catch (const DataError& error) {
    findings.add("annotations-unusable", Severity::error, error.what());
    return out;
  }
  out.readable = true;
  check_pictures(options, split, current, pool, findings);
  check_boxes(current.data, findings);
  out.categories = current.data.categories;
  out.stats = data_stats(current.data);
  for (std::size_t i = 0; i < out.categories.size(); ++i) {
    if (out.stats.per_class[i] == 0 && out.stats.trainable > 0)
      findings.add("category-unused", Severity::note,
                   concat("category ", out.categories[i].id, " (", printable(out.categories[i].name), ") has no box"));
  }
  out.exif_turned = findings.count("exif-turned");
  out.exif_as_stored = findings.count("exif-as-stored");
  out.exif_ambiguous = findings.count("exif-ambiguous");
  loaded.push_back(std::move(current));
  return out;
}

bool same_categories(const CocoData& a, const CocoData& b) {
  return std::equal(a.categories.begin(), a.categories.end(), b.categories.begin(), b.categories.end(),
                    [](const Category& x, const Category& y) { return x.id == y.id && x.name == y.name; });
}

void compare_splits(const CheckOptions& options, const std::vector<Loaded>& loaded, Findings& findings) {
  std::map<fs::path, std::pair<std::size_t, const ImageRecord*>> files;
  for (const Loaded& current : loaded) {
    const CheckOptions::Split& split = options.splits[current.split];
    const CheckOptions::Split& first = options.splits[loaded.front().split];
    if (!same_categories(loaded.front().data, current.data))
      findings.add("categories-differ", Severity::error,
                   concat(split.name, " has ", class_list(current.data.categories), "; ", first.name, " has ",
                          class_list(loaded.front().data.categories)));
    for (const ImageRecord& image : current.data.images) {
      const auto [seen, fresh] = files.try_emplace((split.images / image.file_name).lexically_normal(), current.split, &image);
      if (fresh || seen->second.first == current.split) continue;
      findings.add("file-in-two-splits", Severity::warning, concat(split.name, ": ", image_name(image), " is also ",
                   image_name(*seen->second.second), " of ", options.splits[seen->second.first].name));
    }
  }
}

void find_duplicates(const CheckOptions& options, const std::vector<Loaded>& loaded, ThreadPool& pool, Findings& findings) {
  struct Entry {
    std::size_t split;
    const ImageRecord* image;
    std::optional<Fingerprint> print;
  };
  std::vector<Entry> entries;
  for (const Loaded& current : loaded) {
    for (std::size_t i = 0; i < current.pictures.size(); ++i) {
      if (current.pictures[i].fault.empty()) entries.push_back({current.split, &current.data.images[i], std::nullopt});
    }
  }
  pool.parallel_for(static_cast<std::int64_t>(entries.size()), [&](std::int64_t i) {
    Entry& entry = entries[static_cast<std::size_t>(i)];
    try {
      entry.print = fingerprint(open_image(options.splits[entry.split].images, entry.image->file_name));
    } catch (const DataError&) {   // it was there when the pictures were looked at
    }
  });
  std::map<Fingerprint, const Entry*> first;
  for (const Entry& entry : entries) {
    if (!entry.print) continue;
    const auto [seen, fresh] = first.emplace(*entry.print, &entry);
    if (fresh) continue;
    const Entry& other = *seen->second;
    const bool across = other.split != entry.split;
    findings.add(across ? "picture-in-two-splits" : "picture-twice", across ? Severity::warning : Severity::note,
                 concat(options.splits[entry.split].name, ": ", image_name(*entry.image), " has the bytes of ",
                        image_name(*other.image), " of ", options.splits[other.split].name));
  }
}

}  // namespace

DataStats data_stats(const CocoData& data) {
  DataStats stats;
  stats.images = static_cast<std::int64_t>(data.images.size());
  stats.boxes = static_cast<std::int64_t>(data.annotations.size());
  stats.per_class.resize(data.categories.size());
  std::vector<std::int64_t> per_image(data.images.size());
  for (const Annotation& annotation : data.annotations) {
    if (annotation.crowd) {
      ++stats.crowd;
      continue;
    }
    ++(annotation.area < kSmallPx2 ? stats.small : annotation.area < kMediumPx2 ? stats.medium : stats.large);
    if (!annotation.trainable) continue;
    ++stats.trainable;
    ++stats.per_class[static_cast<std::size_t>(annotation.label)];
    ++per_image[static_cast<std::size_t>(annotation.image)];
  }
  stats.background = std::count(per_image.begin(), per_image.end(), 0);
  std::sort(per_image.begin(), per_image.end());
  if (!per_image.empty()) {
    stats.most_per_image = per_image.back();
    stats.p99_per_image = per_image[(per_image.size() * 99 + 99) / 100 - 1];
  }
  return stats;
}

CheckReport check_data_set(const CheckOptions& options, ThreadPool& pool) {
  CheckReport report{Findings(options.max_report), {}};
  std::vector<Loaded> loaded;
  for (std::size_t i = 0; i < options.splits.size(); ++i) {
    Findings findings(options.max_report);
    report.splits.push_back(check_split(options, i, pool, loaded, findings));
    report.findings.merge(findings, options.splits[i].name + ": ");
  }
  compare_splits(options, loaded, report.findings);
  if (options.duplicates) find_duplicates(options, loaded, pool, report.findings);
  return report;
}

}  // namespace detr::data

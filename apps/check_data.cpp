#include <fmt/format.h>

#include <filesystem>

#include "apps/cli.h"
#include "apps/data_sets.h"
#include "data/check.h"
#include "data/discover.h"
#include "data/draw.h"
#include "data/fix.h"
#include "runtime/error.h"
#include "runtime/files.h"

namespace detr::apps {
namespace {

namespace fs = std::filesystem;

struct CheckFlags {
  DataFlags data;
  std::string decode = "all", fail_on = "error", fix_out, vis;
  bool duplicates = false, stats = false;
  std::int64_t max_report = 10;
};

std::int64_t decode_count(const std::string& text) {
  if (text == "all") return -1;
  if (text == "none") return 0;
  if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos) throw ConfigError("--decode ", text, ": wanted all, none or a number");
  return std::stoll(text);
}

data::Exif exif_of(const std::string& text) { return text == "apply" ? data::Exif::apply : text == "ignore" ? data::Exif::ignore : data::Exif::automatic; }

/// The splits to look at: those of --data, or of the configuration, or the one of --ann and --images.
std::vector<data::CheckOptions::Split> splits_of(const CheckFlags& flags, const CommonOptions& common) {
  std::vector<data::CheckOptions::Split> splits;
  if (!flags.data.data.empty()) {
    data::DataPlace place;
    place.folder = flags.data.data;
    for (const char* name : {"train", "val", "test"}) {
      place.annotations = data::override_for(flags.data.annotations, name, "");
      place.images = data::override_for(flags.data.images, name, name);
      if (place.annotations.empty() && !data::has_split(place, name)) continue;
      const fs::path annotations = data::find_annotations(place, name);
      fs::path images = place.images;
      if (images.empty()) {
        // A file that cannot be read has no images to look for; the check says why.
        try {
          data::Findings ignored;
          images = data::find_images(place, name, data::inspect_coco(annotations, ignored), true);
        } catch (const DataError&) {
          images = place.folder;
        }
      }
      splits.push_back({name, annotations, images});
    }
    if (splits.empty()) throw DataError(flags.data.data, ": no annotation file: looked for annotations/instances_{train,val,test}*.json and {train,valid,val,test}/_annotations.coco.json");
    return splits;
  }
  if (!flags.data.annotations.empty()) {
    bool named = false;
    for (const char* name : {"train", "val", "test"}) {
      const fs::path annotations = data::override_for(flags.data.annotations, name, "");
      if (annotations.empty()) continue;
      named = true;
      splits.push_back({name, annotations, data::override_for(flags.data.images, name, name)});
    }
    if (!named) splits.push_back({"train", flags.data.annotations.back(), data::override_for(flags.data.images, "train", "train")});
  } else if (!common.config.empty()) {
    const train::RunConfig config = load_config(common).resolve();
    if (!config.train.ann_file.empty()) splits.push_back({"train", config.train.ann_file, config.train.img_folder});
    if (!config.val.ann_file.empty()) splits.push_back({"val", config.val.ann_file, config.val.img_folder});
  }
  if (splits.empty()) throw ConfigError("nothing to check: --data DIR, or --ann FILE --images DIR, or -c CONFIG");
  for (data::CheckOptions::Split& split : splits) {
    if (split.images.empty()) split.images = split.annotations.has_parent_path() ? split.annotations.parent_path() : fs::path(".");
  }
  return splits;
}

nlohmann::json stats_json(const data::CheckReport::Split& split) {
  const data::DataStats& s = split.stats;
  nlohmann::json classes = nlohmann::json::array();
  for (std::size_t i = 0; i < split.categories.size(); ++i)
    classes.push_back({{"id", split.categories[i].id}, {"name", split.categories[i].name}, {"boxes", i < s.per_class.size() ? s.per_class[i] : 0}});
  return {{"split", split.name}, {"readable", split.readable}, {"images", s.images}, {"background", s.background}, {"boxes", s.boxes}, {"crowd", s.crowd}, {"trainable", s.trainable},
          {"small", s.small}, {"medium", s.medium}, {"large", s.large}, {"most_per_image", s.most_per_image}, {"p99_per_image", s.p99_per_image},
          {"exif_turned", split.exif_turned}, {"exif_as_stored", split.exif_as_stored}, {"exif_ambiguous", split.exif_ambiguous}, {"classes", classes}};
}

void print_stats(const data::CheckReport::Split& split, bool all) {
  const data::DataStats& s = split.stats;
  if (!split.readable) return;
  print_line(fmt::format("{}: {} images, {} boxes to train on, {} background, {} crowd; most in one image {}, p99 {}",
                     split.name, s.images, s.trainable, s.background, s.crowd, s.most_per_image, s.p99_per_image));
  if (!all) return;
  print_line(fmt::format("  sizes: {} small, {} medium, {} large; EXIF: {} turned, {} as stored, {} ambiguous",
                     s.small, s.medium, s.large, split.exif_turned, split.exif_as_stored, split.exif_ambiguous));
  for (std::size_t i = 0; i < split.categories.size() && i < s.per_class.size(); ++i)
    print_line(escaped(fmt::format("  class {} {}: {} boxes", split.categories[i].id, split.categories[i].name, s.per_class[i])));
}

/// Eight pictures of each split, spread over it, with their true boxes.
void draw_samples(const data::CheckOptions::Split& split, const fs::path& folder, data::Exif exif) {
  data::Findings ignored;
  const data::CocoData coco = data::inspect_coco(split.annotations, ignored);
  const auto count = static_cast<std::int64_t>(coco.images.size());
  make_folder(folder);
  for (std::int64_t k = 0; k < std::min<std::int64_t>(8, count); ++k) {
    const data::ImageRecord& record = coco.images[static_cast<std::size_t>(k * count / std::min<std::int64_t>(8, count))];
    try {
      data::Image image = data::decode_image(data::open_image(split.images, record.file_name), exif, record.width, record.height).image;
      std::vector<data::DrawnBox> boxes;
      for (std::int64_t a = record.first; a < record.first + record.count; ++a) {
        const data::Annotation& annotation = coco.annotations[static_cast<std::size_t>(a)];
        const auto& [x, y, w, h] = annotation.box_xywh;
        boxes.push_back({{x, y, x + w, y + h}, annotation.label, coco.categories[static_cast<std::size_t>(annotation.label)].name, annotation.crowd});
      }
      data::draw_boxes(image, boxes);
      data::write_image(folder / fmt::format("{}-{}.png", split.name, record.id), image);
    } catch (const DataError&) {
      // The report names a picture that cannot be read; here it is left out.
    }
  }
}

Outcome run_check(const CheckFlags& flags, const CommonOptions& common) {
  if (common.config.empty() && !(common.updates.empty() && common.bare_updates.empty())) throw ConfigError("check-data reads KEY=VALUE only together with -c CONFIG");
  const Stream stream = open_stream(common);
  data::CheckOptions options;
  options.decode = decode_count(flags.decode);
  options.splits = splits_of(flags, common);
  if (!flags.fix_out.empty() && options.splits.size() != 1) throw ConfigError("--fix-out repairs one annotation file: name it by --ann");
  options.duplicates = flags.duplicates;
  if (!common.config.empty()) {
    const train::RunConfig config = load_config(common).resolve();
    options.exif = config.exif;
    options.limits = config.limits;
  }
  if (!flags.data.exif.empty()) options.exif = exif_of(flags.data.exif);
  options.max_report = static_cast<std::size_t>(flags.max_report);
  const data::CheckReport report = data::check_data_set(options, stream.pool());

  Outcome outcome;
  outcome.json["findings"] = nlohmann::json::array();
  outcome.json["stats"] = nlohmann::json::array();
  for (const data::Finding& f : report.findings.all()) outcome.json["findings"].push_back({{"kind", f.kind}, {"severity", data::name_of(f.severity)}, {"count", f.count}, {"items", f.items}});
  for (const data::CheckReport::Split& split : report.splits) outcome.json["stats"].push_back(stats_json(split));
  if (!common.json) {
    for (const std::string& line : finding_lines(report.findings)) print_line(line);
    for (const data::CheckReport::Split& split : report.splits) print_stats(split, flags.stats);
    if (report.findings.all().empty()) print_line("nothing found");
  }
  if (!flags.vis.empty()) {
    for (const auto& split : options.splits) draw_samples(split, flags.vis, options.exif);
  }
  if (!flags.fix_out.empty()) {
    data::Findings changes;
    data::write_fixed(options.splits[0].annotations, options.splits[0].images, options.exif, flags.fix_out, stream.pool(), changes);
    print_findings(changes, common.quiet);
  }
  if (report.findings.has(data::Finding::Severity::error)) {
    outcome.code = kData;
    outcome.error = "the data set cannot be used as it is: see the errors found";
  } else if (flags.fail_on == "warning" && report.findings.has(data::Finding::Severity::warning)) {
    outcome.code = kCheckFailed;
    outcome.error = "there are warnings, and --fail-on warning was asked for";
  }
  return outcome;
}

}  // namespace

Verb add_check_data(CLI::App& app, const CommonOptions& common) {
  const auto flags = std::make_shared<CheckFlags>();
  add_data_flags(app, flags->data);
  app.add_option("--decode", flags->decode, "pictures to decode in full: all, none or a number");
  app.add_flag("--duplicates", flags->duplicates, "look for the same picture in two places");
  app.add_flag("--stats", flags->stats, "print statistics");
  app.add_option("--vis", flags->vis, "folder for eight drawn samples of each split");
  app.add_option("--max-report", flags->max_report, "items of each kind")->check(whole_number(0));
  app.add_option("--fix-out", flags->fix_out, "write a repaired copy of the annotation file");
  app.add_option("--fail-on", flags->fail_on, "error (exit 3), or warning too (exit 9)")->check(CLI::IsMember({"error", "warning"}));
  return [flags, &common] { return run_check(*flags, common); };
}

}  // namespace detr::apps

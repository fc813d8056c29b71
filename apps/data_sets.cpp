#include "apps/data_sets.h"

#include <iostream>

#include "data/check.h"
#include "data/discover.h"
#include "data/prepare.h"
#include "runtime/error.h"

namespace detr::apps {
namespace {

/// Flags win over the configuration's paths; --data leaves the rest to be found.
data::DataPlace place_of(const DataFlags& flags, const train::RunConfig& config, const std::string& split) {
  data::DataPlace place;
  const train::SplitConfig& configured = split == "train" ? config.train : config.val;
  place.folder = flags.data;
  place.annotations = data::override_for(flags.annotations, split, flags.data.empty() ? "val" : split);
  place.images = data::override_for(flags.images, split, split);
  if (flags.data.empty() && place.annotations.empty()) place.annotations = configured.ann_file;
  if (flags.data.empty() && place.images.empty()) place.images = configured.img_folder;
  return place;
}

}  // namespace

Tell tell_stderr(bool quiet) {
  return [quiet](const std::string& line) {
    if (!quiet) std::cerr << line << '\n';
  };
}

void apply_data_flags(const DataFlags& flags, train::Config& config) {
  const auto text = [](const std::string& value) { return nlohmann::json(value).dump(); };
  if (!flags.exif.empty()) config.set("data.exif", text(flags.exif), "--exif");
  if (!flags.bad_images.empty()) config.set("data.bad_images", text(flags.bad_images), "--bad-images");
}

bool has_split(const DataFlags& flags, const train::RunConfig& config, const std::string& split) {
  const data::DataPlace place = place_of(flags, config, split);
  return !place.annotations.empty() || (!place.folder.empty() && data::has_split(place, split));
}

train::SplitData open_split(const DataFlags& flags, const train::RunConfig& config, const std::string& split, bool for_training, const Stream& stream, const Tell& tell) {
  const data::DataPlace place = place_of(flags, config, split);
  if (place.folder.empty() && place.annotations.empty()) throw DataError("no ", split, " data: --data DIR, or --ann ", split, "=FILE --images ", split, "=DIR");
  data::Findings findings;
  const bool lenient = !for_training || config.bad_images == data::BadImages::skip;
  data::DataSplit found = data::open_split(place, split, findings, lenient);
  data::PrepareOptions options;
  options.exif = config.exif;
  options.limits = config.limits;
  options.unusable = !for_training ? data::Unusable::keep : config.bad_images == data::BadImages::skip ? data::Unusable::drop : data::Unusable::refuse;
  data::prepare_for_training(found.data, found.images, options, stream.pool(), findings);
  for (const std::string& line : finding_lines(findings)) tell(line);
  const data::DataStats stats = data::data_stats(found.data);
  tell(concat("data      ", split, " ", stats.images, " images, ", stats.trainable, " boxes, ", stats.background, " background, ", stats.crowd, " crowd; most in one image ",
              stats.most_per_image, ", p99 ", stats.p99_per_image));
  return {std::make_shared<const data::CocoData>(std::move(found.data)), found.images};
}

void expect_same_classes(const std::string& what, const std::vector<data::Category>& a, const std::string& other, const std::vector<data::Category>& b) {
  const bool same = std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const data::Category& x, const data::Category& y) { return x.id == y.id && x.name == y.name; });
  if (!same) throw DataError(what, " has other categories than ", other, ": ", data::class_list(a), " against ", data::class_list(b));
}

}  // namespace detr::apps

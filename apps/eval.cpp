#include <fmt/format.h>

#include <iostream>

#include "apps/cli.h"
#include "apps/data_sets.h"
#include "apps/eval.h"
#include "apps/launch.h"
#include "apps/model_files.h"
#include "data/coco_eval.h"
#include "data/coco_results.h"
#include "data/loader.h"
#include "runtime/error.h"
#include "runtime/text.h"
#include "train/evaluate.h"

namespace detr::apps {
namespace {

struct EvalFlags {
  DataFlags data;
  std::string weights_file, weights = "auto", split = "val", truth, detections, save_json, imgsz;
  std::int64_t batch_size = 0, max_dets = 100;
  double min_score = 0, require_ap = -2;
};

nlohmann::json result_json(const data::EvalResult& result) {
  nlohmann::json stats = nlohmann::json::object();
  for (const auto& [name, value] : result.stats()) stats[std::string(name)] = number(value);
  nlohmann::json classes = nlohmann::json::array();
  for (const data::ClassResult& c : result.per_class) classes.push_back({{"id", c.id}, {"name", c.name}, {"boxes", c.boxes}, {"AP", number(c.AP)}, {"AP50", number(c.AP50)}});
  return {{"stats", stats}, {"per_class", classes}, {"confusion", result.confusion},
          {"best_f1", {{"conf", number(result.best_f1.conf)}, {"p", number(result.best_f1.p)}, {"r", number(result.best_f1.r)}, {"f1", number(result.best_f1.f1)}}},
          {"images", result.images}, {"dets", result.dets}};
}

void print_result(const data::EvalResult& result) {
  for (const std::string& line : data::summary_lines(result)) print_line(line);
  std::size_t width = 5;
  for (const data::ClassResult& c : result.per_class) width = std::max(width, std::min<std::size_t>(c.name.size(), 40));
  print_line(fmt::format("{:>20}  {:<{}}  {:>7}  {:>6}  {:>6}", "id", "class", width, "boxes", "AP", "AP50"));
  for (const data::ClassResult& c : result.per_class) print_line(fmt::format("{:>20}  {:<{}}  {:>7}  {:>6.3f}  {:>6.3f}", c.id, escaped(c.name.substr(0, 40)), width, c.boxes, c.AP, c.AP50));
}

std::vector<data::Detection> run_model(const EvalFlags& flags, const CommonOptions& common, const Stream& stream, train::SplitData& split, std::int64_t& queries) {
  LoadedModel loaded = load_model(flags.weights_file, flags.weights, common, stream);
  if (!flags.imgsz.empty()) {
    const PictureSize size = parse_size("--imgsz", flags.imgsz);
    loaded.config_tree.set_image_size(size.height, size.width, "--imgsz");
  }
  apply_data_flags(flags.data, loaded.config_tree);
  const std::int64_t classes = loaded.config.model.decoder.num_classes;
  loaded.config = loaded.config_tree.resolve();
  loaded.config.model.decoder.num_classes = classes;
  split = open_split(flags.data, loaded.config, flags.split, false, stream, tell_stderr(common.quiet));
  expect_same_classes(split.coco->file.string(), split.coco->categories, flags.weights_file, loaded.classes);
  data::LoaderOptions options;
  options.evaluation = true;
  options.transforms = loaded.config.val.transforms;
  options.batch_size = flags.batch_size > 0 ? flags.batch_size : loaded.config.val.batch_size;
  options.num_workers = loaded.config.val.num_workers;
  options.exif = loaded.config.exif;
  options.limits = loaded.config.limits;
  options.on_bad_image = [](const data::BadImage& bad) { std::cerr << escaped(concat("warning: image ", bad.image_id, " counts as one without detections: ", bad.reason)) << '\n'; };
  data::Loader loader(split.coco, split.images, data::select_images(*split.coco), options);
  queries = loaded.config.model.decoder.num_queries;
  return train::detect(*loaded.model, loader, loaded.classes, loaded.config.num_top_queries, loaded.store->compute_dtype(), stream);
}

Outcome run_eval(const EvalFlags& flags, const CommonOptions& common) {
  const Stream stream = open_stream(common);
  train::SplitData split;
  std::vector<data::Detection> detections;
  std::int64_t queries = 0;
  if (!flags.detections.empty()) {
    if (flags.truth.empty()) throw ConfigError("--from-json needs --gt ANNOTATIONS");
    if (!flags.weights_file.empty()) throw ConfigError("--from-json scores a results file; it excludes -r");
    data::Findings findings;
    split.coco = std::make_shared<const data::CocoData>(data::read_coco(flags.truth, findings));
    print_findings(findings, common.quiet);
    detections = data::read_detections(flags.detections);
  } else {
    if (!flags.truth.empty()) throw ConfigError("--gt goes with --from-json; a data set is given by --data, or --ann and --images");
    detections = run_model(flags, common, stream, split, queries);
  }
  std::erase_if(detections, [&](const data::Detection& d) { return d.score < flags.min_score; });
  if (!flags.save_json.empty()) data::write_detections(flags.save_json, detections);
  data::EvalOptions options;
  options.max_detections = static_cast<int>(flags.max_dets);
  options.threads = stream.pool().threads();
  const data::EvalResult result = data::evaluate(*split.coco, detections, options);

  Outcome outcome;
  outcome.json = result_json(result);
  if (!common.json) {
    print_result(result);
    if (queries > flags.max_dets && result.densest > flags.max_dets) {
      data::EvalOptions dense = options;
      dense.max_detections = static_cast<int>(queries);
      print_line(fmt::format("non-standard, maxDets={}: AP {:.3f}", queries, data::evaluate(*split.coco, detections, dense).AP));
    }
  }
  if (result.AP >= 0 && result.AP < 0.001 && !common.quiet) {
    for (const std::string& line : train::diagnose_low_ap(*split.coco, detections, options.threads)) std::cerr << "AP near 0: " << line << '\n';
  }
  if (result.AP < flags.require_ap) {
    outcome.code = kCheckFailed;
    outcome.error = fmt::format("AP {:.4f} is below --require-ap {}", result.AP, flags.require_ap);
  }
  return outcome;
}

}  // namespace

Outcome evaluate_weights(const EvalRequest& request, const CommonOptions& common) {
  EvalFlags flags;
  flags.data = request.data;
  flags.weights_file = request.weights_file;
  flags.imgsz = request.imgsz;
  flags.batch_size = request.batch_size;
  return run_eval(flags, common);
}

Verb add_eval(CLI::App& app, const CommonOptions& common) {
  const auto flags = std::make_shared<EvalFlags>();
  add_data_flags(app, flags->data);
  app.add_option("-r,--resume", flags->weights_file, "weights");
  app.add_option("--weights", flags->weights, "auto (those that scored best), ema or model")->check(CLI::IsMember({"auto", "ema", "model"}));
  app.add_option("--split", flags->split, "val, train or test")->check(CLI::IsMember({"val", "train", "test"}));
  app.add_option("--batch-size", flags->batch_size, "pictures at a time")->check(whole_number(1));
  app.add_option("--imgsz", flags->imgsz, "picture size, N or HxW, multiples of 32");
  app.add_option("--max-dets", flags->max_dets, "detections that count, per picture and class")->check(whole_number(1, 100000));
  app.add_option("--min-score", flags->min_score, "detections below do not count")->check(real_number(0, 1));
  app.add_option("--save-json", flags->save_json, "write the detections as a COCO results file");
  app.add_option("--gt", flags->truth, "annotation file, with --from-json");
  app.add_option("--from-json", flags->detections, "score this COCO results file; no model is run");
  app.add_option("--require-ap", flags->require_ap, "exit 9 where the AP is lower")->check(real_number(-1, 1));
  return [flags, &common] {
    expect_alone("eval");
    return run_eval(*flags, common);
  };
}

}  // namespace detr::apps

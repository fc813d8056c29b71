#include <fmt/format.h>

#include "apps/cli.h"
#include "data/synth.h"
#include "runtime/error.h"

namespace detr::apps {

Verb add_synth(CLI::App& app, const CommonOptions& common) {
  struct Flags {
    data::SynthOptions options;
    std::string size = "256x256", out;
  };
  const auto flags = std::make_shared<Flags>();
  data::SynthOptions& o = flags->options;
  app.add_option("--out", flags->out, "new or empty folder")->required();
  for (const char* unused : {"--config", "--update", "updates"}) app.remove_option(app.get_option(unused));   // no configuration is read here
  app.add_option("--images", o.images, "pictures of both splits")->check(whole_number(2));
  app.add_option("--val-share", o.val_share, "share of them for validation")->check(real_number(0, 1));
  app.add_option("--classes", o.classes, "classes")->check(whole_number(1));
  app.add_option("--size", flags->size, "HxW in pixels, or one number");
  app.add_flag("--vary-size", o.vary_size, "sides within 25 % of --size");
  app.add_option("--max-boxes", o.max_boxes, "most boxes in a picture")->check(whole_number(1));
  app.add_option("--empty-frac", o.empty_share, "share of pictures without boxes")->check(real_number(0, 1));
  app.add_option("--crowd-frac", o.crowd_share, "share of pictures with a crowd region")->check(real_number(0, 1));
  app.add_option("--bad", o.fault, "fault to write into the training annotations, for tests");
  return [flags, &common] {
    data::SynthOptions options = flags->options;
    options.out = flags->out;
    options.seed = common.seed;
    options.threads = open_stream(common).pool().threads();
    const PictureSize size = parse_size("--size", flags->size);
    options.height = size.height;
    options.width = size.width;
    const data::SynthCounts counts = data::make_synthetic(options);
    Outcome outcome;
    outcome.json = {{"out", flags->out}, {"train", counts.train}, {"val", counts.val}, {"boxes", counts.boxes}, {"crowds", counts.crowds}, {"empty", counts.empty}};
    if (!common.json)
      print_line(fmt::format("{}: {} train and {} val pictures, {} boxes, {} crowds, {} pictures without boxes", flags->out, counts.train, counts.val, counts.boxes, counts.crowds, counts.empty));
    return outcome;
  };
}

}  // namespace detr::apps

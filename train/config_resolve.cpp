#include "train/config_resolve.h"

#include <algorithm>
#include <array>
#include <limits>
#include <regex>
#include <type_traits>
#include <utility>

#include "runtime/error.h"
#include "runtime/gpus.h"
#include "runtime/text.h"

namespace detr::train {
namespace {

using schema::Json;

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

/// Reads values of a document whose keys were checked against the schema.
class Reader {
 public:
  Reader(const Json& root, const std::function<std::string(const std::string&)>& place) : root_(root), place_(place) {
    for (const schema::Key& key : schema::keys()) {
      if (key.kind != schema::Kind::ignored) check(key, std::string(key.path), at(key.path));
    }
  }

  const Json& at(std::string_view path) const {
    const Json* value = &root_;
    for (std::size_t begin = 0; begin <= path.size();) {
      const std::size_t end = std::min(path.find('.', begin), path.size());
      value = &value->at(std::string(path.substr(begin, end - begin)));
      begin = end + 1;
    }
    return *value;
  }

  template <class T>
  void read(T& out, std::string_view path) const { at(path).get_to(out); }

  /// Leaves `out` as it is where the value is null.
  template <class T>
  void read_unless_null(T& out, std::string_view path) const {
    if (!at(path).is_null()) read(out, path);
  }

  void read_unless_auto(std::optional<std::int64_t>& out, std::string_view path) const {
    if (at(path).is_number()) out = at(path).get<std::int64_t>();
  }

  template <class... Parts>
  [[noreturn]] void fail(const std::string& path, const Parts&... parts) const {
    throw ConfigError(path, place_(path), " ", parts...);
  }

  void check(const schema::Key& key, const std::string& path, const Json& value) const {
    if (schema::accepts(key, value)) return;
    std::string got = value.dump();
    if (got.size() > 80) got = got.substr(0, 77) + "...";
    fail(path, "must be ", schema::wanted(key), "; got ", got);
  }

 private:
  const Json& root_;
  const std::function<std::string(const std::string&)>& place_;
};

void read_model(const Reader& reader, models::ModelConfig& model) {
  models::BackboneConfig& b = model.backbone;
  reader.read(b.depth, "PResNet.depth");
  reader.read_unless_null(b.blocks, "PResNet.blocks");
  reader.read(b.widths, "PResNet.widths");
  reader.read(b.stem_width, "PResNet.stem_width");
  reader.read(b.freeze_at, "PResNet.freeze_at");
  reader.read(b.freeze_norm, "PResNet.freeze_norm");

  models::EncoderConfig& e = model.encoder;
  reader.read(e.hidden_dim, "HybridEncoder.hidden_dim");
  reader.read(e.dim_feedforward, "HybridEncoder.dim_feedforward");
  reader.read(e.nhead, "HybridEncoder.nhead");
  reader.read(e.expansion, "HybridEncoder.expansion");
  reader.read(e.depth_mult, "HybridEncoder.depth_mult");
  reader.read(e.pe_temperature, "HybridEncoder.pe_temperature");

  models::DecoderConfig& d = model.decoder;
  reader.read(d.num_classes, "num_classes");
  reader.read(d.hidden_dim, "RTDETRTransformerv2.hidden_dim");
  reader.read(d.num_queries, "RTDETRTransformerv2.num_queries");
  reader.read(d.num_layers, "RTDETRTransformerv2.num_layers");
  reader.read(d.nhead, "RTDETRTransformerv2.nhead");
  reader.read(d.dim_feedforward, "RTDETRTransformerv2.dim_feedforward");
  reader.read(d.num_points, "RTDETRTransformerv2.num_points");
  reader.read(d.num_denoising, "RTDETRTransformerv2.num_denoising");
  reader.read(d.label_noise_ratio, "RTDETRTransformerv2.label_noise_ratio");
  reader.read(d.box_noise_scale, "RTDETRTransformerv2.box_noise_scale");
  reader.read(d.eval_idx, "RTDETRTransformerv2.eval_idx");
  reader.read(d.cross_attn_method, "RTDETRTransformerv2.cross_attn_method");

  models::CriterionConfig& c = model.criterion;
  reader.read(c.weight_vfl, "RTDETRCriterionv2.weight_dict.loss_vfl");
  reader.read(c.weight_bbox, "RTDETRCriterionv2.weight_dict.loss_bbox");
  reader.read(c.weight_giou, "RTDETRCriterionv2.weight_dict.loss_giou");
  reader.read(c.alpha, "RTDETRCriterionv2.alpha");
  reader.read(c.gamma, "RTDETRCriterionv2.gamma");
  reader.read(c.cost_class, "RTDETRCriterionv2.matcher.weight_dict.cost_class");
  reader.read(c.cost_bbox, "RTDETRCriterionv2.matcher.weight_dict.cost_bbox");
  reader.read(c.cost_giou, "RTDETRCriterionv2.matcher.weight_dict.cost_giou");
  reader.read(c.matcher_alpha, "RTDETRCriterionv2.matcher.alpha");
  reader.read(c.matcher_gamma, "RTDETRCriterionv2.matcher.gamma");
  if (c.cost_class == 0 && c.cost_bbox == 0 && c.cost_giou == 0) reader.fail("RTDETRCriterionv2.matcher.weight_dict", "must have a cost above 0");
  model.validate();

  // The reference states these widths twice; here they follow from one place and are compared.
  const std::int64_t expansion = b.depth >= 50 ? 4 : 1;
  const Json maps = {expansion * b.widths[1], expansion * b.widths[2], expansion * b.widths[3]};
  const Json& in_channels = reader.at("HybridEncoder.in_channels");
  if (!in_channels.is_null() && in_channels != maps)
    reader.fail("HybridEncoder.in_channels", "is ", in_channels.dump(), ", but PResNet.depth ", b.depth, " and PResNet.widths make ", maps.dump(), "; leave it out, or write null");
  const Json& feat_channels = reader.at("RTDETRTransformerv2.feat_channels");
  if (!feat_channels.is_null() && feat_channels != Json(Json::array_t(3, e.hidden_dim)))
    reader.fail("RTDETRTransformerv2.feat_channels", "is ", feat_channels.dump(), ", but HybridEncoder.hidden_dim is ", e.hidden_dim, "; leave it out, or write null");
}

void read_optimizer(const Reader& reader, OptimizerConfig& o) {
  reader.read(o.lr, "optimizer.lr");
  reader.read(o.weight_decay, "optimizer.weight_decay");
  const auto betas = reader.at("optimizer.betas").get<std::array<double, 2>>();
  o.adam.beta1 = betas[0];
  o.adam.beta2 = betas[1];
  reader.read(o.adam.eps, "optimizer.eps");
  reader.read(o.clip_max_norm, "clip_max_norm");
  reader.read(o.use_ema, "use_ema");
  reader.read(o.ema_decay, "ema.decay");
  const Json& groups = reader.at("optimizer.params");
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const std::string path = concat("optimizer.params.", i);
    if (!groups[i].contains("params")) reader.fail(path, "must have params, an expression for the names of its parameters");
    for (const schema::Key& key : schema::entry_keys("optimizer.params", "")) {
      if (groups[i].contains(std::string(key.path))) reader.check(key, concat(path, ".", key.path), groups[i].at(std::string(key.path)));
    }
    GroupConfig group;
    groups[i].at("params").get_to(group.params);
    try {
      static_cast<void>(std::regex(group.params, std::regex::ECMAScript));
    } catch (const std::regex_error& error) {
      reader.fail(path + ".params", "is no expression: ", escape_control(group.params), ": ", error.what());
    }
    if (groups[i].contains("lr")) group.lr = groups[i].at("lr").get<double>();
    if (groups[i].contains("weight_decay")) group.weight_decay = groups[i].at("weight_decay").get<double>();
    o.groups.push_back(std::move(group));
  }
}

/// An op with what its entry says; fields that it leaves out keep the reference's defaults.
data::TransformOp transform_of(const Json& entry) {
  data::TransformOp op = data::make_transform(entry.at("type").get<std::string>());
  const auto read = [&](const char* name, auto& out) {
    if (entry.contains(name)) entry.at(name).get_to(out);
  };
  const auto read_size = [&](std::int64_t& first, std::int64_t& second) {
    std::array<std::int64_t, 2> size{first, second};
    read("size", size);
    first = size[0];
    second = size[1];
  };
  std::visit([&](auto& o) {
    using Op = std::decay_t<decltype(o)>;
    if constexpr (requires { o.p; }) read("p", o.p);
    if constexpr (requires { o.fill; }) read("fill", o.fill);
    if constexpr (std::is_same_v<Op, data::RandomPhotometricDistort>) {
      read("brightness", o.brightness);
      read("contrast", o.contrast);
      read("saturation", o.saturation);
      read("hue", o.hue);
    } else if constexpr (std::is_same_v<Op, data::RandomZoomOut>) {
      read("side_range", o.side_range);
    } else if constexpr (std::is_same_v<Op, data::RandomIoUCrop>) {
      read("min_scale", o.min_scale);
      read("max_scale", o.max_scale);
      read("min_aspect_ratio", o.min_aspect_ratio);
      read("max_aspect_ratio", o.max_aspect_ratio);
      read("sampler_options", o.sampler_options);
      read("trials", o.trials);
    } else if constexpr (std::is_same_v<Op, data::SanitizeBoundingBoxes>) {
      read("min_size", o.min_size);
    } else if constexpr (std::is_same_v<Op, data::Resize>) {
      read_size(o.height, o.width);
    } else if constexpr (std::is_same_v<Op, data::PadToSize>) {
      read_size(o.width, o.height);
    }
  }, op);
  return op;
}

std::vector<data::TransformOp> read_transforms(const Reader& reader, const std::string& list) {
  std::vector<data::TransformOp> ops;
  const Json& entries = reader.at(list);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::string path = concat(list, ".", i), type = entries[i].at("type").get<std::string>();
    for (const schema::Key& key : schema::entry_keys(list, type)) {
      const std::string name(key.path);
      if (entries[i].contains(name)) reader.check(key, path + "." + name, entries[i].at(name));
    }
    if (type == "ConvertPILImage" || type == "ConvertBoxes") continue;   // what the loader does anyway
    ops.push_back(transform_of(entries[i]));
    try {
      data::check_transform(ops.back());
    } catch (const ConfigError& error) {
      reader.fail(path, "is not right: ", error.what());
    }
  }
  return ops;
}

void check_size(const Reader& reader, const std::string& path, std::int64_t height, std::int64_t width, std::int64_t queries) {
  if (height < 32 || width < 32 || height % 32 != 0 || width % 32 != 0) reader.fail(path, "must make images with sides that are multiples of 32; got ", height, " x ", width);
  const std::int64_t cells = height / 8 * (width / 8) + height / 16 * (width / 16) + height / 32 * (width / 32);
  if (cells < queries)
    reader.fail(path, "makes images of ", height, " x ", width, " with ", cells, " feature cells, fewer than the ", queries, " of RTDETRTransformerv2.num_queries");
}

SplitConfig read_split(const Reader& reader, const std::string& loader, std::int64_t queries) {
  SplitConfig split;
  const std::string dataset = loader + ".dataset", list = dataset + ".transforms.ops";
  std::string ann_file, img_folder;
  reader.read_unless_null(ann_file, dataset + ".ann_file");
  reader.read_unless_null(img_folder, dataset + ".img_folder");
  split.ann_file = ann_file;
  split.img_folder = img_folder;
  reader.read(split.batch_size, loader + ".total_batch_size");
  reader.read(split.shuffle, loader + ".shuffle");
  reader.read(split.drop_last, loader + ".drop_last");
  split.num_workers = std::max(1, reader.at(loader + ".num_workers").get<int>());
  split.transforms = read_transforms(reader, list);
  std::array<std::int64_t, 2> size{};
  try {
    size = data::output_size(split.transforms);
  } catch (const ConfigError& error) {
    reader.fail(list, "is not right: ", error.what());
  }
  check_size(reader, list, size[0], size[1], queries);
  return split;
}

void read_training(const Reader& reader, SplitConfig& train, std::int64_t queries) {
  const std::string collate = "train_dataloader.collate_fn", policy = "train_dataloader.dataset.transforms.policy";
  reader.read_unless_null(train.scales, collate + ".scales");
  for (const std::int64_t side : train.scales) check_size(reader, collate + ".scales", side, side, queries);
  train.scales_stop_epoch = kNever;
  reader.read_unless_null(train.scales_stop_epoch, collate + ".stop_epoch");
  reader.read(train.policy.ops, policy + ".ops");
  for (const std::string& type : train.policy.ops) {
    const auto known = schema::op_types();
    if (std::find(known.begin(), known.end(), type) == known.end())
      reader.fail(policy + ".ops", "names no transform '", escape_control(type), "'; did you mean '", nearest_word(type, known), "'?");
  }
  train.policy.epoch = kNever;
  if (reader.at(policy + ".name") == "stop_epoch") reader.read_unless_null(train.policy.epoch, policy + ".epoch");
}

void read_data(const Reader& reader, RunConfig& run) {
  using enum data::Exif;
  const Json &exif = reader.at("data.exif"), &bad = reader.at("data.bad_images");
  run.exif = exif == "apply" ? apply : exif == "ignore" ? ignore : automatic;
  run.bad_images = bad == "skip" ? data::BadImages::skip : bad == "stop" ? data::BadImages::stop : data::BadImages::automatic;
  reader.read(run.max_bad_share, "data.max_bad_share");
  reader.read(run.limits.max_pixels, "data.max_pixels");
  reader.read(run.limits.max_side, "data.max_side");
  reader.read(run.drop_empty, "data.drop_empty");
}

}  // namespace

RunConfig resolve_config(const Json& root, const std::function<std::string(const std::string& path)>& place) {
  const Reader reader(root, place);
  RunConfig run;
  read_model(reader, run.model);
  read_optimizer(reader, run.optimizer);
  reader.read(run.epochs, "epochs");
  reader.read_unless_auto(run.warmup_steps, "lr_warmup_scheduler.warmup_duration");
  reader.read_unless_auto(run.ema_warmups, "ema.warmups");
  if (run.ema_warmups) run.optimizer.ema_warmups = static_cast<double>(*run.ema_warmups);
  reader.read(run.milestones, "lr_scheduler.milestones");
  reader.read(run.gamma, "lr_scheduler.gamma");
  run.train = read_split(reader, "train_dataloader", run.model.decoder.num_queries);
  read_training(reader, run.train, run.model.decoder.num_queries);
  run.val = read_split(reader, "val_dataloader", run.model.decoder.num_queries);
  reader.read(run.num_top_queries, "RTDETRPostProcessor.num_top_queries");
  reader.read(run.sync_bn, "sync_bn");

  const Json& pretrained = reader.at("PResNet.pretrained");
  if (pretrained == true) reader.fail("PResNet.pretrained", "cannot be true, as nothing is downloaded; give a file by --backbone FILE, or false for random weights");
  if (pretrained.is_string()) reader.read(run.backbone_weights, "PResNet.pretrained");
  // Not read in silence: a run without its weights would be another run.
  if (!reader.at("tuning").is_null()) reader.fail("tuning", "must be null, as nothing is downloaded; give the weights by -t FILE and set tuning=null");
  if (!reader.at("resume").is_null()) reader.fail("resume", "must be null; give the checkpoint by -r FILE");

  reader.read_unless_null(run.output_dir, "output_dir");
  reader.read(run.print_every, "print_every");
  reader.read(run.save_every, "save_every");
  reader.read(run.eval_every, "eval_every");
  reader.read(run.patience, "patience");
  reader.read(run.amp, "amp");
  reader.read(run.graph, "graph");
  reader.read(run.accum, "accum");
  reader.read(run.comm.backend, "comm.backend");
  reader.read(run.comm.timeout_s, "comm.timeout_s");
  reader.read(run.comm.start_timeout_s, "comm.start_timeout_s");
  reader.read(run.comm.bucket_mib, "comm.bucket_mib");
  reader.read(run.comm.bucket_dtype, "comm.bucket_dtype");
  reader.read(run.rank_rules, "compat.rank_rules");
  reader.read(run.max_skips, "max_skips");
  reader.read(run.seed, "seed");
  read_data(reader, run);
  return run;
}

DType compute_dtype(const std::string& amp, const Stream& stream) {
  if (amp == "off") return DType::f32;
  bool fast = false;
  if (!stream.device().is_cpu()) {
    const std::vector<Gpu> gpus = list_gpus();
    fast = gpus.at(static_cast<std::size_t>(stream.device().index)).compute_major >= 8;
  }
  if (amp == "bf16" && !fast) throw ConfigError("amp: bf16 needs a GPU of compute capability 8.0 or newer, and the device is ", stream.device(), "; auto or off");
  return fast ? DType::bf16 : DType::f32;
}

void expect_equal_parts(const RunConfig& config, std::int64_t ranks) {
  const std::int64_t size = config.train.batch_size, parts = ranks * config.accum, below = size / parts * parts;
  if (size % parts == 0) return;
  throw ConfigError("--batch-size ", size, " does not divide by ", ranks, ranks == 1 ? " rank" : " ranks", " x accum ", config.accum, "; ", below > 0 ? concat(below, " and ") : "", below + parts,
                    below > 0 ? " do" : " does");
}

}  // namespace detr::train

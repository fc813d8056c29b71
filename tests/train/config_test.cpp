#include "train/config.h"

#include "data/augment.h"
#include "kernels/optimizer.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::train;
using detr::test::expect_throws;
using detr::test::TempDir;
using detr::test::write_text;
namespace fs = std::filesystem;

namespace {

const fs::path kConfigs = fs::path(DETR_SOURCE_DIR) / "configs";
constexpr const char* kOps = "train_dataloader.dataset.transforms.ops";

/// A file with this text, loaded.
Config loaded(const std::string& text) {
  const TempDir folder;
  write_text(folder / "run.json", text);
  return Config::load((folder / "run.json").string(), kConfigs);
}

void expect_load_error(const std::string& text, const std::string& wanted) {
  INFO(text);
  expect_throws<ConfigError>([&] { loaded(text); }, wanted);
}

void expect_update_error(const std::string& assignment, const std::string& wanted) {
  INFO(assignment);
  Config config;
  const std::string before = config.to_json();
  expect_throws<ConfigError>([&] { config.update(assignment); }, wanted);
  CHECK(config.to_json() == before);
}

void expect_resolve_error(const std::string& assignment, const std::string& wanted) {
  INFO(assignment);
  Config config;
  config.update(assignment);
  expect_throws<ConfigError>([&] { config.resolve(); }, wanted);
}

RunConfig updated(const std::string& assignment) {
  Config config;
  config.update(assignment);
  return config.resolve();
}

std::string origin_of(const Config& config, const std::string& key) {
  for (const ConfigOrigin& origin : config.origins()) {
    if (origin.key == key) return origin.origin;
  }
  return "none";
}

}  // namespace

TEST_CASE("config: defaults are those of the structs", "[cpu]") {
  const RunConfig run = Config().resolve(), wanted;
  CHECK(run.model.backbone.depth == wanted.model.backbone.depth);
  CHECK(run.model.backbone.blocks == wanted.model.backbone.blocks);
  CHECK(run.model.backbone.widths == wanted.model.backbone.widths);
  CHECK(run.model.backbone.stem_width == wanted.model.backbone.stem_width);
  CHECK(run.model.backbone.freeze_at == wanted.model.backbone.freeze_at);
  CHECK(run.model.encoder.hidden_dim == wanted.model.encoder.hidden_dim);
  CHECK(run.model.encoder.pe_temperature == wanted.model.encoder.pe_temperature);
  CHECK(run.model.decoder.num_points == wanted.model.decoder.num_points);
  CHECK(run.model.decoder.num_classes == wanted.model.decoder.num_classes);
  CHECK(run.model.decoder.label_noise_ratio == wanted.model.decoder.label_noise_ratio);
  CHECK(run.model.criterion.matcher_alpha == wanted.model.criterion.matcher_alpha);
  CHECK(run.model.criterion.cost_bbox == wanted.model.criterion.cost_bbox);
  CHECK(run.optimizer.lr == wanted.optimizer.lr);
  CHECK(run.optimizer.adam.eps == wanted.optimizer.adam.eps);
  CHECK(run.optimizer.clip_max_norm == wanted.optimizer.clip_max_norm);
  CHECK(run.optimizer.ema_decay == wanted.optimizer.ema_decay);
  CHECK(run.optimizer.groups.empty());
  CHECK(run.epochs == wanted.epochs);
  CHECK_FALSE(run.warmup_steps.has_value());
  CHECK_FALSE(run.ema_warmups.has_value());
  CHECK(run.milestones == wanted.milestones);
  CHECK(run.print_every == wanted.print_every);
  CHECK(run.max_skips == wanted.max_skips);
  CHECK(run.max_bad_share == wanted.max_bad_share);
  CHECK(run.limits.max_pixels == wanted.limits.max_pixels);
  CHECK(run.limits.max_side == wanted.limits.max_side);
  CHECK(run.exif == wanted.exif);
  CHECK(run.comm.backend == wanted.comm.backend);
  CHECK(run.comm.timeout() == wanted.comm.timeout());
  CHECK(run.comm.start_timeout() == wanted.comm.start_timeout());
  CHECK(run.comm.bucket_mib == wanted.comm.bucket_mib);
  CHECK(run.comm.bucket_dtype == wanted.comm.bucket_dtype);
  CHECK(run.rank_rules == wanted.rank_rules);
  CHECK(run.train.batch_size == 16);
  CHECK(run.train.drop_last);
  CHECK_FALSE(run.val.drop_last);
  CHECK(run.train.scales.empty());
  CHECK(run.train.policy.epoch == data::TransformPolicy{}.epoch);
  CHECK(data::output_size(run.val.transforms) == std::array<std::int64_t, 2>{640, 640});
  const auto recipe = data::training_transforms(640, 640);
  REQUIRE(run.train.transforms.size() == recipe.size());
  for (std::size_t i = 0; i < recipe.size(); ++i) CHECK(data::type_of(run.train.transforms[i]) == data::type_of(recipe[i]));
  CHECK(std::get<data::RandomIoUCrop>(run.train.transforms[2]).p == 0.8);
  CHECK(std::get<data::RandomZoomOut>(run.train.transforms[1]).p == 0.5);
  CHECK(Config().notes().empty());
}

TEST_CASE("config: syntax errors name file and line", "[cpu]") {
  expect_load_error("{\n  \"epochs\": 3,\n  oops\n}", "run.json:3: ");
  expect_load_error("{\n  \"epochs\": 3\n  \"seed\": 1\n}", "run.json:3: ");
  expect_load_error("{\"epochs\": 3", "run.json:1: ");
  expect_load_error("", "run.json:1: ");
  expect_load_error("[1]", "run.json: must be an object");
  expect_load_error("{\n\"optimizer\": {\n\"lr\": 1e400}}", "run.json:3: number overflow");
  expect_load_error("{\n\"epochs\": 3,\n\"seed\": 1,\n\"epochs\": 4}", "run.json:4: the key 'epochs' comes twice");
  expect_load_error("{\"seed\": 1} {}", "run.json:1: ");
  const auto nested = [](int depth) { return "{\"scaler\": " + std::string(depth, '[') + std::string(depth, ']') + "}"; };
  CHECK_NOTHROW(loaded(nested(63)));
  expect_load_error(nested(64), "nested more than 64 deep");
  expect_throws<ConfigError>([] { Config::load("no/such.json", kConfigs); }, "no/such.json: there is no such configuration");
  expect_throws<ConfigError>([] { Config::load(kConfigs.string(), kConfigs); }, "is a folder");
  const TempDir folder;
  write_text(folder / "run.yml", "epoches: 3\n");
  expect_throws<ConfigError>([&] { Config::load((folder / "run.yml").string(), kConfigs); }, "reads JSON configurations, not YAML");
}

TEST_CASE("config: comments, byte order mark and exponents", "[cpu]") {
  const Config config = loaded("\xEF\xBB\xBF// first\n{\n  /* second */ \"optimizer\": {\"lr\": 1e-4}, // third\n  \"epochs\": 1e1\n}\n");
  CHECK(config.resolve().optimizer.lr == 1e-4);
  CHECK(config.resolve().epochs == 10);
  CHECK(config.name() == "run");
}

TEST_CASE("config: unknown keys name file, line and the nearest key", "[cpu]") {
  expect_load_error("{\n\n  \"epoch\": 3}", "unknown key 'epoch' (");
  expect_load_error("{\n\n  \"epoch\": 3}", "run.json:3); did you mean 'epochs'?");
  expect_load_error("{\"optimizer\": {\n\"learning_rate\": 1}}", "run.json:2); did you mean 'optimizer.lr'? all keys: detrtrain info keys optimizer");
  expect_load_error("{\"RTDETRCriterionv2\": {\"matcher\": {\"weight_dict\":\n{\"cost_bbx\": 1}}}}", "run.json:2); did you mean 'RTDETRCriterionv2.matcher.weight_dict.cost_bbox'?");
  expect_load_error("{\"Presnet\": {\"depth\": 18}}", "did you mean 'PResNet'?");
  expect_load_error("{\"lr\": 1}", "did you mean 'optimizer.lr'?");
  expect_load_error("{\"optimizer.lr\": 1}", "unknown key 'optimizer.lr'");
  expect_load_error("{\"epo\\nch\": 3}", "unknown key 'epo\\nch'");
  expect_load_error("{\"optimizer\": {\"params\": [\n{\"params\": \"norm\", \"weight_decai\": 0}]}}",
                    "unknown key 'optimizer.params.0.weight_decai'");
  expect_load_error("{\"optimizer\": {\"params\": [{\"params\": \"a\"}, {\"params\": \"norm\", \"learning_rate\": 0}]}}",
                    "did you mean 'optimizer.params.1.lr'?");
  expect_load_error("{\"val_dataloader\": {\"dataset\": {\"transforms\": {\"ops\": [{\"type\": \"Resize\", \"sise\": [1, 2]}]}}}}",
                    "did you mean 'val_dataloader.dataset.transforms.ops.0.size'?");
  expect_load_error("{\"val_dataloader\": {\"dataset\": {\"transforms\": {\"ops\": [{\"type\": \"Resise\"}]}}}}", "no such transform 'Resise'");
  expect_load_error("{\"val_dataloader\": {\"dataset\": {\"transforms\": {\"ops\": [{\"size\": [32, 32]}]}}}}", "has no type");
  expect_load_error("{\"optimizer\": 3}", "'optimizer' (");
  expect_load_error("{\"optimizer\": 3}", "holds keys and cannot be 3");
  expect_load_error("{\"lr_warmup_scheduler\": null}", "holds keys and cannot be null");
  CHECK(Config::nearest("RTDETRTransformerv2.num_querys") == "RTDETRTransformerv2.num_queries");
  CHECK(Config::nearest("stop_epoch") == "train_dataloader.collate_fn.stop_epoch");
}

TEST_CASE("config: unknown names list the built-in ones, nearest first", "[cpu]") {
  for (const auto& [reference, ours] : {std::pair("rtdetrv2_r18vd_120e_coco", "r18"), {"rtdetrv2_r34vd_120e_coco", "r34"}, {"rtdetrv2_r50vd_m_7x_coco", "r50m"},
                                       {"rtdetrv2_r50vd_6x_coco", "r50"}, {"rtdetrv2_r101vd_6x_coco", "r101"}})
    CHECK(Config::load(reference, kConfigs).to_json() == Config::load(ours, kConfigs).to_json());
  expect_throws<ConfigError>([] { Config::load("r1O1", kConfigs); }, "no configuration 'r1O1'; built-in: r101 ");
  expect_throws<ConfigError>([] { Config::load("tinny", kConfigs); }, "built-in: tiny ");
}

TEST_CASE("config: objects merge, lists and scalars are replaced, null overrides", "[cpu]") {
  const TempDir folder;
  write_text(folder / "base.json", R"({
  "optimizer": {"lr": 0.5, "weight_decay": 0.25, "params": [{"params": "a", "lr": 1}, {"params": "b"}]},
  "train_dataloader": {"collate_fn": {"scales": [320, 640], "stop_epoch": 9}, "dataset": {"transforms": {"policy": {"epoch": 7}}}},
  "seed": 3
})");
  write_text(folder / "second.json", R"({"seed": 4, "epochs": 20})");
  write_text(folder / "run.json", R"({
  "seed": 5,
  "__include__": ["base.json", "second.json"],
  "optimizer": {"lr": 0.75, "params": [{"params": "c", "weight_decay": 0}]},
  "train_dataloader": {"collate_fn": {"scales": null}, "dataset": {"transforms": {"policy": null}}}
})");
  const Config config = Config::load((folder / "run.json").string(), kConfigs);
  const RunConfig run = config.resolve();
  CHECK(run.seed == 5);
  CHECK(run.epochs == 20);
  CHECK(run.optimizer.lr == 0.75);
  CHECK(run.optimizer.weight_decay == 0.25);
  REQUIRE(run.optimizer.groups.size() == 1);
  CHECK(run.optimizer.groups[0].params == "c");
  CHECK_FALSE(run.optimizer.groups[0].lr.has_value());
  CHECK(run.optimizer.groups[0].weight_decay == 0.0);
  CHECK(run.train.scales.empty());
  CHECK(run.train.scales_stop_epoch == 9);
  CHECK(run.train.policy.epoch == data::TransformPolicy{}.epoch);
  CHECK(origin_of(config, "optimizer.lr") == (folder / "run.json").string() + ":4");
  CHECK(origin_of(config, "optimizer.weight_decay") == (folder / "base.json").string() + ":2");
  CHECK(origin_of(config, "epochs") == (folder / "second.json").string() + ":1");
  CHECK(origin_of(config, "optimizer.eps") == "default");
  CHECK(config.is_set("optimizer"));
  CHECK(config.is_set("optimizer.lr"));
  CHECK_FALSE(config.is_set("optimizer.eps"));
  CHECK_FALSE(config.is_set("PResNet"));
}

TEST_CASE("config: includes stay within the configuration tree and end", "[cpu]") {
  const TempDir folder;
  const auto load = [&](const std::string& name) { return Config::load((folder / name).string(), kConfigs); };
  write_text(folder / "a.json", R"({"__include__": ["b.json"]})");
  write_text(folder / "b.json", "{\n\"__include__\": [\"a.json\"]}");
  expect_throws<ConfigError>([&] { load("a.json"); }, "b.json:2: ");
  expect_throws<ConfigError>([&] { load("a.json"); }, "includes itself");
  for (int i = 0; i < 18; ++i) write_text(folder / ("c" + std::to_string(i) + ".json"), i == 17 ? "{}" : R"({"__include__": ["c)" + std::to_string(i + 1) + R"(.json"]})");
  CHECK_NOTHROW(load("c1.json"));
  expect_throws<ConfigError>([&] { load("c0.json"); }, "more than 16 deep");
  write_text(folder / "in/d.json", R"({"__include__": ["../b.json"]})");
  expect_throws<ConfigError>([&] { load("in/d.json"); }, "lies outside the configuration tree");
  write_text(folder / "configs/sub/e.json", R"({"__include__": ["../f.json"]})");
  write_text(folder / "configs/f.json", R"({"seed": 8})");
  CHECK(load("configs/sub/e.json").resolve().seed == 8);
  write_text(folder / "g.json", R"({"__include__": "f.json"})");
  expect_throws<ConfigError>([&] { load("g.json"); }, "g.json:1: __include__ must be a list of file names");
  write_text(folder / "h.json", R"({"__include__": ["missing.json"]})");
  expect_throws<ConfigError>([&] { load("h.json"); }, "missing.json: there is no such configuration");
  write_text(folder / "i.json", R"({"__include__": ["data.txt"]})");
  expect_throws<ConfigError>([&] { load("i.json"); }, "does not end in .json");
  write_text(folder / "j.json", R"({"__include__": ["x.yml"]})");
  expect_throws<ConfigError>([&] { load("j.json"); }, "not YAML");
}

TEST_CASE("config: the reference's names are written back as ours", "[cpu]") {
  Config config = loaded(R"({"epoches": 12, "print_freq": 7, "checkpoint_freq": 3, "train_dataloader": {"batch_size": 4}})");
  const RunConfig run = config.resolve();
  CHECK(run.epochs == 12);
  CHECK(run.print_every == 7);
  CHECK(run.save_every == 3);
  CHECK(run.train.batch_size == 4);
  const std::string text = config.to_json();
  for (const char* theirs : {"epoches", "print_freq", "checkpoint_freq", "\"batch_size\""}) CHECK(text.find(theirs) == std::string::npos);
  config.update("epoches=13");
  CHECK(config.resolve().epochs == 13);
  CHECK(config.is_set("epoches"));
  expect_load_error("{\"epochs\": 1,\n\"epoches\": 2}", "'epochs' and 'epoches' (");
  expect_load_error("{\"train_dataloader\": {\"total_batch_size\": 1, \"batch_size\": 2}}", "are one key");
}

TEST_CASE("config: updates take scalars as YAML does, and JSON", "[cpu]") {
  CHECK(updated("optimizer.lr=1e-3").optimizer.lr == 1e-3);
  CHECK(updated("optimizer.lr=.5").optimizer.lr == 0.5);
  CHECK(updated("optimizer.lr=+2.").optimizer.lr == 2);
  CHECK(updated("optimizer.lr=1").optimizer.lr == 1);
  CHECK(updated("epochs=1e2").epochs == 100);
  CHECK(updated("epochs=0x10").epochs == 16);
  CHECK(updated("epochs=0o17").epochs == 15);
  CHECK(updated(" epochs = 5 ").epochs == 5);
  CHECK(updated("seed=18446744073709551615").seed == 18446744073709551615u);
  for (const char* word : {"no", "False", "OFF", "false"}) CHECK_FALSE(updated(std::string("use_ema=") + word).optimizer.use_ema);
  for (const char* word : {"yes", "True", "on"}) CHECK(updated(std::string("PResNet.freeze_norm=") + word).model.backbone.freeze_norm);
  CHECK(updated("output_dir=runs/a b=c").output_dir == "runs/a b=c");
  CHECK(updated("output_dir='it''s'").output_dir == "it's");
  CHECK(updated("output_dir=\"a\\tb\"").output_dir == "a\tb");
  CHECK(updated("output_dir=2024").output_dir == "2024");
  CHECK(updated("output_dir='null'").output_dir == "null");
  for (const char* nothing : {"", "null", "~", "Null"}) CHECK(updated(std::string("output_dir=") + nothing).output_dir.empty());
  CHECK(updated("train_dataloader.collate_fn.scales=[320, 352]").train.scales == std::vector<std::int64_t>{320, 352});
  CHECK(updated(R"(ema={"decay": 0.5, "warmups": 10})").ema_warmups == 10);
  CHECK(updated("lr_warmup_scheduler.warmup_duration=0").warmup_steps == 0);
  CHECK_FALSE(updated("lr_warmup_scheduler.warmup_duration=auto").warmup_steps.has_value());
  CHECK(updated("RTDETRTransformerv2.num_points=2").model.decoder.num_points == std::vector<std::int64_t>{2, 2, 2});
  CHECK(updated("RTDETRTransformerv2.num_points.1=3").model.decoder.num_points == std::vector<std::int64_t>{4, 3, 4});

  expect_update_error("optimizer.lrr=1", "unknown key 'optimizer.lrr' (-u); did you mean 'optimizer.lr'?");
  expect_update_error("optimzer.lr=1", "did you mean 'optimizer.lr'?");
  expect_update_error("optimizer=3", "holds keys and cannot be 3");
  // As many decoder layers as a step has room for, with the encoder's proposals.
  CHECK(updated("RTDETRTransformerv2.num_layers=15").model.decoder.num_layers + 1 == static_cast<std::int64_t>(kernels::kMaxStatuses));
  expect_resolve_error("RTDETRTransformerv2.num_layers=16", "RTDETRTransformerv2.num_layers");
  expect_update_error("optimizer.lr.x=3", "unknown key 'optimizer.lr.x'");
  expect_update_error("ema={\"decai\": 1}", "did you mean 'ema.decay'?");
  expect_update_error("epochs", "wanted KEY=VALUE");
  expect_update_error("=3", "wanted KEY=VALUE");
  expect_update_error("betas=[1", "-u [1: ");
  expect_update_error("output_dir=\xff", "no UTF-8");
}

TEST_CASE("config: updates reach into lists", "[cpu]") {
  Config config;
  config.update(R"(optimizer.params=[{"params": "a"}, {"params": "b", "lr": 1}])");
  config.update("optimizer.params.1.lr=0.25");
  config.update("optimizer.params.0.weight_decay=0", "-u second");
  config.update(std::string(kOps) + ".5.size.0=320");
  config.update(std::string(kOps) + ".1.fill=114");
  const RunConfig run = config.resolve();
  CHECK(run.optimizer.groups[0].weight_decay == 0.0);
  CHECK(run.optimizer.groups[1].lr == 0.25);
  CHECK(data::output_size(run.train.transforms) == std::array<std::int64_t, 2>{320, 640});
  CHECK(std::get<data::RandomZoomOut>(run.train.transforms[1]).fill == std::array<std::uint8_t, 3>{114, 114, 114});
  CHECK(origin_of(config, "optimizer.params.0.weight_decay") == "-u second");
  CHECK(origin_of(config, kOps) == "default");
  config.update("optimizer.params.0={\"params\": \"z\"}");
  CHECK(origin_of(config, "optimizer.params.0.weight_decay") == "none");
  CHECK_FALSE(config.resolve().optimizer.groups[0].weight_decay.has_value());

  expect_throws<ConfigError>([&] { config.update("optimizer.params.2.lr=1"); }, "'optimizer.params' is a list of 2, numbered from 0; it has no '2'");
  expect_throws<ConfigError>([&] { config.update("optimizer.params.first.lr=1"); }, "it has no 'first'");
  expect_throws<ConfigError>([&] { config.update("optimizer.params.0.lrr=1"); }, "did you mean 'optimizer.params.0.lr'?");
  expect_throws<ConfigError>([&] { config.update(std::string(kOps) + ".0.brightnes=1"); }, "ops.0.brightness'?");
  expect_throws<ConfigError>([&] { config.update("train_dataloader.collate_fn.scales.0=320"); }, "unknown key");
}

TEST_CASE("config: a copy does not follow the original", "[cpu]") {
  Config config;
  const Config copy = config;
  config.update("seed=9");
  CHECK(copy.resolve().seed == 0);
  CHECK(config.resolve().seed == 9);
}

TEST_CASE("config: set() takes JSON and names the flag", "[cpu]") {
  Config config;
  config.set("train_dataloader.total_batch_size", "8", "--batch-size");
  config.set("PResNet.pretrained", "\"w.pth\"", "--backbone");
  CHECK(config.resolve().train.batch_size == 8);
  CHECK(config.resolve().backbone_weights == "w.pth");
  CHECK(origin_of(config, "train_dataloader.total_batch_size") == "--batch-size");
  expect_throws<ConfigError>([&] { config.set("seed", "x", "--seed"); }, "--seed: ");
  config.set("epochs", "0", "--epochs");
  expect_throws<ConfigError>([&] { config.resolve(); }, "epochs (--epochs) must be an integer of at least 1; got 0");
}

TEST_CASE("config: set_epochs moves the recipe's stop epochs", "[cpu]") {
  const auto stops = [](Config config, std::int64_t epochs) {
    config.set_epochs(epochs, "--epochs");
    const RunConfig run = config.resolve();
    CHECK(run.epochs == epochs);
    return std::pair(run.train.policy.epoch, run.train.scales_stop_epoch);
  };
  const Config r50 = Config::load("r50", kConfigs);
  CHECK(stops(r50, 36) == std::pair<std::int64_t, std::int64_t>(35, 35));   // 35.5 rounds to 36, which would leave no clean epoch
  CHECK(stops(r50, 144) == std::pair<std::int64_t, std::int64_t>(142, 142));
  CHECK(stops(r50, 10) == std::pair<std::int64_t, std::int64_t>(9, 9));
  CHECK(stops(r50, 1) == std::pair<std::int64_t, std::int64_t>(0, 0));
  Config own = r50;
  own.update("train_dataloader.collate_fn.stop_epoch=5");
  CHECK(stops(own, 144) == std::pair<std::int64_t, std::int64_t>(142, 5));
  own.set_epochs(144, "--epochs");
  own.set_epochs(72, "--epochs");
  CHECK(own.resolve().train.policy.epoch == 71);
  CHECK(stops(Config(), 3).first == data::TransformPolicy{}.epoch);   // never stays never
  CHECK_THROWS_AS(own.set_epochs(0, "--epochs"), ConfigError);
  Config moved = Config::load("r50", kConfigs);
  moved.update("epoches=12");
  CHECK(moved.resolve().train.policy.epoch == 71);
  REQUIRE(moved.notes().size() == 2);
  CHECK(moved.notes()[0] == "train_dataloader.dataset.transforms.policy.epoch: epoch 71 is never reached in 12 epochs");
}

TEST_CASE("config: set_image_size sets both splits and ends multi-scale", "[cpu]") {
  Config config = Config::load("r50", kConfigs);
  REQUIRE(config.resolve().train.scales.size() == 13);
  config.set_image_size(320, 416, "--imgsz");
  const RunConfig run = config.resolve();
  CHECK(data::output_size(run.train.transforms) == std::array<std::int64_t, 2>{320, 416});
  CHECK(data::output_size(run.val.transforms) == std::array<std::int64_t, 2>{320, 416});
  CHECK(run.train.scales.empty());
  CHECK(config.notes().empty());
  expect_throws<ConfigError>([&] { config.set_image_size(300, 320, "--imgsz"); }, "--imgsz: sides must be multiples of 32, got 300; 288 is near");
  expect_throws<ConfigError>([&] { config.set_image_size(0, 320, "--imgsz"); }, "got 0; 32 is near");
  config.update("val_dataloader.dataset.transforms.ops=[]");
  expect_throws<ConfigError>([&] { config.set_image_size(320, 320, "--imgsz"); }, "val_dataloader.dataset.transforms.ops has no Resize (-u)");
}

TEST_CASE("config: values of the wrong type or out of range name the key", "[cpu]") {
  expect_resolve_error("epochs=0", "epochs (-u) must be an integer of at least 1; got 0");
  expect_resolve_error("epochs=1.5", "epochs (-u) must be an integer of at least 1; got 1.5");
  expect_resolve_error("epochs=true", "got true");
  expect_resolve_error("epochs=9007199254740993", "epochs (-u) must be");
  expect_resolve_error("epochs=null", "got null");
  expect_resolve_error("optimizer.lr=-1", "optimizer.lr (-u) must be a number above 0; got -1.0");
  expect_resolve_error("optimizer.lr=fast", "got \"fast\"");
  expect_resolve_error("optimizer.lr=.nan", "got \".nan\"");
  expect_resolve_error("optimizer.betas=[0.9, 1]", "optimizer.betas (-u) must be a list of 2 numbers of at least 0 and below 1; got [0.9,1.0]");
  expect_resolve_error("optimizer.betas=[0.9]", "must be a list of 2 numbers");
  expect_resolve_error("use_ema=1", "use_ema (-u) must be true or false; got 1");
  expect_resolve_error("data.max_bad_share=1.1", "at least 0 and at most 1");
  expect_resolve_error("lr_warmup_scheduler.warmup_duration=soon", "must be an integer of at least 0 or \"auto\"; got \"soon\"");
  expect_resolve_error("ema.warmups=0", "ema.warmups (-u) must be an integer of at least 1 or \"auto\"");
  expect_resolve_error("optimizer.type=SGD", "optimizer.type (-u) must be \"AdamW\"; got \"SGD\"");
  expect_resolve_error("PResNet.variant=b", "PResNet.variant (-u) must be \"d\"");
  expect_resolve_error("PResNet.depth=52", "PResNet.depth (-u) must be 0 or 18 or 34 or 50 or 101; got 52");
  expect_resolve_error("PResNet.depth=0", "PResNet.blocks must have four entries");
  expect_resolve_error("HybridEncoder.use_encoder_idx=[1, 2]", "HybridEncoder.use_encoder_idx (-u) must be [2]");
  expect_resolve_error("HybridEncoder.dropout=0.1", "HybridEncoder.dropout (-u) must be 0.0");
  expect_resolve_error("HybridEncoder.nhead=7", "HybridEncoder.nhead must divide");
  expect_resolve_error("RTDETRTransformerv2.learn_query_content=true", "must be false");
  expect_resolve_error("RTDETRTransformerv2.query_select_method=agnostic", "must be \"default\"");
  expect_resolve_error("RTDETRTransformerv2.eval_idx=6", "is no layer of 6");
  expect_resolve_error("lr_scheduler.type=CosineAnnealingLR", "must be \"MultiStepLR\"");
  expect_resolve_error("RTDETR.backbone=HGNetv2", "must be \"PResNet\"");
  expect_resolve_error("train_dataloader.dataset.type=VOCDetection", "must be \"CocoDetection\"");
  expect_resolve_error("train_dataloader.shuffle=false", "train_dataloader.shuffle (-u) must be true");
  expect_resolve_error("RTDETRCriterionv2.losses=[\"focal\"]", "must be [\"vfl\",\"boxes\"] or");
  expect_resolve_error("RTDETRCriterionv2.matcher.weight_dict={\"cost_class\": 0, \"cost_bbox\": 0, \"cost_giou\": 0}", "must have a cost above 0");
  expect_resolve_error("PResNet.pretrained=true", "--backbone FILE");
  expect_resolve_error("tuning=https://example.org/w.pth", "-t FILE");
  expect_resolve_error("resume=a.safetensors", "-r FILE");
  CHECK(updated("PResNet.pretrained=~").backbone_weights.empty());
  expect_resolve_error("comm.backend=mpi", "comm.backend (-u) must be \"auto\" or \"nccl\" or \"gloo\"; got \"mpi\"");
  expect_resolve_error("comm.timeout_s=0", "comm.timeout_s (-u) must be a number of at least 0.1 and at most 86400");
  expect_resolve_error("comm.start_timeout_s=forever", "comm.start_timeout_s (-u) must be a number");
  expect_resolve_error("compat.rank_rules=1", "compat.rank_rules (-u) must be true or false");
  CHECK(updated("comm.timeout_s=2.5").comm.timeout() == std::chrono::milliseconds(2500));
}

TEST_CASE("config: widths that are stated twice must agree", "[cpu]") {
  CHECK_NOTHROW(updated("HybridEncoder.in_channels=[512, 1024, 2048]"));
  CHECK_NOTHROW(updated("RTDETRTransformerv2.feat_channels=[256, 256, 256]"));
  expect_resolve_error("HybridEncoder.in_channels=[128, 256, 512]", "HybridEncoder.in_channels (-u) is [128,256,512], but PResNet.depth 50 and PResNet.widths make [512,1024,2048]");
  expect_resolve_error("RTDETRTransformerv2.feat_channels=[384, 384, 384]", "but HybridEncoder.hidden_dim is 256");
}

TEST_CASE("config: parameter groups", "[cpu]") {
  expect_resolve_error("optimizer.params=[{\"lr\": 1}]", "optimizer.params.0 (-u) must have params");
  expect_resolve_error("optimizer.params=[{\"params\": \"(\"}]", "optimizer.params.0.params (-u) is no expression: (");
  expect_resolve_error("optimizer.params=[{\"params\": \"a\", \"lr\": -1}]", "optimizer.params.0.lr (-u) must be a number of at least 0");
  expect_resolve_error("optimizer.params=[3]", "optimizer.params (-u) must be a list of objects");
  expect_resolve_error("optimizer.params=3", "optimizer.params (-u) must be a list of objects");
}

TEST_CASE("config: transforms", "[cpu]") {
  const std::string list = "val_dataloader.dataset.transforms.ops";
  const RunConfig run = updated(list + R"(=[{"type": "RandomPhotometricDistort", "brightness": [1, 2], "contrast": [0, 1], "saturation": [0.5, 1], "hue": [0, 0.1], "p": 1},
    {"type": "RandomZoomOut", "fill": [1, 2, 3], "side_range": [1, 2], "p": 0},
    {"type": "RandomIoUCrop", "min_scale": 0.4, "max_scale": 0.9, "min_aspect_ratio": 0.25, "max_aspect_ratio": 4, "sampler_options": [0, 1], "trials": 3},
    {"type": "SanitizeBoundingBoxes", "min_size": 2}, {"type": "RandomHorizontalFlip", "p": 0.25},
    {"type": "Resize", "size": [64, 96]}, {"type": "PadToSize", "size": [160, 128], "fill": 7},
    {"type": "ConvertPILImage", "dtype": "float32", "scale": true}, {"type": "ConvertBoxes", "fmt": "cxcywh", "normalize": true}])");
  REQUIRE(run.val.transforms.size() == 7);
  const auto distort = std::get<data::RandomPhotometricDistort>(run.val.transforms[0]);
  CHECK(distort.brightness == std::array<double, 2>{1, 2});
  CHECK(distort.contrast == std::array<double, 2>{0, 1});
  CHECK(distort.saturation == std::array<double, 2>{0.5, 1});
  CHECK(distort.hue == std::array<double, 2>{0, 0.1});
  CHECK(distort.p == 1);
  const auto zoom = std::get<data::RandomZoomOut>(run.val.transforms[1]);
  CHECK(zoom.fill == std::array<std::uint8_t, 3>{1, 2, 3});
  CHECK(zoom.side_range == std::array<double, 2>{1, 2});
  CHECK(zoom.p == 0);
  const auto crop = std::get<data::RandomIoUCrop>(run.val.transforms[2]);
  CHECK(crop.min_scale == 0.4);
  CHECK(crop.max_scale == 0.9);
  CHECK(crop.min_aspect_ratio == 0.25);
  CHECK(crop.max_aspect_ratio == 4);
  CHECK(crop.sampler_options == std::vector<double>{0, 1});
  CHECK(crop.trials == 3);
  CHECK(crop.p == 1);
  CHECK(std::get<data::SanitizeBoundingBoxes>(run.val.transforms[3]).min_size == 2);
  CHECK(std::get<data::RandomHorizontalFlip>(run.val.transforms[4]).p == 0.25);
  const auto resize = std::get<data::Resize>(run.val.transforms[5]);
  CHECK((resize.height == 64 && resize.width == 96));
  const auto pad = std::get<data::PadToSize>(run.val.transforms[6]);   // the reference's size is (width, height) here
  CHECK((pad.height == 128 && pad.width == 160));
  CHECK(pad.fill == std::array<std::uint8_t, 3>{7, 7, 7});

  expect_resolve_error(list + "=null", list + " (-u) is not right: ");
  expect_resolve_error(list + R"(=[{"type": "Resize", "size": 640}])", list + ".0.size (-u) must be a list of 2 integers");
  expect_resolve_error(list + R"(=[{"type": "Resize", "size": [100, 64]}])", "multiples of 32; got 100 x 64");
  expect_resolve_error(list + R"(=[{"type": "Resize", "size": [64, 64]}])", "with 84 feature cells, fewer than the 300 of RTDETRTransformerv2.num_queries");
  expect_resolve_error(list + R"(=[{"type": "RandomIoUCrop", "min_scale": 2}])", list + ".0 (-u) is not right: transforms: RandomIoUCrop: ");
  expect_resolve_error(list + R"(=[{"type": "RandomHorizontalFlip", "p": 2}])", list + ".0.p (-u) must be a number of at least 0 and at most 1");
  expect_resolve_error(list + R"(=[{"type": "ConvertBoxes", "fmt": "xyxy"}])", list + ".0.fmt (-u) must be \"cxcywh\"");
  expect_resolve_error("train_dataloader.collate_fn.scales=[320, 330]", "multiples of 32; got 330 x 330");
  expect_resolve_error("train_dataloader.dataset.transforms.policy.ops=[\"Zoom\"]", "names no transform 'Zoom'");
  CHECK(updated("train_dataloader.dataset.transforms.policy={\"name\": \"default\", \"epoch\": 3}").train.policy.epoch == data::TransformPolicy{}.epoch);
}

TEST_CASE("config: keys without effect give one note", "[cpu]") {
  Config config = loaded(R"({"use_amp": true, "scaler": {"type": "GradScaler", "enabled": true}, "find_unused_parameters": false,
    "train_dataloader": {"dataset": {"return_masks": false}}})");
  REQUIRE(config.notes().size() == 1);
  CHECK(config.notes()[0] == "read without effect: use_amp, scaler, find_unused_parameters, train_dataloader.dataset.return_masks");
  CHECK_NOTHROW(config.resolve());
  config.update("scaler.enabled=false");
  CHECK(config.notes().size() == 1);
  CHECK(config.to_json() == Config().to_json());
  Config sizes;
  sizes.update("eval_spatial_size=[320, 320]");
  REQUIRE(sizes.notes().size() == 1);
  CHECK(sizes.notes()[0].find("eval_spatial_size [320,320] is not the size [640,640]") == 0);
}

TEST_CASE("config: the resolved document reads back as it was written", "[cpu]") {
  for (const char* name : {"r18", "r34", "r50m", "r50", "r101", "tiny"}) {
    INFO(name);
    Config config = Config::load(name, kConfigs);
    config.update("optimizer.lr=0.1234567890123456789");
    config.update("optimizer.params.0.weight_decay=3");
    config.update("seed=18446744073709551615");
    config.update("num_classes=3");
    config.set_epochs(7, "--epochs");
    const std::string text = config.to_json();
    const Config again = Config::parse(text);
    CHECK(again.to_json() == text);
    CHECK(Config::parse(config.to_json(-1)).to_json() == text);
    CHECK(config.to_json(-1).find('\n') == std::string::npos);
    const RunConfig a = config.resolve(), b = again.resolve();
    CHECK(a.optimizer.lr == b.optimizer.lr);
    CHECK(a.seed == b.seed);
    CHECK(a.train.policy.epoch == b.train.policy.epoch);
  }
  CHECK(Config::parse(R"({"seed": 2, "epochs": 3})").to_json() == Config::parse(R"({"epochs": 3, "seed": 2})").to_json());
  expect_throws<ConfigError>([] { Config::parse("[]"); }, "must be an object");
  expect_throws<ConfigError>([] { Config::parse("{\"sed\": 1}"); }, "unknown key 'sed' (checkpoint); did you mean 'seed'?");
}

TEST_CASE("config: keys for info", "[cpu]") {
  const auto groups = Config::keys("optimizer.params");
  REQUIRE(groups.size() == 4);
  CHECK(groups[0].key == "optimizer.params");
  CHECK(groups[2].key == "optimizer.params.*.lr");
  const auto lr = Config::keys("optimizer.lr");
  REQUIRE(lr.size() == 1);
  CHECK(lr[0].type == "number");
  CHECK(lr[0].default_value == "0.0001");
  CHECK_FALSE(lr[0].help.empty());
  CHECK(Config::keys("ema.warmups")[0].type == "integer | \"auto\"");
  CHECK(Config::keys("output_dir")[0].type == "text | null");
  const auto all = Config::keys();
  CHECK(all.size() > 120);
  for (const ConfigKey& key : all) CHECK_FALSE(key.help.empty());
  CHECK(Config::keys("no such").empty());
}

TEST_CASE("config: what a model computes in", "[cpu]") {
  const Stream cpu = Stream::cpu(1);
  CHECK(compute_dtype("auto", cpu) == DType::f32);
  CHECK(compute_dtype("off", cpu) == DType::f32);
  expect_throws<ConfigError>([&] { compute_dtype("bf16", cpu); }, "amp: bf16 needs a GPU of compute capability 8.0 or newer, and the device is cpu");
  Config config = Config::load("tiny", kConfigs);
  CHECK(config.resolve().amp == "auto");
  CHECK(config.resolve().graph);
  config.set("amp", R"("off")", "--amp");
  config.set("graph", "false", "--no-graph");
  CHECK(config.resolve().amp == "off");
  CHECK_FALSE(config.resolve().graph);
  expect_throws<ConfigError>([&] {
    config.update("amp=fp16");
    config.resolve();
  }, "amp");
}

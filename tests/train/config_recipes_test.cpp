// The configurations that come with the program.
#include <algorithm>

#include "data/augment.h"
#include "tests/support.h"
#include "train/config.h"

using namespace detr;
using namespace detr::train;
namespace fs = std::filesystem;

namespace {

const fs::path kConfigs = fs::path(DETR_SOURCE_DIR) / "configs";

}  // namespace

TEST_CASE("config: the built-in recipes are the published ones", "[cpu]") {
  struct Recipe {
    const char* name;
    std::int64_t epochs, stop;
    double first_lr;   // of the first group; 0: the optimiser's
    std::size_t groups;
    bool multi_scale;
  };
  for (const Recipe& recipe : {Recipe{"r18", 120, 117, 0, 1, false}, Recipe{"r34", 120, 117, 5e-5, 3, true}, Recipe{"r50m", 84, 81, 1e-5, 2, true},
                               Recipe{"r50", 72, 71, 1e-5, 2, true}, Recipe{"r101", 72, 71, 1e-6, 2, true}}) {
    INFO(recipe.name);
    const Config config = Config::load(recipe.name, kConfigs);
    CHECK(config.name() == recipe.name);
    CHECK(config.notes().empty());
    const RunConfig run = config.resolve();
    const models::ModelConfig& m = run.model;
    const models::ModelConfig wanted = models::variant_config(recipe.name);
    CHECK(m.backbone.depth == wanted.backbone.depth);
    CHECK(m.backbone.freeze_at == wanted.backbone.freeze_at);
    CHECK(m.backbone.freeze_norm == wanted.backbone.freeze_norm);
    CHECK(m.encoder.hidden_dim == wanted.encoder.hidden_dim);
    CHECK(m.encoder.dim_feedforward == wanted.encoder.dim_feedforward);
    CHECK(m.encoder.expansion == wanted.encoder.expansion);
    CHECK(m.decoder.num_layers == wanted.decoder.num_layers);
    CHECK(m.decoder.eval_idx == wanted.decoder.eval_idx);
    CHECK(m.decoder.num_queries == 300);
    CHECK(m.decoder.num_denoising == 100);
    CHECK((m.criterion.weight_vfl == 1 && m.criterion.weight_bbox == 5 && m.criterion.weight_giou == 2));
    CHECK((m.criterion.cost_class == 2 && m.criterion.cost_bbox == 5 && m.criterion.cost_giou == 2));
    CHECK(run.epochs == recipe.epochs);
    CHECK(run.train.policy.epoch == recipe.stop);
    CHECK(run.train.policy.ops == std::vector<std::string>{"RandomPhotometricDistort", "RandomZoomOut", "RandomIoUCrop"});
    CHECK(run.train.transforms.size() == 7);
    CHECK(run.train.scales.size() == (recipe.multi_scale ? 13 : 0));
    CHECK(std::count(run.train.scales.begin(), run.train.scales.end(), 640) == (recipe.multi_scale ? 3 : 0));
    if (recipe.multi_scale) CHECK(run.train.scales_stop_epoch == recipe.stop);
    CHECK(run.train.batch_size == 16);
    CHECK(run.val.batch_size == 32);
    CHECK(run.optimizer.lr == 1e-4);
    CHECK(run.optimizer.weight_decay == 1e-4);
    CHECK((run.optimizer.adam.beta1 == 0.9 && run.optimizer.adam.beta2 == 0.999));
    CHECK(run.optimizer.clip_max_norm == 0.1);
    CHECK(run.optimizer.ema_decay == 0.9999);
    REQUIRE(run.optimizer.groups.size() == recipe.groups);
    CHECK(run.optimizer.groups[0].lr.value_or(0) == recipe.first_lr);
    CHECK(run.optimizer.groups.back().weight_decay == 0.0);
    CHECK_FALSE(run.warmup_steps.has_value());
    CHECK_FALSE(run.ema_warmups.has_value());
    CHECK(run.backbone_weights.empty());
  }
}

TEST_CASE("config: tiny is small", "[cpu]") {
  const RunConfig run = Config::load("tiny", kConfigs).resolve();
  CHECK(data::output_size(run.train.transforms) == std::array<std::int64_t, 2>{256, 256});
  CHECK(data::output_size(run.val.transforms) == std::array<std::int64_t, 2>{256, 256});
  CHECK(run.model.backbone.blocks == std::vector<std::int64_t>{1, 1, 1, 1});
  CHECK(run.train.scales.empty());
  CHECK(run.train.policy.epoch < run.epochs);
  CHECK(Config::load("tiny", kConfigs).notes().empty());
}

#include "apps/model_files.h"

#include <iostream>

#include "runtime/error.h"

namespace detr::apps {

LoadedModel load_model(const std::string& weights_file, const std::string& weights, const CommonOptions& common, const Stream& stream) {
  if (weights_file.empty()) throw ConfigError("-r WEIGHTS is needed");
  const train::CheckpointInfo info = train::read_checkpoint_info(weights_file);
  LoadedModel loaded;
  loaded.config_tree = load_config(common, info.config);
  loaded.config = loaded.config_tree.resolve();
  loaded.classes = info.classes;
  loaded.config.model.decoder.num_classes = static_cast<std::int64_t>(info.classes.size());
  loaded.model = std::make_unique<models::RtDetr>(loaded.config.model);
  loaded.store = std::make_unique<train::ParameterStore>(loaded.model->parameters(), stream, DType::f32, train::compute_dtype(loaded.config.amp, stream));
  loaded.store->initialise(0);
  const auto choice = weights == "ema" ? train::WeightsChoice::ema : weights == "model" ? train::WeightsChoice::model : train::WeightsChoice::scored;
  loaded.report = train::load_weights(weights_file, *loaded.store, choice, false);
  if (!common.quiet) {
    const std::string used = weights == "auto" ? info.scored : weights;
    std::cerr << concat("weights   ", weights_file, " (", used, ", step ", info.state.step, "): ", loaded.report.matched, "/", loaded.report.tensors, " tensors\n");
  }
  return loaded;
}

}  // namespace detr::apps

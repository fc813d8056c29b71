#pragma once
#include <memory>
#include <string>
#include <vector>

#include "apps/cli.h"
#include "models/detr/rtdetr.h"
#include "train/checkpoint.h"
#include "train/store.h"

namespace detr::apps {

/// A model with weights, ready to run.
struct LoadedModel {
  train::RunConfig config;
  train::Config config_tree;
  std::vector<data::Category> classes;
  std::unique_ptr<models::RtDetr> model;
  std::unique_ptr<train::ParameterStore> store;
  train::WeightsReport report;
};

/// Loads -r: the configuration comes from the file unless -c is given, the classes too. `weights`: auto (those that were scored
/// best), ema or model.
LoadedModel load_model(const std::string& weights_file, const std::string& weights, const CommonOptions& common, const Stream& stream);

}  // namespace detr::apps

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "apps/cli.h"
#include "models/detr/rtdetr.h"
#include "runtime/build.h"
#include "runtime/error.h"
#include "runtime/gpus.h"
#include "runtime/safetensors.h"
#include "runtime/text.h"
#include "train/checkpoint.h"

namespace detr::apps {
namespace {

namespace fs = std::filesystem;

struct InfoFlags {
  std::string what;
  std::vector<std::string> arguments;
};

Outcome info_model(const CommonOptions& common) {
  const models::RtDetr model(load_config(common).resolve().model);
  struct Part {
    std::int64_t tensors = 0, values = 0, frozen = 0;
  };
  std::map<std::string, Part> parts;
  Part all;
  for (const Parameter& p : model.parameters().all()) {
    if (p.is_buffer()) continue;
    for (Part* part : {&parts[p.name().substr(0, p.name().find('.'))], &all}) {
      ++part->tensors;
      part->values += p.shape().numel();
      part->frozen += p.trainable() ? 0 : p.shape().numel();
    }
  }
  Outcome outcome;
  for (const auto& [name, part] : parts) {
    outcome.json["parts"][name] = {{"tensors", part.tensors}, {"parameters", part.values}, {"frozen", part.frozen}};
    if (!common.json) print_line(fmt::format("{:<10} {:>12} parameters in {} tensors, {} frozen", name, part.values, part.tensors, part.frozen));
  }
  outcome.json["parameters"] = all.values;
  outcome.json["trainable"] = all.values - all.frozen;
  if (!common.json) print_line(fmt::format("{:<10} {:>12} parameters in {} tensors, {} frozen", "all", all.values, all.tensors, all.frozen));
  if (common.verbose && !common.json) {
    for (const Parameter& p : model.parameters().all()) print_line(concat(p.name(), " ", p.shape(), p.is_buffer() ? " buffer" : p.trainable() ? "" : " frozen"));
  }
  return outcome;
}

Outcome info_checkpoint(const std::string& file, const CommonOptions& common) {
  const SafetensorsFile tensors(file);
  tensors.verify();
  Outcome outcome;
  outcome.json["tensors"] = tensors.names().size();
  if (!tensors.metadata().contains("checkpoint")) {
    if (!common.json) print_line(fmt::format("{}: {} tensors, no checkpoint of detrtrain", file, tensors.names().size()));
    return outcome;
  }
  const train::CheckpointInfo info = train::read_checkpoint_info(file);
  const std::vector<std::string> names = tensors.names();
  const bool complete = std::any_of(names.begin(), names.end(), [](const std::string& name) { return name.starts_with("optim."); });
  outcome.json.update({{"step", info.state.step}, {"epoch", info.state.epoch}, {"seed", info.state.seed}, {"finished", info.state.finished}, {"best_ap", number(info.state.best_ap)},
                       {"best_epoch", info.state.best_epoch}, {"ema_updates", info.ema_updates}, {"complete", complete}, {"written_by", info.version}, {"scored", info.scored},
                       {"state_hash", info.state_hash}, {"ranks", info.ranks}, {"manifest", info.manifest}});
  if (common.json) return outcome;
  print_line(escaped(fmt::format("{}: written by {}", file, info.version)));
  print_line(fmt::format("step {}, epoch {}, seed {}, {}; {} tensors, all hashes fit; {}", info.state.step, info.state.epoch, info.state.seed,
                     info.state.finished ? "finished" : "not finished", tensors.names().size(),
                         complete ? "complete state (-r)" : "weights alone (-t)"));
  if (!info.state_hash.empty()) print_line(escaped(fmt::format("state hash {} on {}", info.state_hash, info.ranks == 1 ? "one rank" : fmt::format("each of {} ranks", info.ranks))));
  if (info.state.best_epoch >= 0) print_line(fmt::format("best AP {:.4f} at epoch {} ({} weights)", info.state.best_ap, info.state.best_epoch, info.scored));
  print_line("classes " + escaped(data::class_list(info.classes)));
  return outcome;
}

Outcome info_keys(const std::string& prefix, const CommonOptions& common) {
  Outcome outcome;
  outcome.json["keys"] = nlohmann::json::array();
  for (const train::ConfigKey& key : train::Config::keys(prefix)) {
    outcome.json["keys"].push_back({{"key", key.key}, {"type", key.type}, {"default", key.default_value}, {"help", key.help}});
    if (!common.json) print_line(fmt::format("{} ({}, default {}): {}", key.key, key.type, key.default_value, key.help));
  }
  if (outcome.json["keys"].empty()) throw ConfigError("no key begins with '", prefix, "'; the nearest is '", train::Config::nearest(prefix), "'");
  return outcome;
}

Outcome info_config(const CommonOptions& common) {
  const train::Config config = load_config(common);
  config.resolve();
  Outcome outcome;
  outcome.json["config"] = nlohmann::json::parse(config.to_json());
  for (const train::ConfigOrigin& origin : config.origins()) outcome.json["origins"][origin.key] = origin.origin;
  if (common.json) return outcome;
  print_line(config.to_json());
  if (common.verbose) {
    for (const train::ConfigOrigin& origin : config.origins()) print_line("// " + origin.key + ": " + origin.origin);
  }
  return outcome;
}

Outcome info_configs(const CommonOptions& common) {
  Outcome outcome;
  outcome.json["configs"] = nlohmann::json::array();
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(builtin_configs())) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    outcome.json["configs"].push_back(name);
    if (!common.json) print_line(name);
  }
  return outcome;
}

Outcome info_devices(const CommonOptions& common) {
  const Stream stream = open_stream(common);
  Outcome outcome;
  outcome.json["devices"] = {{{"device", "cpu"}, {"threads", stream.pool().threads()}}};
  if (!common.json) print_line(fmt::format("cpu: {} threads", stream.pool().threads()));
  const std::vector<Gpu> gpus = list_gpus();
  for (std::size_t i = 0; i < gpus.size(); ++i) {
    const std::string device = fmt::format("cuda:{}", i), architecture = fmt::format("sm_{}{}", gpus[i].compute_major, gpus[i].compute_minor);
    outcome.json["devices"].push_back({{"device", device}, {"name", gpus[i].name}, {"memory_bytes", gpus[i].memory_bytes}, {"architecture", architecture}, {"usable", kHasCuda}});
    if (!common.json) print_line(fmt::format("{}: {}, {:.1f} GiB, {}", device, gpus[i].name, static_cast<double>(gpus[i].memory_bytes) / (1 << 30), architecture));
  }
  return outcome;
}

Outcome run_info(const InfoFlags& flags, const CommonOptions& common) {
  const auto argument = [&](const char* what) {
    if (flags.arguments.size() != 1) throw ConfigError("info ", flags.what, " needs ", what);
    return flags.arguments[0];
  };
  static const std::vector<std::string> kTopics = {"model", "ckpt", "config", "keys", "configs", "devices"};
  if (flags.what.empty()) throw ConfigError("info needs one of model, ckpt FILE, config, keys [PREFIX], configs, devices");
  if (std::find(kTopics.begin(), kTopics.end(), flags.what) == kTopics.end()) throw ConfigError("info knows no '", flags.what, "'; did you mean ", nearest_word(flags.what, kTopics), "?");
  if (flags.what == "model" || flags.what == "config" || flags.what == "configs" || flags.what == "devices") {
    // Bare KEY=VALUE lands here as well.
    if (!flags.arguments.empty()) throw ConfigError("info ", flags.what, " takes no '", flags.arguments[0], "'; keys are set by -u KEY=VALUE");
  }
  if (flags.what == "model") return info_model(common);
  if (flags.what == "ckpt") return info_checkpoint(argument("a file"), common);
  if (flags.what == "config") return info_config(common);
  if (flags.what == "keys") return info_keys(flags.arguments.empty() ? "" : argument("at most one prefix"), common);
  if (flags.what == "configs") return info_configs(common);
  return info_devices(common);
}

}  // namespace

Verb add_info(CLI::App& app, const CommonOptions& common) {
  const auto flags = std::make_shared<InfoFlags>();
  app.remove_option(app.get_option("updates"));   // here, what follows is a file or a prefix
  app.add_option("what", flags->what, "model, ckpt FILE, config, keys [PREFIX], configs or devices");
  app.add_option("arguments", flags->arguments, "FILE or PREFIX");
  return [flags, &common] { return run_info(*flags, common); };
}

}  // namespace detr::apps

#include "train/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "models/reference_layout.h"
#include "runtime/error.h"
#include "runtime/host_value.h"
#include "runtime/safetensors.h"

namespace detr::train {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kFormat = "1";
constexpr std::int64_t kMaxCount = std::int64_t{1} << 53;   // of steps, epochs, ...: what a JSON number holds exactly

/// Between our layout and the reference's, models/reference_layout.h: (N, P, C) with P pixels, and (N, C, P).
template <class T>
void permute(const Tensor& ours, Tensor& theirs, bool to_reference) {
  const Shape& shape = ours.shape();
  if (shape.rank() != 4) {
    const Tensor &from = to_reference ? ours : theirs, &into = to_reference ? theirs : ours;
    std::copy_n(from.data<T>(), ours.numel(), into.data<T>());
    return;
  }
  const std::int64_t pixels = shape[1] * shape[2], C = shape[3];
  T *a = ours.data<T>(), *b = theirs.data<T>();
  for (std::int64_t n = 0; n < shape[0]; ++n) {
    for (std::int64_t c = 0; c < C; ++c) {
      for (std::int64_t p = 0; p < pixels; ++p) {
        T &own = a[(n * pixels + p) * C + c], &other = b[(n * C + c) * pixels + p];
        if (to_reference) other = own;
        else own = other;
      }
    }
  }
}

Tensor to_reference(const Tensor& ours) {
  if (ours.rank() != 4) return ours;
  Tensor theirs = host_zeros(models::reference_shape(ours.shape()), ours.dtype());
  if (ours.dtype() == DType::f64) permute<double>(ours, theirs, true);
  else permute<float>(ours, theirs, true);
  return theirs;
}

/// Reads weights or moments into `ours`, in our layout and dtype. Throws StorageError where they are no finite numbers.
void read_values(const SafetensorsFile& file, const fs::path& path, const std::string& name, const Tensor& ours) {
  const Tensor theirs = file.read(name);
  const DType type = theirs.dtype();
  if (type != DType::f32 && type != DType::f64) throw StorageError(path.string(), ": ", name, " is ", type, ", wanted numbers with a fraction");
  for (std::int64_t i = 0; i < theirs.numel(); ++i) {
    if (!std::isfinite(host_value(theirs, i))) throw StorageError(path.string(), ": ", name, " has a value that is not finite");
  }
  Tensor source = theirs;
  if (source.dtype() != ours.dtype()) {
    source = host_zeros(theirs.shape(), ours.dtype());
    for (std::int64_t i = 0; i < theirs.numel(); ++i) {
      const double v = host_value(theirs, i);
      if (ours.dtype() == DType::f64) source.data<double>()[i] = v;
      else source.data<float>()[i] = static_cast<float>(v);
    }
  }
  if (ours.dtype() == DType::f64) permute<double>(ours, source, false);
  else permute<float>(ours, source, false);
}

std::map<std::string, std::string> metadata_of(const CheckpointInfo& info) {
  const RunState& s = info.state;
  const json state = {{"step", s.step}, {"epoch", s.epoch}, {"epoch_step", s.epoch_step}, {"seed", s.seed}, {"skipped", s.skipped}, {"skips_in_row", s.skips_in_row},
                      {"best_ap", s.best_ap}, {"best_epoch", s.best_epoch}, {"evaluations_since_best", s.evaluations_since_best}, {"finished", s.finished},
                      {"epoch_loss", s.epoch_loss}, {"epoch_terms", s.epoch_terms}, {"epoch_counted", s.epoch_counted},
                      {"warmup_steps", info.warmup_steps}, {"ema_ramp", info.ema_ramp}, {"epoch_samples", info.epoch_samples}, {"ranks", info.ranks}};
  json classes = json::array();
  for (const data::Category& c : info.classes) classes.push_back({{"id", c.id}, {"name", c.name}});
  return {{"detrtrain", info.version}, {"checkpoint", kFormat}, {"config", info.config}, {"classes", classes.dump()}, {"state", state.dump()},
          {"step", std::to_string(s.step)}, {"epoch", std::to_string(s.epoch)}, {"seed", std::to_string(s.seed)}, {"ema_updates", std::to_string(info.ema_updates)}, {"scored", info.scored},
          {"manifest", info.manifest}, {"state_hash", info.state_hash}};
}

/// A member that must be a whole number from `low` to `high`, and not only round to one.
std::int64_t whole_number_of(const json& object, const char* name, std::int64_t low, std::int64_t high) {
  const json& value = object.at(name);
  const bool fits = value.is_number_integer() && (!value.is_number_unsigned() || value.get<std::uint64_t>() <= static_cast<std::uint64_t>(kMaxCount));
  if (!fits || value.get<std::int64_t>() < low || value.get<std::int64_t>() > high) throw StorageError(name, " is ", value.dump(), ", wanted a whole number from ", low, " to ", high);
  return value.get<std::int64_t>();
}

std::int64_t count_of(const json& object, const char* name, std::int64_t high = kMaxCount) { return whole_number_of(object, name, 0, high); }

double number_of(const json& object, const char* name, double low = std::numeric_limits<double>::lowest(), double high = std::numeric_limits<double>::max()) {
  const json& value = object.at(name);
  if (!value.is_number() || !(value.get<double>() >= low && value.get<double>() <= high)) throw StorageError(name, " is ", value.dump(), ", wanted a number from ", low, " to ", high);
  return value.get<double>();
}

CheckpointInfo info_of(const std::map<std::string, std::string>& metadata, const fs::path& path) {
  if (!metadata.contains("checkpoint")) throw StorageError(path.string(), ": is no checkpoint of detrtrain; -t takes weights of others");
  if (metadata.at("checkpoint") != kFormat) throw StorageError(path.string(), ": checkpoint format ", metadata.at("checkpoint"), ", this build knows ", kFormat);
  try {
    CheckpointInfo info;
    const json s = json::parse(metadata.at("state"));
    info.state.step = count_of(s, "step");
    info.state.epoch = count_of(s, "epoch");
    info.state.epoch_step = count_of(s, "epoch_step");
    if (!s.at("seed").is_number_unsigned()) throw StorageError("seed is ", s.at("seed").dump());
    info.state.seed = s.at("seed");
    info.state.skipped = count_of(s, "skipped");
    info.state.skips_in_row = count_of(s, "skips_in_row");
    info.state.best_ap = number_of(s, "best_ap", -2, 1);
    info.state.best_epoch = whole_number_of(s, "best_epoch", -1, kMaxCount);
    info.state.evaluations_since_best = count_of(s, "evaluations_since_best");
    info.state.finished = s.at("finished").get<bool>();
    info.state.epoch_loss = number_of(s, "epoch_loss");
    info.state.epoch_terms = s.at("epoch_terms").get<NamedValues>();
    info.state.epoch_counted = count_of(s, "epoch_counted");
    info.warmup_steps = count_of(s, "warmup_steps");
    info.ema_ramp = number_of(s, "ema_ramp", 0);
    if (s.contains("epoch_samples")) info.epoch_samples = whole_number_of(s, "epoch_samples", -1, kMaxCount);
    if (s.contains("ranks")) info.ranks = whole_number_of(s, "ranks", 1, kMaxCount);
    if (metadata.contains("manifest")) info.manifest = metadata.at("manifest");
    if (metadata.contains("state_hash")) info.state_hash = metadata.at("state_hash");
    for (const json& c : json::parse(metadata.at("classes"))) info.classes.push_back({c.at("id"), c.at("name")});
    info.config = metadata.at("config");
    if (!json::accept(info.config)) throw StorageError("config is no JSON");
    info.ema_updates = count_of({{"ema_updates", json::parse(metadata.at("ema_updates"))}}, "ema_updates", info.state.step);
    info.version = metadata.at("detrtrain");
    info.scored = metadata.at("scored");
    if (info.scored != "ema" && info.scored != "model") throw StorageError("scored is '", info.scored, "'");
    return info;
  } catch (const std::exception& error) {
    throw StorageError(path.string(), ": metadata is not complete or not possible: ", error.what());
  }
}

void append_weights(std::vector<NamedTensor>& tensors, ParameterStore& store) {
  const Tensor weights = store.on_host(store.weights()), ema = store.on_host(store.ema());
  for (const Parameter& p : store.list().all()) {
    tensors.push_back({"model." + p.name(), to_reference(store.slice(weights, p))});
    tensors.push_back({"ema." + p.name(), to_reference(store.slice(ema, p))});
  }
}

/// Tensors whose shape follows from the number of classes.
bool depends_on_classes(const std::string& name) {
  return name.find("score_head") != std::string::npos || name.find("denoising_class_embed") != std::string::npos;
}

fs::path previous_of(const fs::path& file) { return file.string() + ".previous"; }

}  // namespace

std::string to_text(const CheckpointInfo& info) { return json(metadata_of(info)).dump(-1, ' ', false, json::error_handler_t::replace); }

CheckpointInfo info_from_text(const std::string& text) {
  try {
    return info_of(json::parse(text).get<std::map<std::string, std::string>>(), "run state");
  } catch (const std::exception& error) {
    throw CommError("the run state of rank 0 cannot be read: ", error.what());
  }
}

void save_checkpoint(const fs::path& file, ParameterStore& store, Optimizer& optimizer, const CheckpointInfo& info, const Moved& moved) {
  std::vector<NamedTensor> tensors;
  append_weights(tensors, store);
  const Tensor exp_avg = store.on_host(store.exp_avg()), exp_avg_sq = store.on_host(store.exp_avg_sq()), steps = optimizer.steps();
  for (std::size_t i = 0; i < store.trainable().size(); ++i) {
    const Parameter& p = store.trainable()[i];
    tensors.push_back({"optim.exp_avg." + p.name(), to_reference(store.slice(exp_avg, p))});
    tensors.push_back({"optim.exp_avg_sq." + p.name(), to_reference(store.slice(exp_avg_sq, p))});
    tensors.push_back({"optim.step." + p.name(), steps.view(static_cast<std::int64_t>(i), Shape{})});
  }
  write_safetensors(file, tensors, metadata_of(info), previous_of(file), moved);
}

void save_weights(const fs::path& file, ParameterStore& store, const CheckpointInfo& info, const Moved& moved) {
  std::vector<NamedTensor> tensors;
  append_weights(tensors, store);
  write_safetensors(file, tensors, metadata_of(info), {}, moved);
}

CheckpointInfo read_checkpoint_info(const fs::path& file) { return info_of(SafetensorsFile(file).metadata(), file); }

CheckpointInfo load_checkpoint(const fs::path& path, ParameterStore& store, Optimizer& optimizer, const Moved& moved) {
  const SafetensorsFile file(path, moved);
  const CheckpointInfo info = info_of(file.metadata(), path);
  const auto load = [&](const std::string& name, const Tensor& into) {
    if (!file.contains(name)) {
      const bool weights_only = name.starts_with("optim.");
      throw StorageError(path.string(), ": ", name, " is missing", weights_only ? "; the file holds weights alone: -t starts a new run from them" : ": it belongs to another model");
    }
    if (file.shape(name) != models::reference_shape(into.shape()))
      throw StorageError(path.string(), ": ", name, " is ", file.shape(name), ", wanted ", models::reference_shape(into.shape()), ": it belongs to another model");
    read_values(file, path, name, into);
  };
  const Tensor weights = store.on_host(store.weights()), ema = store.on_host(store.ema()), exp_avg = store.on_host(store.exp_avg()),
               exp_avg_sq = store.on_host(store.exp_avg_sq()), steps = optimizer.steps();
  for (const Parameter& p : store.list().all()) {
    load("model." + p.name(), store.slice(weights, p));
    load("ema." + p.name(), store.slice(ema, p));
  }
  for (std::size_t i = 0; i < store.trainable().size(); ++i) {
    const Parameter& p = store.trainable()[i];
    load("optim.exp_avg." + p.name(), store.slice(exp_avg, p));
    load("optim.exp_avg_sq." + p.name(), store.slice(exp_avg_sq, p));
    const std::string step = "optim.step." + p.name();
    if (!file.contains(step)) throw StorageError(path.string(), ": ", step, " is missing");
    if (file.shape(step) != Shape{}) throw StorageError(path.string(), ": ", step, " is ", file.shape(step), ", wanted one number");
    const Tensor count = file.read(step);
    if (count.dtype() != DType::i64) throw StorageError(path.string(), ": ", step, " is ", count.dtype(), ", wanted i64");
    const std::int64_t updates = count.data<std::int64_t>()[0];
    if (updates < 0 || updates > info.state.step) throw StorageError(path.string(), ": ", step, " is ", updates, ", wanted 0 to the run's ", info.state.step, " steps");
    steps.data<std::int64_t>()[i] = updates;
  }
  for (const std::string& name : file.names()) {
    const std::size_t dot = name.find('.');
    if (name.starts_with("model.") && !store.list().contains(name.substr(dot + 1))) throw StorageError(path.string(), ": ", name, " is no tensor of this model");
  }
  store.from_host(weights, store.weights());
  store.from_host(ema, store.ema());
  store.from_host(exp_avg, store.exp_avg());
  store.from_host(exp_avg_sq, store.exp_avg_sq());
  store.refresh_shadow();
  optimizer.set_steps(steps);
  optimizer.set_ema_updates(info.ema_updates);
  return info;
}

WeightsReport load_weights(const fs::path& path, ParameterStore& store, WeightsChoice choice, bool allow_partial, const Moved& moved) {
  const SafetensorsFile file(path, moved);
  const auto scored = file.metadata().find("scored");
  const bool ema = choice == WeightsChoice::ema || (choice == WeightsChoice::scored && scored != file.metadata().end() && scored->second == "ema");
  const std::vector<std::string> names = file.names();
  const bool ours = std::any_of(names.begin(), names.end(), [](const std::string& n) { return n.starts_with("model.backbone.") || n.starts_with("model.decoder."); }) &&
                    file.metadata().contains("checkpoint");
  const std::string prefix = !ours ? "" : ema ? "ema." : "model.";
  WeightsReport report;
  std::int64_t fixed_values = 0, fixed_matched = 0;
  const Tensor weights = store.on_host(store.weights());
  for (const Parameter& p : store.list().all()) {
    const std::string name = prefix + p.name();
    const std::int64_t values = p.shape().numel();
    const bool fits = file.contains(name) && file.shape(name) == models::reference_shape(p.shape());
    ++report.tensors;
    report.values += values;
    if (!depends_on_classes(p.name())) fixed_values += values;
    if (!file.contains(name)) report.missing.push_back(p.name());
    else if (!fits) report.reshaped.push_back(p.name());
    if (!fits) continue;
    read_values(file, path, name, store.slice(weights, p));
    ++report.matched;
    report.matched_values += values;
    if (!depends_on_classes(p.name())) fixed_matched += values;
  }
  for (const std::string& name : names) {
    if (!ours || name.starts_with(prefix)) {
      if (!store.list().contains(name.substr(prefix.size()))) report.unused.push_back(name);
    }
  }
  if (!allow_partial && static_cast<double>(fixed_matched) < 0.95 * static_cast<double>(fixed_values)) {
    const std::string first = report.reshaped.empty() ? (report.missing.empty() ? "" : report.missing[0] + " is missing") : report.reshaped[0] + " has another shape";
    throw StorageError(path.string(), ": fits ", 100 * static_cast<double>(report.matched_values) / static_cast<double>(report.values), " % of the weights (", report.matched, " of ",
                       report.tensors, " tensors; first: ", first, "); it belongs to another configuration (--allow-partial takes what fits)");
  }
  store.from_host(weights, store.weights());
  store.refresh_shadow();
  return report;
}

WeightsReport load_backbone(const fs::path& path, ParameterStore& store, const Moved& moved) {
  const SafetensorsFile file(path, moved);
  WeightsReport report;
  const Tensor weights = store.on_host(store.weights());
  for (const Parameter& p : store.list().all()) {
    if (!p.name().starts_with("backbone.")) continue;
    std::string found;
    for (const std::string& name : {"ema." + p.name(), "model." + p.name(), p.name(), p.name().substr(std::string("backbone.").size())}) {
      if (found.empty() && file.contains(name)) found = name;
    }
    if (found.empty()) throw StorageError(path.string(), ": has no ", p.name(), "; it is no backbone of this configuration");
    if (file.shape(found) != models::reference_shape(p.shape())) throw StorageError(path.string(), ": ", found, " is ", file.shape(found), ", wanted ", models::reference_shape(p.shape()));
    read_values(file, path, found, store.slice(weights, p));
    ++report.tensors;
    ++report.matched;
    report.values += p.shape().numel();
  }
  report.matched_values = report.values;
  store.from_host(weights, store.weights());
  store.refresh_shadow();
  return report;
}

fs::path newest_checkpoint(const fs::path& folder, std::vector<std::string>& skipped, const Moved& moved) {
  fs::path best;
  std::int64_t best_step = -1;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool candidate = name == "last.safetensors" || name == "last.safetensors.previous" || (name.starts_with("checkpoint") && name.ends_with(".safetensors"));
    if (!candidate) continue;
    try {
      const SafetensorsFile file(entry.path(), moved);
      const CheckpointInfo info = info_of(file.metadata(), entry.path());
      if (info.state.step <= best_step) continue;
      file.verify();
      best = entry.path();
      best_step = info.state.step;
    } catch (const StorageError& failure) {
      skipped.push_back(failure.what());
    }
  }
  return best;
}

std::string hash_text(std::span<const std::byte> bytes) {
  std::ostringstream out;
  out << std::hex << std::setw(16) << std::setfill('0') << hash_bytes(bytes);
  return out.str();
}

std::string state_hash(ParameterStore& store, Optimizer& optimizer) {
  std::uint64_t hash = 0;
  for (const Tensor& buffer : {store.weights(), store.ema(), store.exp_avg(), store.exp_avg_sq(), optimizer.steps()}) {
    const Tensor t = store.on_host(buffer);
    hash = hash_bytes({static_cast<const std::byte*>(t.raw()), static_cast<std::size_t>(t.bytes())}, hash);
  }
  std::ostringstream out;
  out << std::hex << std::setw(16) << std::setfill('0') << hash;
  return out.str();
}

}  // namespace detr::train

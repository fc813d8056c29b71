#include "train/config.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include "runtime/error.h"
#include "runtime/text.h"
#include "train/config_document.h"
#include "train/config_resolve.h"
#include "train/config_schema.h"

namespace detr::train {

using schema::Json;
namespace fs = std::filesystem;

namespace {

using Origins = std::map<std::string, std::string>;

constexpr const char* kTrainOps = "train_dataloader.dataset.transforms.ops";
constexpr const char* kValOps = "val_dataloader.dataset.transforms.ops";
constexpr const char* kScales = "train_dataloader.collate_fn.scales";
constexpr const char* kStops[] = {"train_dataloader.dataset.transforms.policy.epoch", "train_dataloader.collate_fn.stop_epoch"};
constexpr const char* kUpdate = "-u";

struct Builtin {
  const char *name, *file;
};
constexpr Builtin kBuiltin[] = {{"r18", "rtdetrv2_r18vd.json"}, {"r34", "rtdetrv2_r34vd.json"},   {"r50m", "rtdetrv2_r50vd_m.json"},
                                {"r50", "rtdetrv2_r50vd.json"}, {"r101", "rtdetrv2_r101vd.json"}, {"tiny", "rtdetrv2_tiny.json"}};

std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> names(1);
  for (const char c : path) {
    if (c == '.') names.emplace_back();
    else names.back() += c;
  }
  return names;
}

/// The value at a path of the schema.
template <class Document>
auto& value_at(Document& root, std::string_view path) {
  auto* value = &root;
  for (const std::string& name : split(std::string(path))) value = &(*value)[name];
  return *value;
}

[[noreturn]] void unknown_key(const std::string& path, const std::string& place, const std::string& nearest) {
  const std::string section = path.substr(0, path.find('.'));
  throw ConfigError("unknown key '", escape_control(path), "' (", place, "); did you mean '", nearest, "'? all keys: detrtrain info keys",
                    schema::is_section(section) ? " " + section : std::string());
}

/// The entries of a list of objects in one form. Throws for a key that they do not have and for an unknown type; values are judged later.
Json checked_entries(const std::string& list, Json entries, const std::string& place) {
  if (!entries.is_array()) return entries;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    Json& entry = entries[i];
    if (!entry.is_object()) continue;
    const std::string path = join(list, std::to_string(i));
    std::string type;
    if (schema::has_typed_entries(list)) {
      if (!entry.contains("type") || !entry.at("type").is_string()) throw ConfigError(path, " has no type (", place, "); such as \"Resize\"");
      type = entry.at("type").get<std::string>();
      if (schema::entry_keys(list, type).empty())
        throw ConfigError(path, ".type: no such transform '", escape_control(type), "' (", place, "); did you mean '", nearest_word(type, schema::op_types()), "'?");
    }
    const auto known = schema::entry_keys(list, type);
    for (auto& [name, value] : entry.items()) {
      const auto key = std::find_if(known.begin(), known.end(), [&](const schema::Key& k) { return k.path == name; });
      if (key == known.end()) {
        std::vector<std::string> names;
        for (const schema::Key& k : known) names.emplace_back(k.path);
        unknown_key(join(path, name), place, join(path, name == "learning_rate" ? "lr" : nearest_word(name, names)));
      }
      value = schema::normalised(*key, value);
    }
  }
  return entries;
}

/// A configuration being changed; what it throws leaves the Config as it was.
struct Draft {
  Json root;
  Origins origins;

  void assign(const schema::Key& key, Json value, const std::string& origin) {
    const std::string path(key.path);
    origins.erase(origins.lower_bound(path + "."), origins.lower_bound(path + "/"));   // '/' follows '.': all below the path
    origins[path] = origin;
    store(key, std::move(value), origin);
  }

  /// " (file:line)" of a key, or of what it is part of; empty for a default.
  std::string place(std::string path) const {
    while (!origins.contains(path)) {
      const auto dot = path.rfind('.');
      if (dot == std::string::npos) return {};
      path.erase(dot);
    }
    return concat(" (", origins.at(path), ")");
  }

  void store(const schema::Key& key, Json value, const std::string& origin) {
    if (key.kind == schema::Kind::ignored) return;
    value = schema::normalised(key, std::move(value));
    value_at(root, key.path) = key.kind == schema::Kind::objects ? checked_entries(std::string(key.path), std::move(value), origin) : std::move(value);
  }

  void reset(const std::string& section, const std::string& origin) {
    for (const schema::Key& key : schema::keys()) {
      if (key.path.starts_with(section + ".") && key.kind != schema::Kind::ignored) assign(key, Json::parse(key.fallback), origin);
    }
  }

  /// Sets a whole section: an object, or null where the section may be left out.
  void merge_section(const std::string& path, const Json& value, const ConfigDocument& document) {
    if (value.is_null() && schema::is_nullable_section(path)) reset(path, document.place(path));
    else if (value.is_object()) merge(path, value, document);
    else throw ConfigError("'", path, "' (", document.place(path), ") holds keys and cannot be ", value.dump().substr(0, 40), "; all keys: detrtrain info keys ", path);
  }

  void merge(const std::string& section, const Json& object, const ConfigDocument& document) {
    std::map<std::string, std::string> seen;   // ours -> as written
    for (const auto& [name, value] : object.items()) {
      const std::string written = join(section, name), path = schema::canonical(written), place = document.place(written);
      if (name.find('.') != std::string::npos || name.empty()) unknown_key(written, place, schema::nearest(written));
      if (const auto [other, fresh] = seen.emplace(path, written); !fresh)
        throw ConfigError("'", other->second, "' and '", written, "' (", place, ") are one key; keep one of them");
      if (const schema::Key* key = schema::find(path)) assign(*key, value, place);
      else if (schema::is_section(path)) merge_section(path, value, document);
      else unknown_key(written, place, schema::nearest(written));
    }
  }

  /// Sets the key, the section or the part of a list that a path names.
  void set(const std::string& written, const Json& value, const std::string& origin) {
    const std::string path = schema::canonical(written);
    if (const schema::Key* key = schema::find(path)) return assign(*key, value, origin);
    if (schema::is_section(path)) {
      ConfigDocument document;
      document.name = origin;
      return merge_section(path, value, document);
    }
    for (std::size_t dot = path.rfind('.'); dot != std::string::npos && dot > 0; dot = path.rfind('.', dot - 1)) {
      const std::string list = path.substr(0, dot);
      if (const schema::Key* key = schema::find(schema::canonical(list))) return set_part(*key, path.substr(dot + 1), value, origin);
    }
    unknown_key(written, origin, schema::nearest(written));
  }

  void set_part(const schema::Key& key, const std::string& rest, const Json& value, const std::string& origin) {
    const std::string list(key.path), full = list + "." + rest;
    if (key.kind == schema::Kind::ignored) return assign(key, value, origin);
    Json whole = value_at(root, key.path);
    Json* part = &whole;
    std::string path = list;
    for (const std::string& name : split(rest)) {
      if (part->is_array()) {
        const bool digits = !name.empty() && name.size() < 10 && name.find_first_not_of("0123456789") == std::string::npos;
        if (!digits || std::stoul(name) >= part->size()) throw ConfigError("'", full, "' (", origin, "): '", path, "' is a list of ", part->size(), ", numbered from 0; it has no '", name, "'");
        part = &(*part)[std::stoul(name)];
      } else if (part->is_object()) {
        part = &(*part)[name];
      } else {
        unknown_key(full, origin, path);
      }
      path = join(path, name);
    }
    *part = value;
    store(key, std::move(whole), origin);
    origins.erase(origins.lower_bound(full + "."), origins.lower_bound(full + "/"));
    origins[full] = origin;
  }
};

Draft defaults() {
  Draft draft{Json::object(), {}};
  for (const schema::Key& key : schema::keys()) draft.store(key, Json::parse(key.fallback), "default");
  return draft;
}

std::optional<std::int64_t> integer_at(const Json& root, const char* path) {
  const Json& value = value_at(root, path);
  return value.is_number_integer() ? std::optional(value.get<std::int64_t>()) : std::nullopt;
}

/// The last Resize of a list of transforms, or null.
const Json* last_resize(const Json& ops) {
  const Json* size = nullptr;
  for (const Json& op : ops) {
    if (op.is_object() && op.value("type", Json()) == "Resize" && op.contains("size")) size = &op.at("size");
  }
  return size;
}

std::vector<std::string> notes_on(const Json& root, const Origins& origins) {
  std::vector<std::string> notes;
  std::string ignored;
  for (const schema::Key& key : schema::keys()) {
    if (key.kind == schema::Kind::ignored && origins.contains(std::string(key.path))) ignored += concat(ignored.empty() ? "" : ", ", key.path);
  }
  if (!ignored.empty()) notes.push_back("read without effect: " + ignored);
  const auto epochs = integer_at(root, "epochs");
  for (const char* path : kStops) {
    const auto stop = integer_at(root, path);
    if (epochs && stop && *stop >= *epochs && (path != kStops[1] || !value_at(root, kScales).is_null())) notes.push_back(concat(path, ": epoch ", *stop, " is never reached in ", *epochs, " epochs"));
  }
  const Json& spatial = value_at(root, "eval_spatial_size");
  const Json* resize = last_resize(value_at(root, kValOps));
  if (resize && !spatial.is_null() && spatial != *resize) notes.push_back(concat("eval_spatial_size ", spatial.dump(), " is not the size ", resize->dump(), " of the validation Resize, which counts"));
  return notes;
}

/// Writes a size into each Resize and PadToSize of a split. Throws where there is no Resize.
void resize_split(Draft& draft, const char* list, std::int64_t height, std::int64_t width, const std::string& origin) {
  Json ops = value_at(draft.root, list);
  bool resizes = false;
  for (Json& op : ops) {
    const Json type = op.is_object() ? op.at("type") : Json();
    resizes = resizes || type == "Resize";
    if (type == "Resize") op["size"] = {height, width};
    if (type == "PadToSize") op["size"] = {width, height};
  }
  if (!resizes) throw ConfigError(origin, ": ", list, " has no Resize", draft.place(list));
  draft.set(list, ops, origin);
}

}  // namespace

struct Config::Tree {
  Draft draft;
};

void Config::adopt(Tree changed) {
  notes_ = notes_on(changed.draft.root, changed.draft.origins);
  tree_ = std::make_shared<const Tree>(std::move(changed));
}

Config::Config() : name_("default") { adopt({defaults()}); }

Config Config::load(const std::string& name_or_file, const fs::path& builtin_folder) {
  Config config;
  fs::path file = name_or_file;
  config.name_ = file.stem().string();
  const auto builtin = std::find_if(std::begin(kBuiltin), std::end(kBuiltin), [&](const Builtin& b) { return b.name == name_or_file; });
  std::error_code error;
  const bool is_name = builtin == std::end(kBuiltin) && name_or_file.find('/') == std::string::npos && !file.has_extension() && !fs::exists(file, error);
  if (builtin != std::end(kBuiltin)) {
    file = builtin_folder / builtin->file;
    config.name_ = builtin->name;
  } else if (is_name) {
    file = builtin_folder / (name_or_file + ".json");   // the reference's names, such as rtdetrv2_r50vd_6x_coco
  }
  if (is_name && !fs::exists(file, error)) {
    std::vector<std::string> names;
    for (const Builtin& b : kBuiltin) names.emplace_back(b.name);
    std::stable_sort(names.begin(), names.end(), [&](const auto& a, const auto& b) { return edit_distance(name_or_file, a) < edit_distance(name_or_file, b); });
    std::string known;
    for (const std::string& name : names) known += " " + name;
    throw ConfigError("no configuration '", escape_control(name_or_file), "'; built-in:", known, "; or a file");
  }
  Draft draft = config.tree_->draft;
  for (const ConfigDocument& document : read_documents(file)) draft.merge("", document.root, document);
  config.adopt({std::move(draft)});
  return config;
}

Config Config::parse(const std::string& resolved_json) {
  Config config;
  ConfigDocument document = parse_document(resolved_json, "checkpoint", false);
  if (!document.root.is_object()) throw ConfigError("checkpoint: the configuration must be an object { ... }");
  Draft draft = config.tree_->draft;
  draft.merge("", document.root, document);
  config.adopt({std::move(draft)});
  config.name_ = "checkpoint";
  return config;
}

void Config::update(const std::string& assignment, const std::string& origin) {
  const auto equals = assignment.find('=');
  const auto first = assignment.find_first_not_of(" \t"), last = assignment.substr(0, equals).find_last_not_of(" \t");
  if (equals == std::string::npos || first >= equals) throw ConfigError(origin, " ", escape_control(assignment), ": wanted KEY=VALUE");
  const std::string path = assignment.substr(first, last + 1 - first), written = assignment.substr(equals + 1);
  Json value = parse_value(written, origin);
  // A folder may be called 2024.
  if (const schema::Key* key = schema::find(schema::canonical(path)); key && key->kind == schema::Kind::text) {
    const bool is_choice = value.is_boolean() && key->rule.only.find("\"" + written + "\"") != std::string_view::npos;   // amp=off
    if (value.is_number() || is_choice) value = written;
  }
  Draft draft = tree_->draft;
  draft.set(path, value, origin);
  adopt({std::move(draft)});
}

void Config::set(const std::string& key, const std::string& json_value, const std::string& origin) {
  Draft draft = tree_->draft;
  draft.set(key, parse_document(json_value, origin, false).root, origin);
  adopt({std::move(draft)});
}

void Config::set_epochs(std::int64_t epochs, const std::string& origin) {
  if (epochs < 1) throw ConfigError(origin, ": wanted at least 1 epoch, got ", epochs);
  Draft draft = tree_->draft;
  const auto before = integer_at(draft.root, "epochs");
  for (const char* path : kStops) {
    const auto stop = integer_at(draft.root, path);
    const auto set_by = draft.origins.find(path);
    const bool by_user = set_by != draft.origins.end() && set_by->second.starts_with(kUpdate);
    if (!before || *before < 1 || !stop || by_user) continue;
    const double moved = std::round(static_cast<double>(*stop) * static_cast<double>(epochs) / static_cast<double>(*before));
    draft.set(path, std::clamp(static_cast<std::int64_t>(moved), std::int64_t{0}, epochs - 1), "moved by " + origin);
  }
  draft.set("epochs", epochs, origin);
  adopt({std::move(draft)});
}

void Config::set_image_size(std::int64_t height, std::int64_t width, const std::string& origin) {
  for (const std::int64_t side : {height, width}) {
    if (side < 32 || side % 32 != 0) throw ConfigError(origin, ": sides must be multiples of 32, got ", side, "; ", std::max<std::int64_t>(32, (side + 16) / 32 * 32), " is near");
  }
  Draft draft = tree_->draft;
  resize_split(draft, kTrainOps, height, width, origin);
  resize_split(draft, kValOps, height, width, origin);
  draft.set(kScales, nullptr, origin);
  draft.set("eval_spatial_size", {height, width}, origin);
  adopt({std::move(draft)});
}

bool Config::is_set(const std::string& key) const {
  const Origins& origins = tree_->draft.origins;
  const std::string path = schema::canonical(key);
  const auto below = origins.lower_bound(path + ".");
  return origins.contains(path) || (below != origins.end() && below->first.starts_with(path + "."));
}

RunConfig Config::resolve() const { return resolve_config(tree_->draft.root, [this](const std::string& path) { return tree_->draft.place(path); }); }

std::vector<std::pair<std::string, std::string>> flat_config(const std::string& resolved_json) {
  std::vector<std::pair<std::string, std::string>> leaves;
  const Json flat = Json::parse(resolved_json).flatten();
  for (const auto& [path, value] : flat.items()) leaves.emplace_back(path, value.dump());
  return leaves;
}

bool is_local(const std::string& path) {
  static const std::set<std::string> local = {"/output_dir",
                                              "/print_every",
                                              "/PResNet/pretrained",   // rank 0 reads it and sends the weights
                                              "/train_dataloader/num_workers",
                                              "/val_dataloader/num_workers",
                                              "/train_dataloader/dataset/ann_file",   // what is in them counts
                                              "/train_dataloader/dataset/img_folder",
                                              "/val_dataloader/dataset/ann_file",
                                              "/val_dataloader/dataset/img_folder"};
  return local.contains(path);
}

std::string Config::to_json(int indent) const { return tree_->draft.root.dump(indent); }

std::vector<ConfigOrigin> Config::origins() const {
  std::vector<ConfigOrigin> all;
  const Origins& origins = tree_->draft.origins;
  for (const schema::Key& key : schema::keys()) {
    if (key.kind == schema::Kind::ignored) continue;
    const std::string path(key.path);
    const auto found = origins.find(path);
    all.push_back({path, found == origins.end() ? "default" : found->second});
    for (auto part = origins.lower_bound(path + "."); part != origins.end() && part->first.starts_with(path + "."); ++part) all.push_back({part->first, part->second});
  }
  return all;
}

std::vector<ConfigKey> Config::keys(const std::string& prefix) {
  std::vector<ConfigKey> all;
  const auto add = [&](const schema::Key& key, const std::string& path, const std::string& help) {
    if (path.starts_with(prefix)) all.push_back({path, schema::type_name(key), schema::normalised(key, Json::parse(key.fallback)).dump(), help});
  };
  for (const schema::Key& key : schema::keys()) {
    const std::string path(key.path);
    add(key, path, std::string(key.help));
    if (key.kind != schema::Kind::objects) continue;
    if (!schema::has_typed_entries(path)) {
      for (const schema::Key& entry : schema::entry_keys(path, "")) add(entry, concat(path, ".*.", entry.path), std::string(entry.help));
    } else {
      for (const std::string& type : schema::op_types()) {
        for (const schema::Key& entry : schema::entry_keys(path, type)) add(entry, concat(path, ".*.", entry.path), concat(type, ": ", entry.help));
      }
    }
  }
  return all;
}

std::string Config::nearest(const std::string& key) { return schema::nearest(key); }

}  // namespace detr::train

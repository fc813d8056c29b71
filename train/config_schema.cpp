#include "train/config_schema.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::train::schema {
namespace {

constexpr double kExact = 9007199254740992.0;   // 2^53: whole numbers up to here have one meaning in every reader of JSON

// Names of the reference, read for ours.
constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
    {"epoches", "epochs"},
    {"checkpoint_freq", "save_every"},
    {"print_freq", "print_every"},
    {"train_dataloader.batch_size", "train_dataloader.total_batch_size"},   // per rank there
    {"val_dataloader.batch_size", "val_dataloader.total_batch_size"},
};

// What other frameworks call our keys: no letters in common for an edit distance to see.
constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {
    {"learning_rate", "optimizer.lr"}, {"base_lr", "optimizer.lr"}, {"lr0", "optimizer.lr"}, {"grad_clip", "clip_max_norm"}, {"warmup_iters", "lr_warmup_scheduler.warmup_duration"},
};

constexpr std::array<std::string_view, 3> kNullableSections = {"train_dataloader.collate_fn", "train_dataloader.dataset.transforms.policy", "val_dataloader.collate_fn"};

std::string_view last_name(std::string_view path) { return path.substr(path.rfind('.') + 1); }
std::string_view parent_of(std::string_view path) { return path.substr(0, path.rfind('.') == std::string_view::npos ? 0 : path.rfind('.')); }

bool contains(std::string_view list, const Json& value) {
  if (list.empty()) return false;
  const Json values = Json::parse(list);
  return std::find(values.begin(), values.end(), value) != values.end();
}

bool in_bounds(const Rule& rule, double value) {
  return std::isfinite(value) && (rule.above ? value > rule.low : value >= rule.low) && (rule.below ? value < rule.high : value <= rule.high);
}

bool is_integer(const Rule& rule, const Json& value) {
  if (!value.is_number_integer()) return false;
  const double v = value.get<double>();
  return in_bounds(rule, v) && (std::isfinite(rule.high) || std::abs(v) < kExact);
}

bool is_number(const Rule& rule, const Json& value) { return value.is_number() && in_bounds(rule, value.get<double>()); }

template <class Entry>
bool is_list(const Rule& rule, const Json& value, Entry entry) {
  return value.is_array() && (rule.count == 0 || value.size() == rule.count) && std::all_of(value.begin(), value.end(), entry);
}

bool is_of_kind(const Key& key, const Json& value) {
  const Rule& rule = key.rule;
  switch (key.kind) {
    case Kind::boolean: return value.is_boolean();
    case Kind::integer: return is_integer(rule, value);
    case Kind::number: return is_number(rule, value);
    case Kind::text: return value.is_string();
    case Kind::integers: return is_list(rule, value, [&](const Json& v) { return is_integer(rule, v); });
    case Kind::numbers: return is_list(rule, value, [&](const Json& v) { return is_number(rule, v); });
    case Kind::texts: return is_list(rule, value, [](const Json& v) { return v.is_string(); });
    case Kind::objects: return is_list(rule, value, [](const Json& v) { return v.is_object(); });
    case Kind::ignored: return true;
  }
  return false;
}

std::string number_text(double value) {
  if (std::abs(value) <= kExact && value == std::floor(value)) return std::to_string(static_cast<std::int64_t>(value));
  return Json(value).dump();
}

std::string bounds_text(const Rule& rule) {
  const bool low = std::isfinite(rule.low), high = std::isfinite(rule.high);
  std::string text;
  if (low) text += (rule.above ? " above " : " of at least ") + number_text(rule.low);
  if (high) text += concat(low ? " and " : " ", rule.below ? "below " : "at most ", number_text(rule.high));
  return text;
}

std::string list_text(const Rule& rule, std::string_view entries) {
  return concat("a list of ", rule.count > 0 ? std::to_string(rule.count) + " " : std::string(), entries, bounds_text(rule));
}

std::string kind_text(const Key& key) {
  switch (key.kind) {
    case Kind::boolean: return "true or false";
    case Kind::integer: return "an integer" + bounds_text(key.rule);
    case Kind::number: return "a number" + bounds_text(key.rule);
    case Kind::text: return "text";
    case Kind::integers: return list_text(key.rule, "integers");
    case Kind::numbers: return list_text(key.rule, "numbers");
    case Kind::texts: return list_text(key.rule, "texts");
    case Kind::objects: return list_text(key.rule, "objects");
    case Kind::ignored: return "anything";
  }
  return {};
}

/// ["auto"] -> `, "auto"`, to be read as alternatives.
std::string alternatives(std::string_view list, const char* separator) {
  std::string text;
  if (list.empty()) return text;
  for (const Json& value : Json::parse(list)) text += separator + value.dump();
  return text;
}

Json one_form(const Key& key, Json value) {
  const bool whole = key.kind == Kind::integer || key.kind == Kind::integers, fraction = key.kind == Kind::number || key.kind == Kind::numbers;
  if (fraction && value.is_number_integer()) return value.get<double>();
  if (whole && value.is_number_float()) {
    const double v = value.get<double>();
    if (std::abs(v) <= kExact && v == std::floor(v)) return static_cast<std::int64_t>(v);
  }
  return value;
}

}  // namespace

const Key* find(std::string_view path) {
  const auto all = keys();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Key& key) { return key.path == path; });
  return found == all.end() ? nullptr : &*found;
}

bool is_section(std::string_view path) {
  const auto all = keys();
  return std::any_of(all.begin(), all.end(), [&](const Key& key) { return key.path.size() > path.size() && key.path.starts_with(path) && key.path[path.size()] == '.'; });
}

bool is_nullable_section(std::string_view path) { return std::find(kNullableSections.begin(), kNullableSections.end(), path) != kNullableSections.end(); }

std::string canonical(std::string_view path) {
  for (const auto& [theirs, ours] : kAliases) {
    if (path == theirs) return std::string(ours);
  }
  return std::string(path);
}

std::string nearest(std::string_view path) {
  for (const auto& [theirs, ours] : kOtherNames) {
    if (last_name(path) == theirs) return std::string(ours);
  }
  std::vector<std::string> known;
  for (const Key& key : keys()) {
    for (std::size_t dot = key.path.find('.'); dot != std::string_view::npos; dot = key.path.find('.', dot + 1)) {
      const std::string section(key.path.substr(0, dot));
      if (std::find(known.begin(), known.end(), section) == known.end()) known.push_back(section);
    }
    known.emplace_back(key.path);
  }
  // A name may be misspelt, or right but in the wrong place; the place counts as two letters.
  constexpr std::size_t kElsewhere = 2;
  const auto distance = [&](const std::string& candidate) {
    const std::size_t whole = edit_distance(path, candidate);
    const std::size_t last = edit_distance(last_name(path), last_name(candidate)) + (parent_of(path) == parent_of(candidate) ? 0 : kElsewhere);
    return std::pair(std::min(whole, last), whole);
  };
  return *std::min_element(known.begin(), known.end(), [&](const std::string& a, const std::string& b) { return distance(a) < distance(b); });
}

bool accepts(const Key& key, const Json& value) {
  if (value.is_null()) return key.rule.nullable || key.kind == Kind::ignored;
  if (contains(key.rule.also, value)) return true;
  return is_of_kind(key, value) && (key.rule.only.empty() || contains(key.rule.only, value));
}

std::string wanted(const Key& key) {
  std::string text;
  if (!key.rule.only.empty()) text = alternatives(key.rule.only, " or ").substr(4);
  else text = kind_text(key) + alternatives(key.rule.also, " or ");
  return key.rule.nullable && text != "null" ? text + " or null" : text;
}

std::string type_name(const Key& key) {
  static constexpr std::array<const char*, 9> kNames{"boolean", "integer", "number", "text", "integers", "numbers", "texts", "objects", "ignored"};
  std::string name = kNames[static_cast<std::size_t>(key.kind)];
  if (!key.rule.only.empty()) return key.rule.only == "[null]" ? "null" : name + ":" + alternatives(key.rule.only, " | ").substr(2);
  name += alternatives(key.rule.also, " | ");
  return key.rule.nullable ? name + " | null" : name;
}

Json normalised(const Key& key, Json value) {
  if (key.kind == Kind::ignored) return value;
  value = one_form(key, std::move(value));
  if (key.rule.single && (value.is_number_integer() || value.is_number_float())) return Json(Json::array_t(key.rule.count, one_form(key, value)));
  if (value.is_array() && key.kind != Kind::objects) {
    for (Json& entry : value) entry = one_form(key, std::move(entry));
  }
  return value;
}

}  // namespace detr::train::schema

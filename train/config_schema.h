#pragma once
#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// The keys of a configuration: one table, from which defaults, checks, messages and `info keys` are made. Private to train/config*.
namespace detr::train::schema {

using Json = nlohmann::ordered_json;   ///< keeps the order of the table, so that a resolved configuration always looks the same

enum class Kind {
  boolean, integer, number, text,
  integers, numbers, texts,   ///< lists
  objects,                    ///< a list of objects with keys of their own: optimizer.params and transforms.ops
  ignored                     ///< anything; read without effect
};

/// What a value must be besides its kind. Bounds hold for each entry of a list.
struct Rule {
  double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
  bool above = false;               ///< strictly greater than `low`
  bool below = false;               ///< strictly less than `high`
  std::size_t count = 0;            ///< entries of a list; 0: any number
  bool single = false;              ///< one number stands for `count` equal ones
  bool nullable = false;
  std::string_view also = {};       ///< JSON list of values of other kinds that are allowed too, such as ["auto"]
  std::string_view only = {};       ///< JSON list of the allowed values, where there are few
};

struct Key {
  std::string_view path;            ///< dots between names
  Kind kind;
  std::string_view fallback;        ///< the default as JSON
  std::string_view help;
  Rule rule = {};
};

/// All keys with a value of their own, in the order in which a configuration is written.
std::span<const Key> keys();
/// Keys of an entry of a list of objects: of optimizer.params (`type` is empty then), or of transforms.ops by the entry's type.
/// Empty where there is no such type.
std::span<const Key> entry_keys(std::string_view list, std::string_view type);
/// Types of transforms.ops.
std::span<const std::string> op_types();

/// The key with this path, or null.
const Key* find(std::string_view path);
/// Whether the path has keys below it.
bool is_section(std::string_view path);
/// Whether null stands for a section without any setting.
bool is_nullable_section(std::string_view path);
/// The path with older names replaced by ours: epoches -> epochs.
std::string canonical(std::string_view path);
/// Whether the path is a list of objects whose entries have a type: transforms.ops.
bool has_typed_entries(std::string_view list);

/// The known path (key or section) nearest to a misspelt one: by edit distance of the whole paths or of their last names.
std::string nearest(std::string_view path);

/// The kind and rule in words: "an integer of at least 1, or null".
std::string wanted(const Key& key);
/// "boolean", "integer or null", ... for lists of keys.
std::string type_name(const Key& key);
/// Whether the value is what the key takes.
bool accepts(const Key& key, const Json& value);
/// One form for equal values: a whole number for an integer key that was written 1e3, a fraction for a number key written 1.
Json normalised(const Key& key, Json value);

}  // namespace detr::train::schema

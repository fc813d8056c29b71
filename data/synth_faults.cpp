#include "data/synth_faults.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "data/synth.h"
#include "data/text.h"
#include "runtime/error.h"

namespace detr::data {
namespace synth {
namespace {

using Json = nlohmann::ordered_json;

// What JSON cannot say is written as a marker and replaced in the text.
constexpr const char* kNan = "#nan#";
constexpr const char* kHuge = "#huge#";

std::int64_t largest_id(const Json& records) {
  std::int64_t largest = 0;
  for (const Json& record : records) largest = std::max(largest, record["id"].get<std::int64_t>());
  return largest;
}

/// Appends an annotation of the first image and category, with an id of its own.
Json& add_box(Json& coco, const Json& bbox) {
  const std::int64_t id = largest_id(coco["annotations"]) + 1;
  coco["annotations"].push_back({{"id", id}, {"image_id", coco["images"][0]["id"]}, {"category_id", coco["categories"][0]["id"]},
                                 {"bbox", bbox}, {"area", 400}, {"iscrowd", 0}});
  return coco["annotations"].back();
}

void add_image(Json& coco, const std::string& file_name) {
  coco["images"].push_back({{"id", largest_id(coco["images"]) + 1}, {"file_name", file_name}, {"width", 10}, {"height", 10}});
}

/// Gives an image another id, in its annotations too.
void renumber(Json& coco, std::size_t image, std::int64_t id) {
  if (image >= coco["images"].size()) return;
  const Json old = coco["images"][image]["id"];
  coco["images"][image]["id"] = id;
  for (Json& annotation : coco["annotations"])
    if (annotation["image_id"] == old) annotation["image_id"] = id;
}

void replace(std::string& text, const std::string& what, const std::string& by) {
  const std::size_t at = text.find(what);
  if (at != std::string::npos) text.replace(at, what.size(), by);
}

using Change = std::function<void(Json&)>;      ///< of the data
using Spoil = std::function<void(std::string&)>;   ///< of the text

const std::vector<std::pair<std::string, Change>>& changes() {
  static const std::vector<std::pair<std::string, Change>> table = {
      {"annotation-duplicate-id", [](Json& c) { const Json id = add_box(c, {10, 10, 20, 20})["id"]; add_box(c, {8, 8, 20, 20})["id"] = id; }},
      {"box-huge", [](Json& c) { add_box(c, {10, 10, kHuge, 20}); }},
      {"box-nan", [](Json& c) { add_box(c, {kNan, 10, 20, 20}); }},
      {"box-negative-height", [](Json& c) { add_box(c, {10, 10, 20, -5}); }},
      {"box-null", [](Json& c) { add_box(c, nullptr); }},
      {"box-partly-outside", [](Json& c) { add_box(c, {c["images"][0]["width"].get<int>() - 10, -10, 40, 40}); }},
      {"box-text", [](Json& c) { add_box(c, {"10", "10", "20", "20"}); }},
      {"box-three-numbers", [](Json& c) { add_box(c, {10, 10, 20}); }},
      {"box-wholly-outside", [](Json& c) { add_box(c, {c["images"][0]["width"].get<int>() + 50, 10, 20, 20}); }},
      {"box-zero-width", [](Json& c) { add_box(c, {10, 10, 0, 20}); }},
      {"categories-absent", [](Json& c) { c.erase("categories"); }},
      {"category-duplicate-id", [](Json& c) { c["categories"].push_back({{"id", c["categories"][0]["id"]}, {"name", "again"}}); }},
      {"category-unknown", [](Json& c) { add_box(c, {10, 10, 20, 20})["category_id"] = largest_id(c["categories"]) + 1; }},
      {"ids-as-text", [](Json& c) { for (Json& i : c["images"]) i["id"] = std::to_string(i["id"].get<std::int64_t>()); }},
      {"ids-over-2-to-53", [](Json& c) { renumber(c, 0, 9007199254740993); renumber(c, 1, 9007199254740992); }},
      {"image-duplicate-id", [](Json& c) { const Json twin = c["images"][0]; c["images"].push_back(twin); }},
      {"image-file-missing", [](Json& c) { add_image(c, "no-such-file.jpg"); }},
      {"image-path-escapes", [](Json& c) { add_image(c, "../../../../etc/hostname"); }},
      {"image-size-absent", [](Json& c) { for (Json& i : c["images"]) i.erase("width"); }},
      {"image-size-wrong", [](Json& c) { Json& i = c["images"][0]; i["width"] = i["width"].get<int>() * 2; }},
      {"image-unknown", [](Json& c) { add_box(c, {10, 10, 20, 20})["image_id"] = largest_id(c["images"]) + 1; }},
      {"keys-optional-absent", [](Json& c) { for (Json& a : c["annotations"]) { a.erase("area"); a.erase("iscrowd"); } }},
      {"no-annotations", [](Json& c) { c["annotations"] = Json::array(); }},
      {"no-images", [](Json& c) { c["images"] = c["annotations"] = Json::array(); }},
      {"only-crowd", [](Json& c) { for (Json& a : c["annotations"]) a["iscrowd"] = 1; }},
      {"top-level-list", [](Json& c) { const Json list = c["annotations"]; c = list; }},
  };
  return table;
}

const std::vector<std::pair<std::string, Spoil>>& spoils() {
  static const std::vector<std::pair<std::string, Spoil>> table = {
      {"json-byte-order-mark", [](std::string& text) { text.insert(0, "\xef\xbb\xbf"); }},
      {"json-deep-nesting", [](std::string& text) {
         constexpr std::size_t kDepth = 100'000;
         text.insert(text.rfind('}'), ",\"extra\":" + std::string(kDepth, '[') + std::string(kDepth, ']'));
       }},
      {"json-empty-file", [](std::string& text) { text.clear(); }},
      {"json-trailing-comma", [](std::string& text) { text.insert(text.rfind('}'), ","); }},
      {"json-truncated", [](std::string& text) { text.resize(text.size() / 2); }},
  };
  return table;
}

}  // namespace

void check_fault(const std::string& fault) {
  std::string all;
  for (const std::string& name : synth_faults()) {
    if (name == fault) return;
    all += (all.empty() ? "" : " ") + name;
  }
  throw ConfigError("unknown fault '", printable(fault), "'; there are: ", all);
}

std::string faulty_text(Json coco, const std::string& fault) {
  const auto named = [&](const auto& table) {
    return std::find_if(table.begin(), table.end(), [&](const auto& entry) { return entry.first == fault; });
  };
  const auto change = named(changes());
  const auto spoil = named(spoils());
  if (change != changes().end()) change->second(coco);
  std::string text = coco.dump();
  replace(text, '"' + std::string(kNan) + '"', "NaN");
  replace(text, '"' + std::string(kHuge) + '"', "1e400");
  if (spoil != spoils().end()) spoil->second(text);
  return text;
}

}  // namespace synth

std::vector<std::string> synth_faults() {
  std::vector<std::string> names;
  for (const auto& [name, change] : synth::changes()) names.push_back(name);
  for (const auto& [name, spoil] : synth::spoils()) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace detr::data

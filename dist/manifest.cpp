#include "dist/manifest.h"

#include <algorithm>

#include "runtime/error.h"
#include "runtime/text.h"

namespace detr::dist {

void Manifest::add(std::string_view name, std::string_view value) { entries_.emplace_back(escape_control(name), escape_control(value)); }

void Manifest::add(const Layout& layout) {
  add("gradient dtype", name_of(layout.dtype));
  for (std::size_t i = 0; i < layout.parameters.size(); ++i) add(concat("parameter ", i, " ", layout.parameters[i].name), concat(layout.parameters[i].shape));
  for (std::size_t b = 0; b < layout.buckets.size(); ++b) {
    const Bucket& bucket = layout.buckets[b];
    add(concat("bucket ", b), concat("elements ", bucket.begin, " to ", bucket.end, ", parameters ", bucket.parameters.front(), " to ", bucket.parameters.back()));
  }
}

std::string Manifest::bytes() const {
  std::string out;
  for (const auto& [name, value] : entries_) out += concat(name, "\t", value, "\n");   // neither holds a control character
  return out;
}

Manifest Manifest::parse(std::string_view bytes) {
  Manifest manifest;
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n'), tab = bytes.find('\t');
    if (end == std::string_view::npos || tab == std::string_view::npos || tab > end) throw CommError("manifest: a line without a name, a tab and a value");
    manifest.entries_.emplace_back(bytes.substr(0, tab), bytes.substr(tab + 1, end - tab - 1));
    bytes.remove_prefix(end + 1);
  }
  return manifest;
}

std::string first_difference(const Manifest& manifest, int rank, const Manifest& reference, int reference_rank) {
  const auto &own = manifest.entries(), &theirs = reference.entries();
  const auto [a, b] = std::mismatch(own.begin(), own.end(), theirs.begin(), theirs.end());
  if (a == own.end() && b == theirs.end()) return {};
  if (a == own.end()) return concat("rank ", rank, ": there is no ", b->first, ", rank ", reference_rank, " has ", b->second);
  if (b == theirs.end()) return concat("rank ", rank, ": ", a->first, " is ", a->second, ", rank ", reference_rank, " has none");
  if (a->first == b->first) return concat("rank ", rank, ": ", a->first, " is ", a->second, ", rank ", reference_rank, " has ", b->second);
  return concat("rank ", rank, ": has ", a->first, " where rank ", reference_rank, " has ", b->first);
}

void expect_equal_manifests(Control& control, const Manifest& manifest, Clock::time_point deadline) {
  const std::vector<std::string> all = control.all_gather(manifest.bytes(), "manifest", deadline);
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    throw CommError(first_difference(Manifest::parse(all[r]), static_cast<int>(r), Manifest::parse(all[0]), 0));
  }
}

}  // namespace detr::dist

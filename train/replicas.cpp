#include "train/replicas.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <span>

#include "dist/messages.h"
#include "runtime/error.h"
#include "runtime/safetensors.h"
#include "runtime/text.h"

namespace detr::train {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 20;   // of detections, a message

/// Exchanges between steps wait as long as it takes: a rank that evaluates or saves is busy, and one that hangs is the hub's to find.
dist::Clock::time_point no_deadline() { return dist::Clock::now() + std::chrono::hours(24); }

template <class T>
void append(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

Moved progress_of(const std::shared_ptr<dist::Control>& control) {
  if (!control) return {};
  return [control] { control->tick(); };
}

std::string Replicas::name() const { return size() > 1 ? concat("rank ", rank(), ": ") : std::string(); }

void Replicas::expect_equal(const dist::Manifest& manifest) {
  if (size() > 1) dist::expect_equal_manifests(*ranks_.control, manifest, no_deadline());
}

std::string Replicas::from_root(const std::string& text, const char* what) { return from_all(root() ? text : std::string(), what).front(); }

std::vector<std::string> Replicas::from_all(const std::string& text, const char* what) {
  if (size() == 1) return {text};
  return ranks_.control->all_gather(text, place(what), no_deadline());
}

bool Replicas::any(bool flag, const char* what) {
  if (size() == 1) return flag;
  const std::vector<std::string> all = from_all(flag ? "1" : "", what);
  return std::ranges::any_of(all, [](const std::string& text) { return !text.empty(); });
}

void Replicas::share(dist::Communicator& communicator, const Stream& stream, ParameterStore& store, Optimizer& optimizer, CheckpointInfo& info) {
  if (size() == 1) return;
  // First what has no deadline: rank 0 may take long to read its files.
  const Tensor steps = optimizer.steps();
  const std::string counts = from_root({static_cast<const char*>(steps.raw()), static_cast<std::size_t>(steps.bytes())}, "updates");
  info = info_from_text(from_root(to_text(info), "run state"));
  if (counts.size() != static_cast<std::size_t>(steps.bytes())) throw CommError(name(), "start: the update counts of rank 0 have ", counts.size(), " bytes, wanted ", steps.bytes());
  std::memcpy(steps.raw(), counts.data(), counts.size());
  if (!root()) {
    optimizer.set_steps(steps);
    optimizer.set_ema_updates(info.ema_updates);
  }
  std::uint64_t tag = 0;
  const auto broadcast = [&](const Tensor& tensor, const char* what) {
    communicator.broadcast(stream, tensor, 0, {std::uint64_t{1} << 40 | tag++, concat("start: ", what)})->wait(stream, dist::Clock::now() + ranks_.timeout);
  };
  broadcast(store.weights(), "weights");
  broadcast(store.ema(), "moving average");
  broadcast(store.exp_avg(), "first moments");
  broadcast(store.exp_avg_sq(), "second moments");
  store.refresh_shadow();
  communicator.watch(stream, dist::Clock::now() + ranks_.timeout, "start: state of rank 0");
  expect_equal_hash(state_hash(store, optimizer), info.state.step);
}

void Replicas::expect_equal_hash(const std::string& hash, std::int64_t step) {
  if (size() == 1) return;
  const std::vector<std::string> all = from_all(hash, "state hash");
  std::map<std::string, std::vector<int>> groups;
  for (std::size_t r = 0; r < all.size(); ++r) groups[all[r]].push_back(static_cast<int>(r));
  if (groups.size() == 1) return;
  std::size_t most = 0;
  for (const auto& [unused, ranks] : groups) most = std::max(most, ranks.size());
  std::vector<int> minority;
  const auto majorities = std::ranges::count_if(groups, [&](const auto& group) { return group.second.size() == most; });
  for (const auto& [unused, ranks] : groups) {
    if (ranks.size() < most || majorities > 1) minority.insert(minority.end(), ranks.begin(), ranks.end());
  }
  std::ranges::sort(minority);
  throw CommError(dist::ranks_text(minority), minority.size() == 1 ? " differs" : " differ", minority.size() == all.size() ? " from each other" : " from the others",
                  " in weights, moments or moving average at step ", step, "; a fault of memory or of a library: go on from the last checkpoint");
}

std::vector<data::Detection> Replicas::gather(std::vector<data::Detection> detections) {
  if (size() == 1) return detections;
  static_assert(std::is_trivially_copyable_v<data::Detection>);
  constexpr std::size_t in_piece = kPiece / sizeof(data::Detection);
  const std::vector<std::string> counts = from_all(std::to_string(detections.size()), "detections");
  std::size_t most = 0;
  for (const std::string& count : counts) most = std::max<std::size_t>(most, std::stoull(count));
  std::vector<data::Detection> all;
  for (std::size_t begin = 0; begin < most; begin += in_piece) {
    const std::size_t from = std::min(begin, detections.size()), count = std::min(in_piece, detections.size() - from);
    const std::string bytes(reinterpret_cast<const char*>(detections.data() + from), count * sizeof(data::Detection));
    for (const std::string& part : ranks_.control->gather_to_root(bytes, place("detections"), no_deadline())) {
      if (part.empty()) continue;   // memcpy takes no null, not even for no bytes
      const std::size_t old = all.size();
      all.resize(old + part.size() / sizeof(data::Detection));
      std::memcpy(static_cast<void*>(all.data() + old), part.data(), part.size());
    }
  }
  std::ranges::stable_sort(all, {}, &data::Detection::image_id);
  return all;
}

std::string digest(const data::CocoData& data) {
  std::string bytes;
  for (const data::Category& c : data.categories) {
    append(bytes, c.id);
    bytes += c.name + '\0';
  }
  for (const data::ImageRecord& image : data.images) {
    append(bytes, image.id);
    append(bytes, image.count);
    bytes += image.file_name + '\0';
  }
  for (const data::Annotation& a : data.annotations) {
    append(bytes, a.label);
    append(bytes, a.box_xyxy);
    append(bytes, a.crowd);
    append(bytes, a.trainable);
  }
  const std::uint64_t hash = hash_bytes(std::as_bytes(std::span(bytes)), 0);
  return concat(data.images.size(), " images, ", data.annotations.size(), " annotations, hash ", hash);
}

}  // namespace detr::train

#include "data/loader.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "data/sample_source.h"
#include "runtime/error.h"
#include "runtime/random.h"

namespace detr::data {
namespace {

/// First coordinate below the seed, so that the three kinds of draws never meet.
enum Site : std::uint64_t { kOrderSite = 0x6f72646572, kSampleSite = 0x73616d706c65, kSizeSite = 0x73697a65 };

RandomKey site_key(std::uint64_t seed, Site site, std::int64_t epoch) { return RandomKey(seed).fold(site).fold(static_cast<std::uint64_t>(epoch)); }

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void check_options(const CocoData& coco, const std::vector<std::int64_t>& images, const LoaderOptions& options) {
  if (images.empty()) throw DataError(coco.file.string(), ": no images to load");
  for (const std::int64_t image : images)
    DETR_CHECK(image >= 0 && image < static_cast<std::int64_t>(coco.images.size()), "loader: image index ", image, " of ", coco.images.size());
  DETR_CHECK(options.ranks >= 1 && options.rank >= 0 && options.rank < options.ranks, "loader: rank ", options.rank, " of ", options.ranks);
  DETR_CHECK(options.num_workers >= 1, "loader: num_workers must be >= 1, got ", options.num_workers);
  DETR_CHECK(options.prefetch >= 1, "loader: prefetch must be >= 1, got ", options.prefetch);
  if (options.batch_size < 1 || options.batch_size % options.ranks)
    throw ConfigError("batch size ", options.batch_size, " must be a multiple of the ", options.ranks, " ranks, and at least 1 each");
  if (!(options.max_bad_share >= 0 && options.max_bad_share <= 1)) throw ConfigError("data.max_bad_share must be in [0, 1], got ", options.max_bad_share);
  for (const std::int64_t size : options.scales)
    if (size < 1) throw ConfigError("collate_fn.scales: sizes must be >= 1, got ", size);
  for (const TransformOp& op : options.transforms) check_transform(op);
  if (!options.evaluation && static_cast<std::int64_t>(coco.categories.size()) > options.denoising.num_classes)
    throw ConfigError(coco.file.string(), ": has ", coco.categories.size(), " categories, the model ", options.denoising.num_classes, " classes");
}

}  // namespace

struct Loader::Shared {
  Shared(std::shared_ptr<const CocoData> coco, std::filesystem::path folder, std::vector<std::int64_t> image_indices, LoaderOptions o)
      : data(std::move(coco)), images(std::move(image_indices)), options(std::move(o)), size(output_size(options.transforms)),
        source(data, std::move(folder),
               {options.transforms, options.policy, options.exif, options.limits, options.cache_bytes, options.on_sample != nullptr}) {
    if (options.evaluation) {
      std::ranges::sort(images);   // CocoData is in order of id
      options.denoising.num_denoising = 0;
    }
  }

  std::int64_t count() const { return static_cast<std::int64_t>(images.size()); }
  std::int64_t steps() const {
    const std::int64_t full = count() / options.batch_size;
    if (!options.evaluation && options.drop_last) return std::max<std::int64_t>(full, 1);
    return full + (count() % options.batch_size ? 1 : 0);
  }
  /// Batches in preparation: with small batches more than asked for, so that no decode thread runs dry.
  std::int64_t depth() const {
    const std::int64_t slice = options.batch_size / options.ranks;
    return std::max(options.prefetch, (2 * options.num_workers + slice - 1) / slice);
  }
  std::int64_t bad_limit() const { return std::max<std::int64_t>(1, static_cast<std::int64_t>(options.max_bad_share * static_cast<double>(count()))); }
  /// How many pictures are tried for one place in a batch.
  std::int64_t attempts() const {
    if (options.evaluation || options.bad_images == BadImages::stop) return 1;
    return options.bad_images == BadImages::skip ? count() : std::min(count(), bad_limit() + 1);
  }

  const std::shared_ptr<const CocoData> data;
  std::vector<std::int64_t> images;
  LoaderOptions options;
  const std::array<std::int64_t, 2> size;   ///< height and width of every picture
  SampleSource source;

  mutable std::mutex mutex;
  std::vector<BadImage> bad;
  std::set<std::int64_t> bad_ids;
  double last_wait_s = 0, wait_s = 0, decode_before_s = 0, transform_before_s = 0;
};

/// One epoch from one step on. Decode threads take places (step, i) in order and fill them; one finishing thread takes the
/// filled steps in order and makes batches. A step lives in slot step % depth from its first place to its hand-over.
class Loader::Run {
 public:
  Run(Shared& shared, std::int64_t epoch, std::int64_t first_step)
      : shared_(shared), epoch_(epoch), end_(shared.steps()), taken_(first_step), next_step_(first_step),
        slots_(static_cast<std::size_t>(shared.depth())) {
    order_ = shared.images;
    if (!shared.options.evaluation) {
      const RandomKey key = site_key(shared.options.seed, kOrderSite, epoch);
      for (std::int64_t i = shared.count() - 1; i > 0; --i)
        std::swap(order_[static_cast<std::size_t>(i)], order_[static_cast<std::size_t>(uniform_int(key, static_cast<std::uint64_t>(i), i + 1))]);
    }
    try {
      threads_.emplace_back([this, first_step] { finish_from(first_step); });
      for (int i = 0; i < shared.options.num_workers; ++i) threads_.emplace_back([this] { work(); });
    } catch (...) {
      end_threads();
      throw;
    }
  }
  ~Run() { end_threads(); }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  bool next(Batch& batch) {
    for (;;) {
      std::unique_lock lock(mutex_);
      if (taken_ == end_) return false;
      Slot& slot = slot_of(taken_);
      changed_.wait(lock, [&] { return slot.state == State::ready || (failure_ && failed_step_ == taken_); });
      if (slot.state != State::ready) std::rethrow_exception(failure_);
      batch = std::move(slot.batch);
      slot = {};
      ++taken_;
      changed_.notify_all();
      if (!batch.image_ids.empty()) return true;
    }
  }

 private:
  enum class State { free, loading, ready };
  /// One image of a batch to be.
  struct Place {
    std::optional<LoadedSample> sample;   ///< empty: nothing could be read
    RandomKey key;                        ///< of the sample that was read
    std::vector<std::pair<std::int64_t, std::string>> bad;   ///< image index and reason, of what was tried in vain
    std::exception_ptr failure;
  };
  struct Slot {
    State state = State::free;
    std::vector<Place> places;
    std::int64_t unfinished = 0;
    Tensor images;
    Batch batch;
  };

  Slot& slot_of(std::int64_t step) { return slots_[static_cast<std::size_t>(step % shared_.depth())]; }

  /// This rank's images of a step; fewer than a full slice in the last step of an evaluation only.
  std::int64_t places_of(std::int64_t step) const {
    const std::int64_t slice = shared_.options.batch_size / shared_.options.ranks;
    if (!shared_.options.evaluation) return slice;
    return std::clamp<std::int64_t>(shared_.count() - position(step, 0), 0, slice);
  }
  std::int64_t position(std::int64_t step, std::int64_t place) const {
    const std::int64_t slice = shared_.options.batch_size / shared_.options.ranks;
    return step * shared_.options.batch_size + shared_.options.rank * slice + place;
  }

  void work();
  Place load_place(std::int64_t step, std::int64_t place);
  void finish_from(std::int64_t step);
  void finish(std::int64_t step, Slot& slot);
  void report_bad(std::int64_t step, const Slot& slot);
  void expect_few_bad(std::int64_t bad) const;
  std::int64_t bad_so_far() const {
    const std::lock_guard lock(shared_.mutex);
    return std::ssize(shared_.bad);
  }
  void end_threads();

  Shared& shared_;
  const std::int64_t epoch_, end_;
  std::vector<std::int64_t> order_;   ///< index into CocoData::images at each position of the epoch

  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t taken_;                ///< steps before this one belong to the consumer
  std::int64_t next_step_, next_place_ = 0;
  std::vector<Slot> slots_;
  std::exception_ptr failure_;
  std::int64_t failed_step_ = 0;
  bool stopping_ = false;
  std::mutex allocation_;             ///< for Slot::images
  std::vector<std::thread> threads_;
};

void Loader::Run::work() {
  const auto may_begin = [this] { return next_place_ > 0 || next_step_ < taken_ + shared_.depth(); };
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || failure_ || next_step_ == end_ || may_begin(); });
    if (stopping_ || failure_ || next_step_ == end_) return;
    const std::int64_t step = next_step_, place = next_place_, places = places_of(step);
    Slot& slot = slot_of(step);
    if (place == 0) {
      try {
        slot.places.resize(static_cast<std::size_t>(places));
      } catch (...) {   // no memory: thrown when the step's turn comes, as steps before it may still be finished
        failure_ = std::current_exception();
        failed_step_ = step;
        changed_.notify_all();
        return;
      }
      slot.state = State::loading;
      slot.unfinished = places;
    }
    if (++next_place_ >= places) {
      ++next_step_;
      next_place_ = 0;
      changed_.notify_all();
    }
    if (places == 0) continue;

    lock.unlock();
    Place loaded;
    try {
      loaded = load_place(step, place);
    } catch (...) {
      loaded.failure = std::current_exception();
    }
    lock.lock();
    slot.places[static_cast<std::size_t>(place)] = std::move(loaded);
    if (--slot.unfinished == 0) changed_.notify_all();
  }
}

Loader::Run::Place Loader::Run::load_place(std::int64_t step, std::int64_t place) {
  const LoaderOptions& options = shared_.options;
  const std::int64_t at = position(step, place), count = shared_.count();
  Place result;
  for (std::int64_t attempt = 0; attempt < shared_.attempts(); ++attempt) {
    const std::int64_t image = order_[static_cast<std::size_t>((at + attempt) % count)];
    const auto id = static_cast<std::uint64_t>(shared_.data->images[static_cast<std::size_t>(image)].id);
    // 0 for an image's own place in the epoch; a second appearance gets other draws.
    const std::int64_t copy = attempt == 0 && at < count ? 0 : 1 + at;
    const RandomKey key = site_key(options.seed, kSampleSite, epoch_).fold(id).fold(static_cast<std::uint64_t>(copy));
    try {
      LoadedSample sample = shared_.source.load(image, epoch_, key.fold(0));
      const auto [height, width] = shared_.size;
      DETR_CHECK(sample.picture.height == height && sample.picture.width == width, "loader: image ", sample.image_id, " left the transforms as ",
                 sample.picture.width, "x", sample.picture.height, ", wanted ", width, "x", height);
      {
        const std::lock_guard lock(allocation_);
        Tensor& images = slot_of(step).images;
        if (!images.defined()) images = host_zeros({places_of(step), height, width, 3}, DType::u8);
      }
      std::memcpy(slot_of(step).images.slice(place, place + 1).raw(), sample.picture.rgb.data(), sample.picture.rgb.size());
      sample.picture = {};
      result.sample = std::move(sample);
      result.key = key.fold(1);
      return result;
    } catch (const DataError& error) {
      result.bad.emplace_back(image, error.what());
    }
  }
  return result;
}

void Loader::Run::finish_from(std::int64_t step) {
  for (; step < end_; ++step) {
    Slot& slot = slot_of(step);
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || (slot.state == State::loading && slot.unfinished == 0); });
      if (stopping_) return;
    }
    std::exception_ptr failure;
    try {
      finish(step, slot);
    } catch (...) {
      failure = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    if (failure) {
      failure_ = failure;
      failed_step_ = step;
    } else {
      slot.state = State::ready;
    }
    changed_.notify_all();
    if (failure) return;
  }
}

void Loader::Run::report_bad(std::int64_t step, const Slot& slot) {
  const LoaderOptions& options = shared_.options;
  for (const Place& place : slot.places) {
    for (const auto& [image, reason] : place.bad) {
      const BadImage bad{shared_.data->images[static_cast<std::size_t>(image)].id, reason, epoch_, step};
      std::int64_t bad_count = 0;
      {
        const std::lock_guard lock(shared_.mutex);
        if (shared_.bad_ids.insert(bad.image_id).second) shared_.bad.push_back(bad);
        else continue;
        bad_count = static_cast<std::int64_t>(shared_.bad.size());
      }
      if (options.on_bad_image) options.on_bad_image(bad);
      if (options.evaluation) continue;
      if (!options.agree) expect_few_bad(bad_count);
    }
    if (options.evaluation || place.sample || place.bad.empty()) continue;
    const std::string& reason = place.bad.back().second;
    if (options.bad_images == BadImages::stop) throw DataError(reason);
    expect_few_bad(bad_so_far());   // as many pictures as the limit allows have been tried
    throw DataError("none of the ", shared_.count(), " images can be read; the last: ", reason);
  }
}

/// Of all ranks.
void Loader::Run::expect_few_bad(std::int64_t bad) const {
  if (shared_.options.bad_images != BadImages::automatic || bad <= shared_.bad_limit()) return;
  std::string last;
  {
    const std::lock_guard lock(shared_.mutex);
    if (!shared_.bad.empty()) last = "; the last: " + shared_.bad.back().reason;
  }
  throw DataError(bad, " of ", shared_.count(), " images cannot be read, more than data.max_bad_share allows (", shared_.bad_limit(), ")", last,
                  "; repair them, or train with --bad-images skip");
}

void Loader::Run::finish(std::int64_t step, Slot& slot) {
  const LoaderOptions& options = shared_.options;
  for (const Place& place : slot.places)
    if (place.failure) std::rethrow_exception(place.failure);
  report_bad(step, slot);

  Batch& batch = slot.batch;
  std::vector<ImageTargets> targets;
  std::vector<RandomKey> keys;
  for (std::size_t i = 0; i < slot.places.size(); ++i) {
    if (!slot.places[i].sample) continue;   // in evaluation: the pictures after it move up
    LoadedSample& sample = *slot.places[i].sample;
    const auto from = static_cast<std::int64_t>(i), to = static_cast<std::int64_t>(keys.size());
    if (from != to) {
      const Tensor source = slot.images.slice(from, from + 1);
      std::memcpy(slot.images.slice(to, to + 1).raw(), source.raw(), static_cast<std::size_t>(source.bytes()));
    }
    keys.push_back(slot.places[i].key);
    targets.push_back(std::move(sample.targets));
    batch.image_ids.push_back(sample.image_id);
    batch.orig_width.push_back(sample.orig_width);
    batch.orig_height.push_back(sample.orig_height);
    if (options.on_sample) options.on_sample({epoch_, step, sample.image_id, sample.draws});
  }
  if (keys.empty()) return;

  batch.images = slot.images.slice(0, static_cast<std::int64_t>(keys.size()));
  batch.size_h = shared_.size[0];
  batch.size_w = shared_.size[1];
  if (!options.evaluation && !options.scales.empty() && epoch_ < options.scales_stop_epoch) {
    const RandomKey key = site_key(options.seed, kSizeSite, epoch_);
    const auto pick = uniform_int(key, static_cast<std::uint64_t>(step), static_cast<std::int64_t>(options.scales.size()));
    batch.size_h = batch.size_w = options.scales[static_cast<std::size_t>(pick)];
  }

  StepCounts counts{static_cast<std::int64_t>(keys.size())};
  for (const ImageTargets& image : targets) {
    const auto boxes = static_cast<std::int64_t>(image.labels.size());
    counts.boxes += boxes;
    counts.largest = std::max(counts.largest, boxes);
  }
  const std::int64_t largest_here = counts.largest;
  if (options.agree && !options.evaluation) {
    counts.bad = bad_so_far();
    counts = options.agree(epoch_, step, counts);
    expect_few_bad(counts.bad);
  }
  batch.agreed = counts;
  batch.targets = make_targets(targets, box_capacity(counts.largest), options.dtype);
  batch.denoising = make_denoising(batch.targets, options.denoising, keyed_draws(std::move(keys), options.denoising.num_classes),
                                   denoising_capacity(options.denoising.num_denoising, counts.largest), options.rank_rules ? largest_here : counts.largest);
}

void Loader::Run::end_threads() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

std::vector<std::int64_t> select_images(const CocoData& coco, bool drop_empty, std::int64_t limit) {
  std::vector<std::int64_t> images;
  for (std::size_t i = 0; i < coco.images.size() && static_cast<std::int64_t>(images.size()) < limit; ++i) {
    const ImageRecord& record = coco.images[i];
    const auto first = coco.annotations.begin() + record.first;
    const bool has_box = std::any_of(first, first + record.count, [](const Annotation& a) { return a.trainable; });
    if (has_box || !drop_empty) images.push_back(static_cast<std::int64_t>(i));
  }
  return images;
}

Loader::Loader(std::shared_ptr<const CocoData> coco, std::filesystem::path folder, std::vector<std::int64_t> images, LoaderOptions options) {
  check_options(*coco, images, options);
  shared_ = std::make_unique<Shared>(std::move(coco), std::move(folder), std::move(images), std::move(options));
}

Loader::~Loader() = default;

std::int64_t Loader::steps() const { return shared_->steps(); }
std::int64_t Loader::images() const { return shared_->count(); }

void Loader::start(std::int64_t epoch, std::int64_t first_step) {
  DETR_CHECK(epoch >= 0 && first_step >= 0 && first_step <= steps(), "loader: start at epoch ", epoch, ", step ", first_step, " of ", steps());
  run_.reset();
  shared_->last_wait_s = shared_->wait_s = 0;
  shared_->decode_before_s = shared_->source.decode_s();
  shared_->transform_before_s = shared_->source.transform_s();
  run_ = std::make_unique<Run>(*shared_, epoch, first_step);
}

bool Loader::next(Batch& batch) {
  DETR_CHECK(run_, "loader: next() without start()");
  const auto begin = std::chrono::steady_clock::now();
  const bool got = run_->next(batch);
  shared_->last_wait_s = seconds_since(begin);
  shared_->wait_s += shared_->last_wait_s;
  return got;
}

void Loader::stop() { run_.reset(); }

double Loader::last_wait_s() const { return shared_->last_wait_s; }

LoaderTimes Loader::times() const {
  return {shared_->source.decode_s() - shared_->decode_before_s, shared_->source.transform_s() - shared_->transform_before_s, shared_->wait_s};
}

std::vector<BadImage> Loader::bad_images(std::size_t first) const {
  const std::lock_guard lock(shared_->mutex);
  const auto begin = shared_->bad.begin() + static_cast<std::ptrdiff_t>(std::min(first, shared_->bad.size()));
  return {begin, shared_->bad.end()};
}

}  // namespace detr::data

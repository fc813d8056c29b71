#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "data/augment.h"
#include "data/batch.h"
#include "data/coco.h"
#include "data/denoising.h"
#include "data/image.h"

namespace detr::data {

/// What happens to a picture that cannot be read while training: skipped up to a share of the set, always, or never.
enum class BadImages { automatic, skip, stop };

/// A picture that could not be read.
struct BadImage {
  std::int64_t image_id = 0;
  std::string reason;            ///< names the file
  std::int64_t epoch = 0, step = 0;   ///< where it was first met
};

/// One sample that went into a batch, for the log.
struct SampleRecord {
  std::int64_t epoch = 0, step = 0, image_id = 0;
  std::string draws;             ///< what the transforms drew, as text
};

struct LoaderOptions {
  std::vector<TransformOp> transforms;
  TransformPolicy policy;
  std::vector<std::int64_t> scales;   ///< square sizes to train at, one a global step, repeats as weights; empty: the transforms' size
  std::int64_t scales_stop_epoch = std::numeric_limits<std::int64_t>::max();   ///< from this epoch (0-based) on the transforms' size
  DenoisingOptions denoising;         ///< training only

  bool evaluation = false;            ///< each image once, in order of id, the last batch short; no denoising, no skipping rules
  std::int64_t batch_size = 16;       ///< images of a step over all ranks
  std::int64_t rank = 0, ranks = 1;   ///< this loader takes the rank-th of `ranks` equal slices of each batch
  bool drop_last = true;              ///< training: leave out the tail of an epoch (but at least one step), else fill it by wrapping
  std::uint64_t seed = 0;

  int num_workers = 4;                ///< decode threads
  std::int64_t prefetch = 2;          ///< batches prepared ahead of the consumer (more where they hold less than two images a thread)
  std::size_t cache_bytes = 0;        ///< decoded pictures kept in memory up to here; changes no result
  Exif exif = Exif::automatic;
  DecodeLimits limits;
  BadImages bad_images = BadImages::automatic;
  double max_bad_share = 0.01;        ///< of the images, but at least one; more is a DataError
  DType dtype = DType::f32;           ///< of the boxes; f64 in checks
  bool rank_rules = false;            ///< denoising groups follow the fullest of this rank's own images, as in the reference; their slots still that of all ranks

  /// Called on a thread of the loader, one call at a time, in step order. `agree` gets this rank's counts of a training step
  /// and returns those of all ranks; it may block, but has to return or throw when the run ends. Pictures of the step that cannot be read
  /// have been told to on_bad_image by then.
  std::function<StepCounts(std::int64_t epoch, std::int64_t step, const StepCounts& local)> agree;
  std::function<void(const BadImage&)> on_bad_image;     ///< at the first meeting with each
  std::function<void(const SampleRecord&)> on_sample;
};

/// Where the time of an epoch went, in seconds; the first two are sums over the decode threads.
struct LoaderTimes {
  double decode_s = 0, transform_s = 0, wait_s = 0;   ///< wait_s: the consumer, in next()
};

/// The images of `coco` to use, as indices into CocoData::images: all, or those with a box to train on, and of these at most
/// `limit`, the first by id.
std::vector<std::int64_t> select_images(const CocoData& coco, bool drop_empty = false,
                                        std::int64_t limit = std::numeric_limits<std::int64_t>::max());

/// Turns images and annotations into batches, on threads of its own.
///
/// Batches depend on data, options and seed, not on the number of threads, the number of ranks or the step that one begins at:
/// the order of an epoch is drawn from (seed, epoch), a sample's augmentation and denoising noise from (seed, epoch, image id)
/// and the size from (seed, epoch, step). Where an image comes twice in an epoch (a batch filled by wrapping, or a stand-in for
/// an unreadable picture: the next in the epoch's order that can be read), the second one has draws of its own.
///
/// Training: every batch of this rank has batch_size / ranks images of one size. Evaluation: the last one may have fewer, an
/// unreadable picture is reported and left out of its batch, and a batch without any is passed over.
class Loader {
 public:
  /// `images`: indices into coco->images. File names are relative to `folder`.
  /// Throws ConfigError or InvalidArgument for options that do not fit, DataError where there are no images.
  Loader(std::shared_ptr<const CocoData> coco, std::filesystem::path folder, std::vector<std::int64_t> images, LoaderOptions options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// Steps of an epoch.
  std::int64_t steps() const;
  std::int64_t images() const;

  /// Ends what is running and begins to load an epoch at one of its steps.
  void start(std::int64_t epoch, std::int64_t first_step = 0);
  /// Moves the next batch out, waiting for it; false at the end of the epoch. A failure of a thread is thrown here, when its
  /// step's turn comes, and again by further calls. DataError: too many unreadable pictures, or one under BadImages::stop.
  bool next(Batch& batch);
  /// Ends the threads. Safe at any time; the destructor does it too.
  void stop();

  /// Seconds that the last next() waited.
  double last_wait_s() const;
  /// Since start().
  LoaderTimes times() const;
  /// Unreadable pictures so far, in the order of their first meeting, from the `first`-th on. For any thread.
  std::vector<BadImage> bad_images(std::size_t first = 0) const;

 private:
  struct Shared;
  class Run;
  std::unique_ptr<Shared> shared_;
  std::unique_ptr<Run> run_;
};

}  // namespace detr::data

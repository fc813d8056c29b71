#include "data/loader.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include "runtime/error.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::data;
using detr::test::expect_same_bits;
using detr::test::expect_throws;
using detr::test::TempDir;
using detr::test::values_of;

namespace {

/// `count` pictures of random sizes and bytes with 0 to 4 boxes each; ids are sparse.
struct DataSet {
  explicit DataSet(std::int64_t count) {
    auto data = std::make_shared<CocoData>();
    data->file = folder / "instances.json";
    data->categories = {{3, "a"}, {8, "b"}};
    for (std::int64_t i = 0; i < count; ++i) {
      RandomSequence random(RandomKey(9).fold(static_cast<std::uint64_t>(i)));
      Image image(24 + random.uniform_int(40), 24 + random.uniform_int(40));
      for (auto& byte : image.rgb) byte = static_cast<std::uint8_t>(random.uniform_int(256));
      const std::string name = std::to_string(i) + (i % 2 ? ".png" : ".jpg");
      write_image(folder / name, image);
      const auto first = static_cast<std::int64_t>(data->annotations.size()), boxes = random.uniform_int(5);
      data->images.push_back({100 + 7 * i, name, image.width, image.height, first, boxes});
      for (std::int64_t j = 0; j < boxes; ++j) {
        const double x = static_cast<double>(random.uniform_int(10)), y = static_cast<double>(random.uniform_int(10));
        data->annotations.push_back({first + j, i, j % 2, {x, y, 12, 10}, {x, y, x + 12, y + 10}, 120, false, true});
      }
    }
    coco = data;
  }
  std::filesystem::path file(std::int64_t i) const { return folder / coco->images[static_cast<std::size_t>(i)].file_name; }
  void spoil(std::int64_t i) const { std::ofstream(file(i), std::ios::trunc) << "<html>"; }
  Loader loader(const LoaderOptions& options) const { return Loader(coco, folder.path(), select_images(*coco), options); }

  TempDir folder;
  std::shared_ptr<const CocoData> coco;
};

LoaderOptions small_options() {
  LoaderOptions options;
  options.transforms = training_transforms(32, 40);
  options.policy = {2, {"RandomPhotometricDistort", "RandomZoomOut", "RandomIoUCrop"}};
  options.denoising.num_denoising = 6;
  options.denoising.num_classes = 2;
  options.batch_size = 4;
  options.num_workers = 2;
  options.seed = 5;
  return options;
}

LoaderOptions evaluation_options() {
  LoaderOptions options = small_options();
  options.transforms = evaluation_transforms(32, 40);
  options.evaluation = true;
  return options;
}

std::vector<Batch> epoch_of(Loader& loader, std::int64_t epoch = 0, std::int64_t first_step = 0) {
  std::vector<Batch> batches;
  loader.start(epoch, first_step);
  for (Batch batch; loader.next(batch);) batches.push_back(batch);
  return batches;
}

void expect_same_batch(const Batch& a, const Batch& b) {
  CHECK(a.image_ids == b.image_ids);
  CHECK(a.orig_width == b.orig_width);
  CHECK(a.orig_height == b.orig_height);
  CHECK(a.size_h == b.size_h);
  CHECK(a.size_w == b.size_w);
  CHECK(a.denoising.groups == b.denoising.groups);
  CHECK(a.targets.total == b.targets.total);
  CHECK(a.targets.largest == b.targets.largest);
  for (const auto& [x, y] : {std::pair(a.images, b.images), {a.targets.labels, b.targets.labels}, {a.targets.boxes, b.targets.boxes},
                             {a.targets.counts, b.targets.counts}, {a.denoising.classes, b.denoising.classes}, {a.denoising.boxes, b.denoising.boxes},
                             {a.denoising.group, b.denoising.group}, {a.denoising.match, b.denoising.match}})
    expect_same_bits(x, y);
}

void expect_same_batches(const std::vector<Batch>& a, const std::vector<Batch>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) expect_same_batch(a[i], b[i]);
}

std::vector<std::int64_t> ids_of(const std::vector<Batch>& batches) {
  std::vector<std::int64_t> ids;
  for (const Batch& batch : batches) ids.insert(ids.end(), batch.image_ids.begin(), batch.image_ids.end());
  return ids;
}

}  // namespace

TEST_CASE("loader: an epoch, whatever the threads, the cache or the prefetch", "[cpu]") {
  const DataSet set(11);
  Loader one = set.loader(small_options());
  CHECK(one.steps() == 2);
  CHECK(one.images() == 11);
  const std::vector<Batch> first = epoch_of(one);
  REQUIRE(first.size() == 2);
  for (const Batch& batch : first) {
    CHECK(batch.images.shape() == Shape{4, 32, 40, 3});
    CHECK(batch.size_h == 32);
    CHECK(batch.size_w == 40);
    CHECK(batch.targets.boxes.shape() == Shape{4, 32, 4});
    CHECK(batch.denoising.boxes.shape() == Shape{4, 12, 4});
    for (const double value : values_of(batch.targets.boxes)) CHECK((value >= 0 && value <= 1));
  }
  const std::vector<std::int64_t> ids = ids_of(first);
  CHECK(std::set(ids.begin(), ids.end()).size() == 8);

  for (const int threads : {1, 2, 5}) {
    LoaderOptions options = small_options();
    options.num_workers = threads;
    options.prefetch = threads;
    options.cache_bytes = threads == 5 ? 20'000 : 0;   // room for some of the pictures
    Loader other = set.loader(options);
    expect_same_batches(epoch_of(other), first);
    const std::vector<Batch> second = epoch_of(other, 1);
    CHECK(ids_of(second) != ids);
    expect_same_batches(epoch_of(other), first);   // back to epoch 0: no state is left behind
    expect_same_batches(epoch_of(other, 1), second);
  }
  LoaderOptions options = small_options();
  options.seed = 6;
  Loader other = set.loader(options);
  CHECK(ids_of(epoch_of(other)) != ids);
}

TEST_CASE("loader: a resumed epoch goes on with the same batches", "[cpu]") {
  const DataSet set(13);
  LoaderOptions options = small_options();
  options.batch_size = 2;
  options.scales = {32, 64, 96};
  Loader loader = set.loader(options);
  const std::vector<Batch> all = epoch_of(loader, 1);
  REQUIRE(all.size() == 6);
  for (std::int64_t step = 0; step <= 6; ++step) {
    Loader resumed = set.loader(options);
    expect_same_batches(epoch_of(resumed, 1, step), {all.begin() + step, all.end()});
  }
}

TEST_CASE("loader: ranks share the global batches", "[cpu]") {
  const DataSet set(13);
  LoaderOptions options = small_options();
  options.scales = {32, 64};
  Loader whole = set.loader(options);
  const std::vector<Batch> all = epoch_of(whole);
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    options.rank = rank;
    options.ranks = 2;
    std::vector<std::int64_t> asked;
    options.agree = [&](std::int64_t epoch, std::int64_t step, const StepCounts& local) {
      CHECK(epoch == 0);
      CHECK(local.images == 2);
      asked.push_back(step);
      const Targets& all_targets = all[static_cast<std::size_t>(step)].targets;
      CHECK(local.largest <= all_targets.largest);
      return StepCounts{4, all_targets.total, all_targets.largest};
    };
    Loader part = set.loader(options);
    CHECK(part.steps() == 3);
    const std::vector<Batch> mine = epoch_of(part);
    CHECK(asked == std::vector<std::int64_t>{0, 1, 2});
    for (std::size_t s = 0; s < mine.size(); ++s) {
      const Batch& global = all[s];
      const std::int64_t begin = rank * 2, end = begin + 2;
      CHECK(mine[s].size_h == global.size_h);
      CHECK(mine[s].denoising.groups == global.denoising.groups);
      expect_same_bits(mine[s].images, global.images.slice(begin, end));
      expect_same_bits(mine[s].targets.boxes, global.targets.boxes.slice(begin, end));
      expect_same_bits(mine[s].denoising.boxes, global.denoising.boxes.slice(begin, end));
      expect_same_bits(mine[s].denoising.classes, global.denoising.classes.slice(begin, end));
      expect_same_bits(mine[s].denoising.match, global.denoising.match.slice(begin, end));
      expect_same_bits(mine[s].denoising.group, global.denoising.group);
    }
  }
}

TEST_CASE("loader: sizes are drawn by step, with the list's weights, up to the stop epoch", "[cpu]") {
  const DataSet set(3);
  LoaderOptions options = small_options();
  options.transforms = {Resize{32, 32}};
  options.batch_size = 1;
  options.scales = {32, 64, 64, 96};
  options.scales_stop_epoch = 90;
  Loader loader = set.loader(options);
  std::map<std::int64_t, int> seen;
  for (std::int64_t epoch = 0; epoch < 90; ++epoch)
    for (const Batch& batch : epoch_of(loader, epoch)) ++seen[batch.size_h];
  CHECK(seen.size() == 3);
  CHECK(seen[64] > 105);   // 135 expected of 270
  CHECK(seen[64] < 165);
  CHECK(seen[32] > 45);    // 67 expected
  for (const Batch& batch : epoch_of(loader, 90)) CHECK(batch.size_w == 32);
}

TEST_CASE("loader: a set smaller than a batch is wrapped, with other draws", "[cpu]") {
  const DataSet set(3);
  LoaderOptions options = small_options();
  options.batch_size = 8;
  std::vector<SampleRecord> records;
  options.on_sample = [&](const SampleRecord& record) { records.push_back(record); };
  Loader loader = set.loader(options);
  CHECK(loader.steps() == 1);
  const std::vector<Batch> batches = epoch_of(loader);
  REQUIRE(batches.size() == 1);
  const std::vector<std::int64_t> ids = batches[0].image_ids;
  REQUIRE(ids.size() == 8);
  CHECK(std::set(ids.begin(), ids.begin() + 3).size() == 3);
  for (std::size_t i = 3; i < 8; ++i) CHECK(ids[i] == ids[i - 3]);
  REQUIRE(records.size() == 8);
  std::map<std::int64_t, std::set<std::string>> draws;
  for (std::size_t i = 0; i < 8; ++i) {
    CHECK(records[i].image_id == ids[i]);
    draws[ids[i]].insert(records[i].draws);
  }
  for (const auto& [id, texts] : draws) CHECK(texts.size() >= 2);

  options.drop_last = false;
  options.batch_size = 2;
  Loader wrapped = set.loader(options);
  CHECK(wrapped.steps() == 2);
  for (const Batch& batch : epoch_of(wrapped)) CHECK(batch.image_ids.size() == 2);
}

TEST_CASE("loader: evaluation shows each image once, in order, as it is", "[cpu]") {
  const DataSet set(11);
  Loader loader = set.loader(evaluation_options());
  CHECK(loader.steps() == 3);
  const std::vector<Batch> batches = epoch_of(loader);
  REQUIRE(batches.size() == 3);
  CHECK(batches[2].images.shape() == Shape{3, 32, 40, 3});
  const std::vector<std::int64_t> ids = ids_of(batches);
  std::size_t at = 0;
  for (const Batch& batch : batches) {
    CHECK(batch.denoising.groups == 0);
    CHECK(batch.denoising.boxes.dim(1) == 0);
    for (std::size_t i = 0; i < batch.image_ids.size(); ++i, ++at) {
      const ImageRecord& record = set.coco->images[at];
      CHECK(batch.image_ids[i] == record.id);
      CHECK(batch.orig_width[i] == record.width);
      CHECK(batch.orig_height[i] == record.height);
      CHECK(batch.targets.counts.data<std::int64_t>()[i] == record.count);
      const Image wanted = resize_bilinear(decode_image(set.file(static_cast<std::int64_t>(at))).image, 40, 32);
      const Tensor shown = batch.images.slice(static_cast<std::int64_t>(i), static_cast<std::int64_t>(i) + 1);
      CHECK(std::equal(wanted.rgb.begin(), wanted.rgb.end(), shown.data<std::uint8_t>()));
    }
  }
  CHECK(at == 11);

  for (const std::int64_t ranks : {2, 4}) {   // one rank of four has nothing in the last step
    std::multiset<std::int64_t> seen;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      LoaderOptions options = evaluation_options();
      options.rank = rank;
      options.ranks = ranks;
      Loader part = set.loader(options);
      for (const std::int64_t id : ids_of(epoch_of(part))) seen.insert(id);
    }
    CHECK(std::vector(seen.begin(), seen.end()) == ids);
  }
}

TEST_CASE("loader: unreadable pictures in evaluation are left out and named", "[cpu]") {
  const DataSet set(9);
  set.spoil(1);
  for (const std::int64_t i : {4, 5, 6, 7}) set.spoil(i);   // a whole batch
  std::filesystem::remove(set.file(8));
  std::vector<std::int64_t> called;
  LoaderOptions options = evaluation_options();
  options.on_bad_image = [&](const BadImage& bad) { called.push_back(bad.image_id); };
  Loader loader = set.loader(options);
  const std::vector<Batch> batches = epoch_of(loader);
  REQUIRE(batches.size() == 1);
  CHECK(batches[0].image_ids == std::vector<std::int64_t>{100, 114, 121});
  CHECK(batches[0].images.dim(0) == 3);
  const Image third = resize_bilinear(decode_image(set.file(3)).image, 40, 32);
  CHECK(std::equal(third.rgb.begin(), third.rgb.end(), batches[0].images.slice(2, 3).data<std::uint8_t>()));
  CHECK(called == std::vector<std::int64_t>{107, 128, 135, 142, 149, 156});
  REQUIRE(loader.bad_images().size() == 6);
  CHECK(loader.bad_images()[0].reason.find("1.png") != std::string::npos);
  REQUIRE(loader.bad_images(5).size() == 1);
  CHECK(loader.bad_images(5)[0].image_id == 156);
  CHECK(loader.bad_images(7).empty());
}

TEST_CASE("loader: a batch that no memory can hold is the caller's exception", "[cpu]") {
  const DataSet set(3);
  LoaderOptions options = small_options();
  options.batch_size = std::int64_t{1} << 60;
  Loader loader = set.loader(options);
  Batch batch;
  for (int i = 0; i < 2; ++i) {
    loader.start(0);
    expect_throws<std::length_error>([&] { loader.next(batch); }, "");
  }
}

TEST_CASE("loader: with the reference's rules groups follow a rank's own pictures, in the slots of all", "[cpu]") {
  const DataSet set(12);
  for (const bool rules : {false, true}) {
    LoaderOptions options = small_options();
    options.rank_rules = rules;
    options.denoising.num_denoising = 40;
    std::int64_t elsewhere = 0;
    options.agree = [&](std::int64_t, std::int64_t, const StepCounts& local) {
      StepCounts all = local;
      all.largest = std::max(all.largest, elsewhere);
      return all;
    };
    Loader alone = set.loader(options);
    const std::vector<Batch> own = epoch_of(alone);
    elsewhere = 20;
    Loader loader = set.loader(options);
    const std::vector<Batch> batches = epoch_of(loader);
    for (std::size_t s = 0; s < batches.size(); ++s) {
      REQUIRE(own[s].targets.largest > 0);
      const std::int64_t largest = rules ? own[s].targets.largest : 20;
      CHECK(batches[s].agreed.largest == 20);
      CHECK(batches[s].denoising.groups == 40 / largest);
      CHECK(batches[s].denoising.classes.dim(1) == denoising_capacity(40, 20));
      if (rules) expect_same_batch(batches[s], own[s]);
    }
  }
}

TEST_CASE("loader: unreadable pictures in training", "[cpu]") {
  const DataSet set(12);
  LoaderOptions options = small_options();
  const std::vector<Batch> clean = [&] {
    Loader loader = set.loader(options);
    return epoch_of(loader);
  }();
  const std::vector<std::int64_t> order = ids_of(clean);
  const auto index_of = [](std::int64_t id) { return (id - 100) / 7; };
  set.spoil(index_of(order[5]));

  SECTION("one is within any share: the next of the epoch stands in for it") {
    std::vector<Batch> first;
    for (const int threads : {1, 3}) {
      options.num_workers = threads;
      int calls = 0;
      options.on_bad_image = [&](const BadImage& bad) {
        CHECK(bad.image_id == order[5]);
        CHECK(bad.step == 1);
        ++calls;
      };
      Loader loader = set.loader(options);
      const std::vector<Batch> batches = epoch_of(loader);
      std::vector<std::int64_t> wanted = order;
      wanted[5] = order[6];
      CHECK(ids_of(batches) == wanted);
      expect_same_batch(batches[0], clean[0]);
      expect_same_bits(batches[1].images.slice(2, 3), clean[1].images.slice(2, 3));   // its own turn is as ever
      if (first.empty()) first = batches;
      expect_same_batches(batches, first);
      epoch_of(loader, 1);
      CHECK(calls == 1);
      CHECK(loader.bad_images().size() == 1);
    }
  }
  SECTION("more than the share ends the epoch at its step") {
    set.spoil(index_of(order[9]));
    options.on_bad_image = nullptr;
    Loader loader = set.loader(options);
    loader.start(0);
    Batch batch;
    REQUIRE(loader.next(batch));
    REQUIRE(loader.next(batch));
    expect_throws<DataError>([&] { loader.next(batch); }, "2 of 12 images cannot be read, more than data.max_bad_share allows (1)");
    expect_throws<DataError>([&] { loader.next(batch); }, "2 of 12");   // and stays so
    options.max_bad_share = 0.2;
    Loader lenient = set.loader(options);
    CHECK(epoch_of(lenient).size() == 3);
  }
  SECTION("of several ranks the share is of all their pictures") {
    options.on_bad_image = nullptr;
    options.ranks = 2;
    options.rank = 0;                                   // it meets the one picture
    std::int64_t elsewhere = 0;
    std::vector<std::int64_t> told;
    options.agree = [&](std::int64_t, std::int64_t, const StepCounts& local) {
      told.push_back(local.bad);
      StepCounts all = local;
      all.bad += elsewhere;
      return all;
    };
    Loader alone = set.loader(options);
    CHECK(epoch_of(alone).size() == 3);
    CHECK(told == std::vector<std::int64_t>{0, 1, 1});
    elsewhere = 1;
    Loader loader = set.loader(options);
    loader.start(0);
    Batch batch;
    REQUIRE(loader.next(batch));
    expect_throws<DataError>([&] { loader.next(batch); }, "2 of 12 images cannot be read, more than data.max_bad_share allows (1); the last: ");
  }
  SECTION("stop") {
    options.bad_images = BadImages::stop;
    Loader loader = set.loader(options);
    loader.start(0);
    Batch batch;
    REQUIRE(loader.next(batch));
    expect_throws<DataError>([&] { loader.next(batch); }, set.coco->images[static_cast<std::size_t>(index_of(order[5]))].file_name);
  }
  SECTION("skip goes on while one can be read") {
    options.bad_images = BadImages::skip;
    for (std::int64_t i = 1; i < 12; ++i) set.spoil(i);
    std::filesystem::remove(set.file(0));
    write_image(set.file(0), Image(20, 30));
    Loader loader = set.loader(options);
    const std::vector<std::int64_t> ids = ids_of(epoch_of(loader));
    CHECK(ids == std::vector<std::int64_t>(12, 100));
    set.spoil(0);
    expect_throws<DataError>([&] { epoch_of(loader); }, "none of the 12 images can be read");
  }
}

TEST_CASE("loader: boxes follow the decoded picture", "[cpu]") {
  const TempDir folder;
  write_image(folder / "a.png", Image(20, 10));
  auto coco = std::make_shared<CocoData>();
  coco->categories = {{1, "x"}};
  coco->images = {{5, "a.png", 0, 0, 0, 4}};
  coco->annotations = {{1, 0, 0, {}, {15, 5, 30, 30}, 0, false, true},      // clipped to 15 5 20 10
                       {2, 0, 0, {}, {25, 0, 30, 10}, 0, false, true},      // wholly outside
                       {3, 0, 0, {}, {0, 0, 10, 10}, 0, true, false},       // crowd
                       {4, 0, 0, {}, {2, 2, 12, 7}, 0, false, true}};
  LoaderOptions options = evaluation_options();
  options.dtype = DType::f64;
  Loader loader(coco, folder.path(), {0}, options);
  const Batch batch = epoch_of(loader).at(0);
  CHECK(batch.targets.total == 2);
  const std::vector<double> boxes = values_of(batch.targets.boxes);
  const std::vector<double> wanted{0.875, 0.75, 0.25, 0.5, 0.35, 0.45, 0.5, 0.5};
  for (std::size_t i = 0; i < wanted.size(); ++i) detr::test::expect_close(boxes[i], wanted[i], 1e-12);
}

TEST_CASE("loader: stops at any time and hands failures over", "[cpu]") {
  const DataSet set(9);
  LoaderOptions options = small_options();
  options.batch_size = 1;
  options.num_workers = 3;
  Batch batch;
  for (int taken = 0; taken < 5; ++taken) {
    Loader loader = set.loader(options);
    loader.start(0);
    for (int i = 0; i < taken; ++i) REQUIRE(loader.next(batch));
    if (taken % 2) loader.stop();
    else loader.start(1, 3);
  }
  options.on_sample = [](const SampleRecord& record) {
    if (record.step == 2) throw StorageError("the log is full");
  };
  Loader loader = set.loader(options);
  loader.start(0);
  REQUIRE(loader.next(batch));
  REQUIRE(loader.next(batch));
  expect_throws<StorageError>([&] { loader.next(batch); }, "the log is full");
  loader.start(0, 3);   // and can begin anew
  REQUIRE(loader.next(batch));
  CHECK(loader.last_wait_s() >= 0);
  CHECK(loader.times().wait_s >= loader.last_wait_s());
  CHECK(loader.times().decode_s > 0);
}

TEST_CASE("loader: a subset of the images", "[cpu]") {
  const DataSet set(12);
  const std::vector<std::int64_t> full = select_images(*set.coco, true);
  CHECK(full.size() < 12);
  for (const std::int64_t i : full) CHECK(set.coco->images[static_cast<std::size_t>(i)].count > 0);
  const std::vector<std::int64_t> three = select_images(*set.coco, true, 3);
  CHECK(three == std::vector<std::int64_t>(full.begin(), full.begin() + 3));
  Loader loader(set.coco, set.folder.path(), three, evaluation_options());
  CHECK(ids_of(epoch_of(loader)).size() == 3);
}

TEST_CASE("loader: options are checked", "[cpu]") {
  const DataSet set(2);
  const auto with = [&](const std::function<void(LoaderOptions&)>& change) {
    return [&set, change] {
      LoaderOptions options = small_options();
      change(options);
      set.loader(options);
    };
  };
  expect_throws<DataError>([&] { Loader(set.coco, set.folder.path(), {}, small_options()); }, "no images to load");
  expect_throws<InvalidArgument>([&] { Loader(set.coco, set.folder.path(), {2}, small_options()); }, "image index 2 of 2");
  expect_throws<ConfigError>(with([](LoaderOptions& o) { o.ranks = 3; }), "batch size 4 must be a multiple of the 3 ranks");
  expect_throws<ConfigError>(with([](LoaderOptions& o) { o.batch_size = 0; }), "batch size 0");
  expect_throws<InvalidArgument>(with([](LoaderOptions& o) { o.rank = 1; }), "rank 1 of 1");
  expect_throws<InvalidArgument>(with([](LoaderOptions& o) { o.num_workers = 0; }), "num_workers must be >= 1");
  expect_throws<InvalidArgument>(with([](LoaderOptions& o) { o.prefetch = 0; }), "prefetch must be >= 1");
  expect_throws<ConfigError>(with([](LoaderOptions& o) { o.max_bad_share = 2; }), "data.max_bad_share must be in [0, 1]");
  expect_throws<ConfigError>(with([](LoaderOptions& o) { o.scales = {0}; }), "collate_fn.scales");
  expect_throws<ConfigError>(with([](LoaderOptions& o) { o.transforms = {}; }), "add Resize");
  expect_throws<ConfigError>(with([](LoaderOptions& o) { o.transforms = {Resize{0, 4}}; }), "size must be at least 1 x 1");
  expect_throws<ConfigError>(with([](LoaderOptions& o) { o.denoising.num_classes = 1; }), "has 2 categories, the model 1 classes");
  Loader loader = set.loader(small_options());
  Batch batch;
  expect_throws<InvalidArgument>([&] { loader.next(batch); }, "next() without start()");
  expect_throws<InvalidArgument>([&] { loader.start(0, 2); }, "step 2 of 1");
}

TEST_CASE("loader: real pictures", "[cpu]") {
  const std::filesystem::path folder = detr::test::shared_data() / "bccd";
  if (!std::filesystem::exists(folder)) SKIP("no shared data");
  Findings findings;
  const auto coco = std::make_shared<const CocoData>(read_coco(folder / "annotations" / "instances_val.json", findings));
  LoaderOptions options = small_options();
  options.transforms = training_transforms(160, 160);
  options.denoising.num_classes = 3;
  options.batch_size = 8;
  Loader loader(coco, folder / "images", select_images(*coco, false, 16), options);
  loader.start(0);
  Batch batch;
  std::int64_t boxes = 0;
  while (loader.next(batch)) boxes += batch.targets.total;
  CHECK(boxes > 50);
  CHECK(loader.bad_images().empty());
}

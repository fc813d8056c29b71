#include "data/synth.h"

#include <algorithm>
#include <map>
#include <set>

#include "data/coco.h"
#include "data/image.h"
#include "tests/support.h"

namespace detr::data {
namespace {

namespace fs = std::filesystem;
using test::expect_throws;

SynthOptions small(const fs::path& out) {
  SynthOptions options;
  options.out = out;
  options.images = 10;
  options.height = 48;
  options.width = 64;
  options.max_boxes = 3;
  options.seed = 5;
  return options;
}

fs::path annotation_file(const fs::path& out, const std::string& split) { return out / "annotations" / ("instances_" + split + ".json"); }

/// Every file below a folder and its bytes.
std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) files[fs::relative(entry.path(), folder).string()] = test::read_text(entry.path());
  return files;
}

TEST_CASE("synth: a data set that reads without a finding", "[cpu]") {
  const test::TempDir folder;
  SynthOptions options = small(folder / "set");
  options.images = 20;
  options.classes = 12;
  options.empty_share = 0.2;
  options.crowd_share = 0.25;
  options.vary_size = true;
  const SynthCounts counts = make_synthetic(options);
  CHECK(counts.train == 16);
  CHECK(counts.val == 4);
  CHECK(counts.empty == 4);
  CHECK(counts.crowds == 4);   // a quarter of 16

  std::int64_t boxes = 0, crowds = 0, empty = 0;
  std::set<std::int64_t> ids, sizes, classes;
  for (const std::string split : {"train", "val"}) {
    Findings findings;
    const CocoData coco = read_coco(annotation_file(options.out, split), findings);
    CHECK(findings.all().empty());
    REQUIRE(coco.categories.size() == 12);
    CHECK(coco.categories[0].id == 3);
    CHECK(coco.categories[2].id == 12);
    CHECK(coco.categories[1].name == "square");
    CHECK(coco.categories[11].name == "striped square");
    for (const ImageRecord& image : coco.images) {
      CHECK(ids.insert(image.id).second);
      sizes.insert(image.width);
      empty += image.count == 0;
      const Image picture = decode_image(options.out / "images" / split / image.file_name).image;
      CHECK(picture.width == image.width);
      CHECK(picture.height == image.height);
      std::int64_t real = 0;
      for (std::int64_t i = image.first; i < image.first + image.count; ++i) {
        const Annotation& a = coco.annotations[static_cast<std::size_t>(i)];
        const auto& [x, y, w, h] = a.box_xywh;
        CHECK((x >= 0 && y >= 0 && w >= 4 && h >= 4 && x + w <= static_cast<double>(image.width) && y + h <= static_cast<double>(image.height)));
        CHECK((a.area > 0 && a.area <= w * h));
        real += !a.crowd;
        crowds += a.crowd;
        if (!a.crowd) classes.insert(a.label);
      }
      CHECK(real <= options.max_boxes);
      CHECK((real > 0) == (image.count > 0));
      boxes += real;
    }
  }
  CHECK(boxes == counts.boxes);
  CHECK(crowds == counts.crowds);
  CHECK(empty == counts.empty);
  CHECK(sizes.size() > 3);
  CHECK(classes.size() == 12);
}

TEST_CASE("synth: the same bytes for a seed, on any number of threads", "[cpu]") {
  const test::TempDir folder;
  SynthOptions options = small(folder / "a");
  options.crowd_share = 0.5;
  make_synthetic(options);
  options.out = folder / "b";
  options.threads = 3;
  make_synthetic(options);
  const auto first = contents(folder / "a");
  CHECK(first.size() == 12);
  CHECK(first == contents(folder / "b"));
  options.out = folder / "c";
  options.seed = 6;
  make_synthetic(options);
  CHECK(first.at("images/val/000009.png") != contents(folder / "c").at("images/val/000009.png"));
}

TEST_CASE("synth: the shape is the class", "[cpu]") {
  const test::TempDir folder;
  SynthOptions options = small(folder / "set");
  options.height = options.width = 128;
  options.max_boxes = 6;
  options.classes = 10;
  make_synthetic(options);
  Findings findings;
  const CocoData coco = read_coco(annotation_file(options.out, "train"), findings);
  std::vector<double> filled(10, 0), seen(10, 0);
  for (const Annotation& a : coco.annotations) {
    filled[static_cast<std::size_t>(a.label)] += a.area / (a.box_xywh[2] * a.box_xywh[3]);
    ++seen[static_cast<std::size_t>(a.label)];
  }
  const auto mean = [&](std::size_t label) {
    REQUIRE(seen[label] > 0);
    return filled[label] / seen[label];
  };
  const double circle = mean(0), square = mean(1), triangle = mean(2), cross = mean(3), ring = mean(4), star = mean(6);
  CHECK(square > 0.75);                                // less than 1 where turned
  CHECK((circle > 0.7 && circle < 0.83));              // pi / 4
  CHECK((triangle > 0.42 && triangle < 0.58));
  CHECK((cross > 0.42 && cross < 0.62));
  CHECK((ring > 0.48 && ring < 0.6));                  // pi / 4 x 0.7
  CHECK((star > 0.25 && star < 0.42));

  // Boxes are tight and shapes stand out: in a picture with one shape, colours step at the box and not beside it.
  options.out = folder / "one";
  options.max_boxes = 1;
  options.classes = 2;
  make_synthetic(options);
  const CocoData one = read_coco(annotation_file(options.out, "train"), findings);
  for (const Annotation& a : one.annotations) {
    if (a.label != 0) continue;   // a circle touches the middle of each side
    const ImageRecord& record = one.images[static_cast<std::size_t>(a.image)];
    const Image picture = decode_image(options.out / "images" / "train" / record.file_name).image;
    const auto x = static_cast<std::int64_t>(a.box_xywh[0]), y = static_cast<std::int64_t>(a.box_xywh[1] + a.box_xywh[3] / 2);
    const auto differs = [&](std::int64_t from, std::int64_t to) {
      int sum = 0;
      for (int c = 0; c < 3; ++c) sum += std::abs(picture.at(from, y)[c] - picture.at(to, y)[c]);
      return sum;
    };
    if (x < 6) continue;
    CHECK(differs(x - 2, x + 3) > 60);
    CHECK(differs(x - 6, x - 3) < 60);
  }
}

TEST_CASE("synth: every fault is in the train file alone", "[cpu]") {
  const test::TempDir folder;
  SynthOptions options = small(folder / "good");
  options.images = 4;
  options.height = options.width = 48;
  make_synthetic(options);
  const std::string good_train = test::read_text(annotation_file(options.out, "train"));
  const std::string good_val = test::read_text(annotation_file(options.out, "val"));

  enum class Answer { refused, found, clean };
  const std::map<std::string, std::pair<Answer, std::string>> answers = {
      {"annotation-duplicate-id", {Answer::found, "annotation-duplicate-id"}}, {"box-huge", {Answer::found, ""}},
      {"box-nan", {Answer::found, ""}}, {"box-negative-height", {Answer::found, "box-negative-size"}},
      {"box-null", {Answer::refused, ""}}, {"box-partly-outside", {Answer::found, "box-clipped"}}, {"box-text", {Answer::refused, ""}},
      {"box-three-numbers", {Answer::refused, ""}}, {"box-wholly-outside", {Answer::found, "box-outside"}},
      {"box-zero-width", {Answer::found, "box-zero-area"}}, {"categories-absent", {Answer::refused, "categories"}},
      {"category-duplicate-id", {Answer::refused, "again"}}, {"category-unknown", {Answer::refused, "category_id"}},
      {"ids-as-text", {Answer::refused, ""}}, {"ids-over-2-to-53", {Answer::clean, ""}}, {"image-duplicate-id", {Answer::refused, ""}},
      {"image-file-missing", {Answer::clean, ""}}, {"image-path-escapes", {Answer::clean, ""}}, {"image-size-absent", {Answer::found, ""}},
      {"image-size-wrong", {Answer::clean, ""}}, {"image-unknown", {Answer::found, "image-unknown"}},
      {"json-byte-order-mark", {Answer::clean, ""}}, {"json-deep-nesting", {Answer::refused, ""}}, {"json-empty-file", {Answer::refused, "empty"}},
      {"json-trailing-comma", {Answer::refused, "JSON"}}, {"json-truncated", {Answer::refused, "JSON"}},
      {"keys-optional-absent", {Answer::clean, ""}}, {"no-annotations", {Answer::found, ""}}, {"no-images", {Answer::refused, "images"}},
      {"only-crowd", {Answer::found, ""}}, {"top-level-list", {Answer::refused, "list"}},
  };
  const std::vector<std::string> faults = synth_faults();
  REQUIRE(faults.size() == answers.size());
  for (const std::string& fault : faults) {
    INFO(fault);
    options.out = folder / fault;
    options.fault = fault;
    make_synthetic(options);
    CHECK(test::read_text(annotation_file(options.out, "train")) != good_train);
    CHECK(test::read_text(annotation_file(options.out, "val")) == good_val);
    REQUIRE(answers.count(fault) == 1);
    const auto& [answer, text] = answers.at(fault);
    Findings findings;
    const auto read = [&] { read_coco(annotation_file(options.out, "train"), findings); };
    if (answer == Answer::refused) {
      expect_throws<DataError>(read, text);
    } else {
      CHECK_NOTHROW(read());
      if (answer == Answer::found) CHECK(findings.has(Finding::Severity::warning));
      else CHECK(!findings.has(Finding::Severity::warning));
      if (answer == Answer::found && !text.empty()) CHECK(findings.find(text) != nullptr);
    }
  }
}

TEST_CASE("synth: faults on file are the faults of the awkward set", "[cpu]") {
  const fs::path shared = test::shared_data();
  if (shared.empty()) SKIP("no shared data");
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(shared / "awkward" / "faulty")) names.push_back(entry.path().stem().string());
  std::sort(names.begin(), names.end());
  CHECK(names == synth_faults());
}

TEST_CASE("synth: what is refused", "[cpu]") {
  const test::TempDir folder;
  const SynthOptions good = small(folder / "set");
  const auto refused = [&](auto&& change, const std::string& text) {
    SynthOptions options = good;
    change(options);
    expect_throws<ConfigError>([&] { make_synthetic(options); }, text);
  };
  refused([](SynthOptions& o) { o.images = 1; }, "images must be at least 2");
  refused([](SynthOptions& o) { o.val_share = 0; }, "val share");
  refused([](SynthOptions& o) { o.classes = 81; }, "classes must be 1 to 80");
  refused([](SynthOptions& o) { o.height = 31; }, "size must be 32 to 8192");
  refused([](SynthOptions& o) { o.width = 8193; }, "size must be 32 to 8192");
  refused([](SynthOptions& o) { o.max_boxes = 0; }, "max-boxes must be 1 to 300");
  refused([](SynthOptions& o) { o.empty_share = 1; }, "empty share");
  refused([](SynthOptions& o) { o.crowd_share = 1.5; }, "crowd share");
  refused([](SynthOptions& o) { o.threads = 0; }, "threads");
  CHECK(!fs::exists(good.out));

  SynthOptions unknown = good;
  unknown.fault = "box-green";
  expect_throws<ConfigError>([&] { make_synthetic(unknown); }, "unknown fault 'box-green'; there are: annotation-duplicate-id box-huge");
  CHECK(!fs::exists(good.out));

  test::write_text(good.out / "other.txt", "x");
  expect_throws<ConfigError>([&] { make_synthetic(good); }, "not an empty folder");
  SynthOptions nowhere = good;
  nowhere.out = good.out / "other.txt" / "below";
  expect_throws<StorageError>([&] { make_synthetic(nowhere); }, "cannot be made");
}

}  // namespace
}  // namespace detr::data

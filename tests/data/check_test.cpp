#include "data/check.h"

#include "data/discover.h"
#include "data/fix.h"
#include "data/pictures.h"
#include "data/prepare.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::data;
using namespace detr::test;

namespace fs = std::filesystem;

namespace {

/// A picture of that size, stored with that EXIF orientation (1: no EXIF).
void write_picture(const fs::path& file, std::int64_t width, std::int64_t height, char orientation = 1, std::uint8_t shade = 90) {
  Image image(width, height);
  std::fill(image.rgb.begin(), image.rgb.end(), shade);
  const std::vector<std::uint8_t> jpeg = encode_jpeg(image);
  std::string bytes(jpeg.begin(), jpeg.end());
  // APP1: length, "Exif", a little-endian TIFF with one entry: tag 0x0112, SHORT, one value.
  const char exif[] = {'\xff', '\xe1', 0, 34, 'E', 'x', 'i', 'f', 0, 0, 'I', 'I', 42, 0, 8, 0, 0, 0,
                       1, 0, 0x12, 1, 3, 0, 1, 0, 0, 0, orientation, 0, 0, 0, 0, 0, 0, 0};
  if (orientation != 1) bytes.insert(2, exif, sizeof exif);
  write_text(file, bytes);
}

struct ImageLine {
  std::string file;
  std::int64_t width, height;
};

/// An annotation file with images 0, 1, ... and boxes "[x, y, w, h]" on image 0, ids from 1.
std::string coco(const std::vector<ImageLine>& images, const std::vector<std::string>& boxes, const std::string& name = "a") {
  std::string text = "{\"images\": [";
  for (std::size_t i = 0; i < images.size(); ++i)
    text += concat(i ? ", " : "", "{\"id\": ", i, ", \"file_name\": \"", images[i].file, "\", \"width\": ", images[i].width,
                   ", \"height\": ", images[i].height, "}");
  text += "], \"annotations\": [";
  for (std::size_t i = 0; i < boxes.size(); ++i)
    text += concat(i ? ", " : "", "{\"id\": ", i + 1, ", \"image_id\": 0, \"category_id\": 1, \"bbox\": ", boxes[i], "}");
  return text + "], \"categories\": [{\"id\": 1, \"name\": \"" + name + "\"}]}";
}

struct Set {
  TempDir dir;
  ThreadPool pool{2};
  fs::path images() const { return dir / "images"; }
  CocoData read(const std::string& text, Findings& findings) {
    write_text(dir / "set.json", text);
    return read_coco(dir / "set.json", findings);
  }
  /// Reads, prepares, and gives the findings.
  Findings prepare(const std::string& text, CocoData& data, const PrepareOptions& options = {}) {
    Findings findings;
    data = read(text, findings);
    prepare_for_training(data, images(), options, pool, findings);
    return findings;
  }
  CheckReport check(const std::string& text, std::int64_t decode = -1) {
    write_text(dir / "set.json", text);
    CheckOptions options;
    options.splits = {{"train", dir / "set.json", images()}};
    options.decode = decode;
    return check_data_set(options, pool);
  }
};

std::array<std::int64_t, 2> size_of(const CocoData& data) { return {data.images[0].width, data.images[0].height}; }

}  // namespace

TEST_CASE("prepare: EXIF follows the size in the json", "[cpu]") {
  Set set;
  write_picture(set.images() / "a.jpg", 100, 40, 6);
  CocoData data;
  Findings findings = set.prepare(coco({{"a.jpg", 40, 100}}, {"[0, 50, 10, 50]"}), data);
  CHECK(size_of(data) == std::array<std::int64_t, 2>{40, 100});
  CHECK(findings.count("exif-turned") == 1);
  CHECK(findings.all().size() == 1);
  findings = set.prepare(coco({{"a.jpg", 100, 40}}, {"[50, 0, 50, 10]"}), data);
  CHECK(size_of(data) == std::array<std::int64_t, 2>{100, 40});
  CHECK(findings.count("exif-as-stored") == 1);
  CHECK(findings.all().size() == 1);
  findings = set.prepare(coco({{"a.jpg", -1, -1}}, {"[0, 50, 10, 50]"}), data);
  CHECK(size_of(data) == std::array<std::int64_t, 2>{40, 100});
  CHECK(findings.count("exif-ambiguous") == 1);
  PrepareOptions ignore;
  ignore.exif = Exif::ignore;
  findings = set.prepare(coco({{"a.jpg", 40, 100}}, {"[0, 5, 10, 5]"}), data, ignore);
  CHECK(size_of(data) == std::array<std::int64_t, 2>{100, 40});
  CHECK(findings.count("image-size-swapped") == 1);

  write_picture(set.images() / "square.jpg", 50, 50, 3);
  findings = set.prepare(coco({{"square.jpg", 50, 50}}, {"[0, 5, 10, 5]"}), data);
  CHECK(findings.count("exif-ambiguous") == 1);
}

TEST_CASE("prepare: the picture's size wins", "[cpu]") {
  Set set;
  write_picture(set.images() / "a.jpg", 60, 40);
  CocoData data;
  Findings findings = set.prepare(coco({{"a.jpg", 40, 60}}, {"[30, 10, 40, 10]"}), data);
  CHECK(findings.count("image-size-swapped") == 1);
  CHECK(data.annotations[0].box_xyxy == std::array<double, 4>{30, 10, 60, 20});
  findings = set.prepare(coco({{"a.jpg", 61, 40}}, {"[30, 10, 10, 10]"}), data);
  CHECK(findings.count("image-size-wrong") == 1);
  CHECK(size_of(data) == std::array<std::int64_t, 2>{60, 40});
  findings = set.prepare(coco({{"a.jpg", 0, 40}}, {"[70, 10, 10, 10]", "[50, 30, 90, 90]"}), data);
  CHECK(findings.count("box-outside") == 1);
  CHECK(findings.count("box-clipped") == 1);
  CHECK(!data.annotations[0].trainable);
  CHECK(data.annotations[1].box_xyxy == std::array<double, 4>{50, 30, 60, 40});
  for (const ImageLine& scaled : {ImageLine{"a.jpg", 120, 80}, ImageLine{"a.jpg", 30, 20}, ImageLine{"a.jpg", 100, 67}}) {
    expect_throws<DataError>([&] { set.prepare(coco({scaled}, {"[3, 1, 4, 5]"}), data); }, "another scale");
    expect_throws<DataError>([&] { set.prepare(coco({scaled}, {"[3, 1, 4, 5]"}), data); }, "image 0 (a.jpg)");
  }
}

TEST_CASE("prepare: files that cannot be used are refused, left out or kept", "[cpu]") {
  Set set;
  write_picture(set.images() / "good.jpg", 60, 40);
  write_text(set.images() / "empty.jpg", "");
  write_text(set.images() / "page.jpg", "<html>not found</html>");
  fs::create_directories(set.images() / "folder.jpg");
  write_text(set.dir / "secret.jpg", "x");
  const std::string text = coco({{"absent.jpg", 9, 9}, {"empty.jpg", 9, 9}, {"page.jpg", 9, 9}, {"folder.jpg", 9, 9},
                                 {"../secret.jpg", 9, 9}, {"good.jpg", 60, 40}}, {"[1, 1, 5, 5]"});
  CocoData data;
  const auto refused = [&](const std::string& words) { expect_throws<DataError>([&] { set.prepare(text, data); }, words); };
  refused("5 of 6 images cannot be used under " + set.images().string());
  refused("image 0 (absent.jpg): no such file | image 1 (empty.jpg): the file is empty | image 2 (page.jpg): ");
  refused("image 3 (folder.jpg): is a folder | image 4 (../secret.jpg): image \"../secret.jpg\": the path leads out");
  refused("--bad-images skip");
  CHECK(data.images.size() == 6);

  PrepareOptions options;
  options.unusable = Unusable::drop;
  Findings findings = set.prepare(text, data, options);
  CHECK(findings.count("images-left-out") == 5);
  REQUIRE(data.images.size() == 1);
  CHECK(data.images[0].id == 5);
  CHECK(data.annotations.empty());
  CHECK(!findings.has(Finding::Severity::error));
  options.unusable = Unusable::keep;
  findings = set.prepare(text, data, options);
  CHECK(findings.count("images-unreadable") == 5);
  CHECK(data.images.size() == 6);

  options.unusable = Unusable::drop;
  expect_throws<DataError>([&] { set.prepare(coco({{"absent.jpg", 9, 9}}, {}), data, options); }, "none of 1 images");
  options.limits.max_side = 50;
  expect_throws<DataError>([&] { set.prepare(coco({{"good.jpg", 60, 40}}, {}), data, options); }, "60 x 40 pixels");
}

TEST_CASE("check: boxes written as corners", "[cpu]") {
  Set set;
  write_picture(set.images() / "a.jpg", 100, 80);
  const std::vector<std::string> corners = {"[60, 10, 90, 30]", "[50, 50, 70, 70]", "[5, 40, 20, 79]", "[80, 0, 100, 80]"};
  const std::vector<std::string> sizes = {"[60, 10, 40, 30]", "[50, 50, 30, 40]", "[5, 40, 20, 79]", "[80, 0, 25, 80]"};
  const CheckReport found = set.check(coco({{"a.jpg", 100, 80}}, corners));
  REQUIRE(found.findings.count("corner-boxes") == 1);
  CHECK(found.findings.find("corner-boxes")->items[0].find("100 % of 4 boxes leave") != std::string::npos);
  CHECK(found.findings.find("corner-boxes")->severity == Finding::Severity::warning);
  CHECK(set.check(coco({{"a.jpg", 100, 80}}, sizes)).findings.count("corner-boxes") == 0);   // some leave, but are no corners
  CocoData data;
  CHECK(set.prepare(coco({{"a.jpg", 0, 0}}, corners), data).count("corner-boxes") == 1);   // by the picture's size
}

TEST_CASE("check: pictures are decoded as far as asked", "[cpu]") {
  Set set;
  std::vector<ImageLine> lines;
  for (int i = 0; i < 4; ++i) {
    lines.push_back({concat(i, ".jpg"), 200, 200});
    write_picture(set.images() / lines.back().file, 200, 200);
    const std::string bytes = read_text(set.images() / lines.back().file);
    if (i % 2 == 1) write_text(set.images() / lines.back().file, bytes.substr(0, bytes.size() / 2));
  }
  const CheckReport all = set.check(coco(lines, {}));
  CHECK(all.findings.count("image-damaged") + all.findings.count("image-decode-warning") == 2);
  CHECK(all.findings.all().back().items[0].find("train: image 1 (1.jpg)") == 0);
  CHECK(set.check(coco(lines, {}), 0).findings.count("image-damaged") == 0);
  CHECK(set.check(coco(lines, {}), 2).findings.count("image-damaged") == 2);   // the second and the fourth
}

TEST_CASE("check: statistics", "[cpu]") {
  Set set;
  std::vector<ImageLine> lines;
  for (int i = 0; i < 3; ++i) {
    lines.push_back({concat(i, ".jpg"), 200, 200});
    write_picture(set.images() / lines.back().file, 200, 200);
  }
  const CheckReport report = set.check(coco(lines, {"[0, 0, 10, 10]", "[0, 0, 50, 50]", "[0, 0, 150, 150]", "[0, 0, 0, 5]"}));
  REQUIRE(report.splits.size() == 1);
  const DataStats& stats = report.splits[0].stats;
  CHECK((stats.images == 3 && stats.background == 2 && stats.boxes == 4 && stats.trainable == 3 && stats.crowd == 0));
  CHECK((stats.small == 2 && stats.medium == 1 && stats.large == 1));
  CHECK((stats.most_per_image == 3 && stats.p99_per_image == 3));
  CHECK(stats.per_class == std::vector<std::int64_t>{3});
  CHECK(report.findings.count("box-zero-area") == 1);
}

TEST_CASE("check: what splits must not share", "[cpu]") {
  Set set;
  write_picture(set.images() / "a.jpg", 30, 30, 1, 10);
  write_picture(set.images() / "b.jpg", 30, 30, 1, 10);
  write_picture(set.images() / "c.jpg", 30, 30, 1, 200);
  write_text(set.dir / "train.json", coco({{"a.jpg", 30, 30}, {"c.jpg", 30, 30}}, {"[1, 1, 5, 5]"}));
  write_text(set.dir / "val.json", coco({{"b.jpg", 30, 30}, {"./c.jpg", 30, 30}}, {"[1, 1, 5, 5]"}, "other"));
  CheckOptions options;
  options.splits = {{"train", set.dir / "train.json", set.images()}, {"val", set.dir / "val.json", set.images()},
                    {"test", set.dir / "absent.json", set.images()}};
  options.duplicates = true;
  const CheckReport report = check_data_set(options, set.pool);
  CHECK(report.findings.count("categories-differ") == 1);
  CHECK(report.findings.find("categories-differ")->items[0] == "val has 1 other; train has 1 a");
  CHECK(report.findings.count("file-in-two-splits") == 1);
  CHECK(report.findings.count("picture-in-two-splits") == 2);
  CHECK(report.findings.find("picture-in-two-splits")->items[0] ==
        "val: image 0 (b.jpg) has the bytes of image 0 (a.jpg) of train");
  CHECK(report.findings.count("annotations-unusable") == 1);
  CHECK(report.findings.has(Finding::Severity::error));
  CHECK(!report.splits[2].readable);
}

TEST_CASE("fix: a repaired copy reads without a finding", "[cpu]") {
  Set set;
  write_picture(set.images() / "a.jpg", 100, 80);
  const std::string bad = R"({"info": {"x": NaN},
    "images": [{"id": "7", "file_name": "a.jpg", "license": 3, "width": 50, "height": 11},
    {"id": 8, "file_name": "absent.jpg"}, {"id": 7, "file_name": "a.jpg"}],
    "annotations": [{"id": "1", "image_id": "7", "category_id": 2.0, "bbox": [90, 10, 20, 5], "segmentation": [[1, 2]]},
    {"id": 1, "image_id": 7, "category_id": 2, "bbox": ["1", "2.5", "3", "4"], "area": 7},
    {"image_id": 7, "category_id": 2, "bbox": [1, 2, 3, 4], "iscrowd": "1"},
    {"id": 5, "image_id": 7, "category_id": 2, "bbox": [1, 2, 3]},
    {"id": 6, "image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4]},
    {"id": 9, "image_id": 8, "category_id": 2, "bbox": [1, 2, 3, 4]},
    {"id": 10, "image_id": 7, "category_id": 2, "bbox": [1, 2, 0, 4]},
    {"id": 11, "image_id": 7, "category_id": 2, "bbox": [1, 2, NaN, 4]}],
    "categories": [{"id": 2, "name": "cat \"1\"", "supercategory": "animal"}]})";
  write_text(set.dir / "bad.json", bad);
  Findings changes;
  write_fixed(set.dir / "bad.json", set.images(), Exif::automatic, set.dir / "good.json", set.pool, changes);
  for (const char* const kind : {"id-as-text", "id-as-float", "box-invalid", "category-unknown", "image-unknown", "image-missing",
                                 "box-zero-area", "box-not-finite", "box-clipped", "annotation-new-id", "image-duplicate-id"}) {
    INFO(kind);
    CHECK(changes.count(kind) >= 1);
  }
  CHECK(!changes.has(Finding::Severity::error));

  Findings findings;
  const CocoData data = read_coco(set.dir / "good.json", findings);
  CHECK(findings.all().empty());
  REQUIRE(data.images.size() == 1);
  CHECK((data.images[0].id == 7 && data.images[0].width == 100 && data.images[0].height == 80));
  REQUIRE(data.annotations.size() == 3);
  CHECK((data.annotations[0].box_xywh == std::array<double, 4>{90, 10, 10, 5} && data.annotations[0].area == 50));
  CHECK((data.annotations[1].box_xywh == std::array<double, 4>{1, 2.5, 3, 4} && data.annotations[1].area == 7));
  CHECK((data.annotations[0].id == 1 && data.annotations[1].id == 2 && data.annotations[2].id == 3 && data.annotations[2].crowd));
  CHECK(data.categories[0].name == "cat \"1\"");
  const std::string text = read_text(set.dir / "good.json");
  for (const char* const kept :
       {R"("license":3)", R"("segmentation":[[1, 2]])", R"("supercategory":"animal")", R"("info":{"x": null})"}) {
    INFO(kept);
    CHECK(text.find(kept) != std::string::npos);
  }
}

TEST_CASE("fix: what cannot be repaired is refused and nothing is written", "[cpu]") {
  Set set;
  const auto refused = [&](const std::string& text, const std::string& words) {
    write_text(set.dir / "bad.json", text);
    Findings findings;
    const auto fix = [&] { write_fixed(set.dir / "bad.json", {}, Exif::automatic, set.dir / "good.json", set.pool, findings); };
    expect_throws<DataError>(fix, words);
    CHECK(!fs::exists(set.dir / "good.json"));
    for (const auto& entry : fs::directory_iterator(set.dir.path())) CHECK(!entry.path().filename().string().starts_with('.'));
  };
  refused(R"({"images": [{"id": 1, "file_name": "a"}, {"id": 1, "file_name": "b"}], "categories": []})", "\"a\" and \"b\"");
  refused(R"({"images": [{"id": 1, "file_name": "a"}], "categories": []})", "cannot be repaired");
  refused(R"({"images": [{"id": 1, "file_name": "a"}]})", "no list categories");
  refused("{", "cut off");
  const fs::path file = set.dir / "set.json";
  write_text(file, coco({{"a.jpg", 9, 9}}, {}));
  const auto fix_to = [&](const std::string& name, const fs::path& images) {
    Findings findings;
    write_fixed(file, images, Exif::automatic, set.dir / name, set.pool, findings);
  };
  expect_throws<StorageError>([&] { fix_to("set.json", {}); }, "another file");
  expect_throws<StorageError>([&] { fix_to("no/such/x.json", {}); }, "No such file");
  expect_throws<DataError>([&] { fix_to("x.json", set.images()); }, "none of 1 images");
}

TEST_CASE("check: the sets beside the tree are clean", "[cpu]") {
  if (shared_data().empty()) SKIP("no shared data");
  ThreadPool pool(2);
  CheckOptions options;
  for (const char* const split : {"train", "val"}) {
    const fs::path set = shared_data() / "coco-tiny";
    options.splits.push_back({split, set / "annotations" / (concat("instances_", split, ".json")), set / "images" / split});
  }
  options.decode = 3;
  options.duplicates = true;
  const CheckReport tiny = check_data_set(options, pool);
  for (const Finding& finding : tiny.findings.all()) {
    INFO(finding.kind << ": " << finding.items.at(0));
    CHECK(finding.severity == Finding::Severity::note);
  }
  const DataStats& train = tiny.splits[0].stats;
  const DataStats& val = tiny.splits[1].stats;
  CHECK((train.images == 72 && train.boxes == 678 && train.crowd == 9 && train.background == 1));
  CHECK((val.images == 56 && val.boxes == 512 && val.crowd == 8 && val.background == 2));
  CHECK(std::count(train.per_class.begin(), train.per_class.end(), 0) == 80 - 67);

  const fs::path bccd = shared_data() / "bccd";
  Findings findings;
  const DataSplit found = open_split({bccd, {}, {}}, "train", findings);
  options.splits = {{"train", found.data.file, found.images}};
  const CheckReport blood = check_data_set(options, pool);
  CHECK(blood.findings.all().empty());
  CHECK(blood.splits[0].stats.per_class == std::vector<std::int64_t>{2381, 214, 209});
  CHECK(blood.splits[0].stats.most_per_image == 28);
}

TEST_CASE("check: the awkward set and its faulty files", "[cpu]") {
  if (shared_data().empty()) SKIP("no shared data");
  ThreadPool pool(2);
  const fs::path set = shared_data() / "awkward";
  const auto check = [&](const fs::path& file) {
    CheckOptions options;
    options.splits = {{"train", file, set / "images"}};
    options.decode = 0;
    return check_data_set(options, pool);
  };
  const CheckReport train = check(set / "annotations/instances_train.json");
  CHECK(train.splits[0].exif_turned == 2);
  CHECK(train.splits[0].stats.trainable == 99);
  CHECK(!train.findings.has(Finding::Severity::warning));
  CHECK(check(set / "annotations/instances_val.json").splits[0].stats.most_per_image == 279);

  // Every fault is named, with a severity that fits: what loads and is harmless has none.
  for (const auto& entry : fs::directory_iterator(set / "faulty")) {
    const std::string name = entry.path().stem().string();
    INFO(name);
    const bool harmless = name == "keys-optional-absent" || name == "ids-over-2-to-53" || name == "json-byte-order-mark";
    CHECK(check(entry.path()).findings.has(Finding::Severity::warning) == !harmless);
  }
  CHECK(check(set / "faulty/image-size-wrong.json").findings.count("image-size-wrong") == 1);
  CHECK(check(set / "faulty/image-file-missing.json").findings.count("image-missing") == 1);
  CHECK(check(set / "faulty/image-path-escapes.json").findings.count("image-path") == 1);
}

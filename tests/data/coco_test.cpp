#include "data/coco.h"

#include <limits>

#include "tests/support.h"

using namespace detr;
using namespace detr::data;
using namespace detr::test;

namespace {

const std::string kImages = R"([{"id": 7, "file_name": "b.png", "width": 100, "height": 80},
                                {"id": -3, "file_name": "a.png", "width": 100, "height": 80}])";
const std::string kCategories = R"([{"id": 90, "name": "tree"}, {"id": 2, "name": "cat"}])";

std::string annotation(const std::string& changed) {
  return R"({"id": 1, "image_id": 7, "category_id": 90, "bbox": [10, 20, 30, 40]},)" + changed;
}

/// The annotation file with these lists; an empty one is absent.
std::string coco(const std::string& annotations, const std::string& images = kImages,
                 const std::string& categories = kCategories) {
  std::string text = "{\"info\": {\"year\": 2026}";
  if (!images.empty()) text += ", \"images\": " + images;
  if (!annotations.empty()) text += ", \"annotations\": [" + annotations + "]";
  if (!categories.empty()) text += ", \"categories\": " + categories;
  return text + "}";
}

CocoData read(const std::string& text, Findings& findings) {
  const TempDir folder;
  write_text(folder / "set.json", text);
  return read_coco(folder / "set.json", findings);
}

/// The file is refused in one line that names it, and the place and the reason.
void refused(const std::string& text, const std::string& place, const std::string& reason) {
  Findings findings;
  try {
    read(text, findings);
    FAIL_CHECK("was read: " << text);
  } catch (const DataError& error) {
    const std::string message = error.what();
    INFO(message);
    CHECK(message.find("set.json: ") != std::string::npos);
    CHECK(message.find(place) != std::string::npos);
    CHECK(message.find(reason) != std::string::npos);
    CHECK(message.find('\n') == std::string::npos);
    CHECK(findings.all().empty());
  }
}

/// The second annotation, with this bbox, is `kind`; returns the data.
CocoData with_box(const std::string& bbox, const std::string& kind) {
  Findings findings;
  CocoData data = read(coco(annotation(R"({"id": 5, "image_id": -3, "category_id": 2, "bbox": )" + bbox + "}")), findings);
  INFO(bbox);
  const Finding* const found = findings.find(kind);
  REQUIRE((found || kind.empty()));
  if (found) {
    CHECK(found->count == 1);
    CHECK(found->items.at(0).starts_with("annotation 5 (image -3): "));
  }
  CHECK(findings.all().size() == (kind.empty() ? 0 : 1));
  return data;
}

}  // namespace

TEST_CASE("coco: labels are ranks of ids, annotations follow their images", "[cpu]") {
  Findings findings;
  const CocoData data = read(coco(annotation(
      R"({"id": 9, "image_id": -3, "category_id": 2, "bbox": [0, 0, 5, 6], "area": 12.5, "iscrowd": 1, "segmentation": {"a": [1]}},
         {"id": 4, "image_id": 7, "category_id": 2, "bbox": [1, 2, 3, 4], "iscrowd": false})")), findings);
  CHECK(findings.all().empty());
  REQUIRE(data.categories.size() == 2);
  CHECK((data.categories[0].id == 2 && data.categories[0].name == "cat" && data.categories[1].id == 90));
  REQUIRE(data.images.size() == 2);
  CHECK((data.images[0].id == -3 && data.images[0].first == 0 && data.images[0].count == 1));
  CHECK((data.images[1].id == 7 && data.images[1].first == 1 && data.images[1].count == 2));
  REQUIRE(data.annotations.size() == 3);
  const Annotation& crowd = data.annotations[0];
  CHECK((crowd.id == 9 && crowd.crowd && !crowd.trainable && crowd.area == 12.5 && crowd.label == 0 && crowd.image == 0));
  const Annotation& first = data.annotations[1];
  CHECK((first.id == 1 && first.label == 1 && first.area == 1200 && first.trainable && !first.crowd));
  CHECK(first.box_xyxy == std::array<double, 4>{10, 20, 40, 60});
  CHECK(data.annotations[2].id == 4);
}

TEST_CASE("coco: 64-bit ids stay apart", "[cpu]") {
  Findings findings;
  const CocoData data = read(coco(
      R"({"id": 1, "image_id": 9007199254740993, "category_id": 9223372036854775807, "bbox": [0, 0, 5, 6]},
         {"id": 2, "image_id": 9007199254740992, "category_id": -9223372036854775808, "bbox": [0, 0, 5, 6]})",
      R"([{"id": 9007199254740993, "file_name": "x"}, {"id": 9007199254740992, "file_name": "y"}])",
      R"([{"id": 9223372036854775807, "name": "top"}, {"id": -9223372036854775808, "name": "bottom"}])"), findings);
  CHECK(data.images[1].id == 9007199254740993);
  CHECK(data.annotations[0].id == 2);
  CHECK(data.annotations[0].label == 0);
  CHECK(data.annotations[1].label == 1);
}

TEST_CASE("coco: boxes that cannot be trained on stay for the metric", "[cpu]") {
  for (const auto& [bbox, kind] : std::vector<std::pair<std::string, std::string>>{
           {"[50, 60, 0, 20]", "box-zero-area"}, {"[50, 60, 20, -5]", "box-negative-size"}, {"[500, 60, 20, 20]", "box-outside"},
           {"[50, -60, 20, 60]", "box-outside"}, {"[1e300, 0, 5, 5]", "box-zero-area"}, {"[1e300, 0, 1e300, 5]", "box-outside"},
           {"[100, 0, 5, 5]", "box-outside"}}) {
    const CocoData data = with_box(bbox, kind);
    REQUIRE(data.annotations.size() == 2);
    CHECK(!data.annotations[0].trainable);
  }
}

TEST_CASE("coco: boxes over the edge are clipped", "[cpu]") {
  CHECK(with_box("[90, -10, 40, 40]", "box-clipped").annotations[0].box_xyxy == std::array<double, 4>{90, 0, 100, 30});
  CHECK(with_box("[-1e300, 10, 2e300, 1e308]", "box-clipped").annotations[0].box_xyxy == std::array<double, 4>{0, 10, 100, 80});
  CHECK(with_box("[90.5, 0, 10.1, 80]", "box-over-edge").annotations[0].box_xyxy[2] == 100);
  const CocoData whole = with_box("[0, 0, 100, 80.0]", "");
  CHECK(whole.annotations[0].trainable);
  CHECK(whole.annotations[0].box_xywh == std::array<double, 4>{0, 0, 100, 80});
}

TEST_CASE("coco: boxes that are not finite are dropped", "[cpu]") {
  for (const char* const bbox : {"[NaN, 60, 20, 20]", "[1, 60, 1e400, 20]", "[1, -Infinity, 20, 20]", "[1, 2, Infinity, 20]"}) {
    CHECK(with_box(bbox, "box-not-finite").annotations.size() == 1);
  }
}

TEST_CASE("coco: boxes that are no boxes are refused", "[cpu]") {
  for (const auto& [bbox, reason] : std::vector<std::pair<std::string, std::string>>{
           {"null", "is null"}, {"[1, 2, 3]", "has 3 numbers"}, {"[]", "has 0 numbers"}, {"[1, 2, 3, 4, 5]", "has 5 numbers"},
           {R"(["1", "2", "3", "4"])", R"(holds the text "1")"}, {"[1, null, 3, 4]", "holds null"},
           {"[[1, 2, 3, 4]]", "holds a list"},
           {R"({"x": 1, "y": 2, "w": 3, "h": 4})", "is an object"}, {"\"1 2 3 4\"", "is the text"}, {"12", "is 12"},
           {"[true, 2, 3, 4]", "holds true or false"}}) {
    const std::string record = R"({"id": 5, "image_id": 7, "category_id": 2, "bbox": )" + bbox + "}";
    refused(coco(annotation(record)), "annotation 5 (image 7)", reason);
  }
  refused(coco(annotation(R"({"id": 5, "image_id": 7, "category_id": 2})")), "annotation 5 (image 7)", "bbox is absent");
}

TEST_CASE("coco: ids must be whole numbers", "[cpu]") {
  const std::string bbox = R"(, "bbox": [1, 2, 3, 4]})";
  for (const auto& [id, reason] : std::vector<std::pair<std::string, std::string>>{
           {"\"2\"", R"(is the text "2")"}, {"2.0", "with a point or exponent"}, {"2.5", "is 2.5"}, {"null", "is null"},
           {"true", "is true"}, {"[2]", "is a list"}, {"9223372036854775808", "up to 64 bits"}, {"1e400", "whole number"},
           {"NaN", "whole number"}, {"\"two\"", R"(is the text "two")"}}) {
    refused(coco(annotation(R"({"id": 5, "image_id": 7, "category_id": )" + id + bbox)), "annotation 5 (image 7): category_id",
            reason);
    refused(coco(annotation(R"({"id": 5, "category_id": 2, "image_id": )" + id + bbox)), "annotation 5: image_id", reason);
    refused(coco(annotation(R"({"image_id": 7, "category_id": 2, "id": )" + id + bbox)), "annotations[1] (image 7): id", reason);
    refused(coco("", R"([{"file_name": "a.png", "id": )" + id + "}]"), "images[0] (a.png): id", reason);
    refused(coco("", kImages, R"([{"name": "cat", "id": )" + id + "}]"), "categories[0] (cat): id", reason);
  }
  refused(coco(annotation(R"({"id": 5, "image_id": 7)" + bbox)), "annotation 5 (image 7)", "category_id is absent");
}

TEST_CASE("coco: records that contradict one another", "[cpu]") {
  refused(coco(annotation(R"({"id": 88, "image_id": 7, "category_id": 55, "bbox": [1, 2, 3, 4]},
                             {"id": 89, "image_id": 7, "category_id": 55, "bbox": [1, 2, 3, 4]})")),
          "2 faults of kind category-unknown, first: annotation 88 (image 7): category_id 55", "2 cat, 90 tree");
  refused(coco("", R"([{"id": 1, "file_name": "a"}, {"id": 1, "file_name": "b"}])"), "image 1", R"("a" and "b")");
  refused(coco("", kImages, R"([{"id": 1, "name": "a"}, {"id": 1, "name": "b\n"}])"), "category 1", R"("a" and "b\n")");
  refused(coco(annotation(R"({"id": 5, "id": 6, "image_id": 7, "category_id": 2, "bbox": [1, 2, 3, 4]})")), "annotation 6",
          "id occurs twice");

  Findings findings;
  const CocoData data = read(coco(annotation(R"({"id": 1, "image_id": -3, "category_id": 2, "bbox": [1, 2, 3, 4]},
                                                {"id": 6, "image_id": 12, "category_id": 2, "bbox": [1, 2, 3, 4]})")), findings);
  CHECK(data.annotations.size() == 2);
  CHECK(findings.count("annotation-duplicate-id") == 1);
  CHECK(findings.count("image-unknown") == 1);
  CHECK(findings.find("image-unknown")->items[0].starts_with("annotation 6 (image 12)"));
}

TEST_CASE("coco: lists that are absent, empty or no lists", "[cpu]") {
  const std::string box = R"({"id": 1, "image_id": 7, "category_id": 1, "bbox": [1, 2, 3, 4]})";
  refused(coco(box, kImages, ""), "no list categories; add categories", "\"name\": ...}, ...]");
  refused(coco(box, kImages, "[]"), "the list categories is empty", "add a class");
  refused(coco("", "[]"), "images is empty", "nothing to train on");
  refused(coco("", ""), "no list images", "COCO");
  refused(coco("", "{\"id\": 1}"), "images is an object", "must be a list");
  refused(coco("", "null"), "images is null", "must be a list");
  refused(coco("", "[3]"), "images[0] is a number", "not an object");
  refused(coco("", kImages, "[\"cat\"]"), "categories[0] is a text", "not an object");
  refused("[]", "the top level is a list", "results");
  refused("3", "the top level is a number", "object");
  refused(R"({"images": [], "images": []})", "images occurs twice", "join");

  Findings findings;
  CHECK(read(coco(""), findings).images.size() == 2);
  CHECK(findings.count("annotations-absent") == 1);
  CHECK(findings.count("no-boxes") == 1);
}

TEST_CASE("coco: sizes that cannot be used are left to the picture", "[cpu]") {
  const auto kind_of = [](const std::string& size) {
    Findings findings;
    const CocoData data = read(coco(R"({"id": 1, "image_id": 1, "category_id": 2, "bbox": [-5, 2, 1e6, 4]})",
                                    R"([{"id": 1, "file_name": "a")" + size + "}]"), findings);
    CHECK(data.images[0].width == 0);
    CHECK(data.images[0].height == 0);
    CHECK(data.annotations[0].box_xyxy == std::array<double, 4>{-5, 2, 999995, 6});   // not clipped yet
    REQUIRE(findings.all().size() == 1);
    return findings.all()[0].kind;
  };
  CHECK(kind_of("") == "image-size-absent");
  CHECK(kind_of(R"(, "height": 400)") == "image-size-absent");
  CHECK(kind_of(R"(, "width": null, "height": 400)") == "image-size-absent");
  CHECK(kind_of(R"(, "width": -1, "height": -1)") == "image-size-placeholder");
  CHECK(kind_of(R"(, "width": 0, "height": 10)") == "image-size-placeholder");
  CHECK(kind_of(R"(, "width": 1e300, "height": 10)") == "image-size-invalid");
  CHECK(kind_of(R"(, "width": 10.5, "height": 10)") == "image-size-invalid");
  CHECK(kind_of(R"(, "width": "10", "height": 10)") == "image-size-invalid");
}

TEST_CASE("coco: fields that have a default", "[cpu]") {
  Findings findings;
  const CocoData data = read(coco(annotation(
      R"({"image_id": 7, "category_id": 2, "bbox": [1, 2, 3, 4], "area": null, "iscrowd": null},
         {"id": 3, "image_id": 7, "category_id": 2, "bbox": [1, 2, 3, 4], "area": "x", "iscrowd": 0.0},
         {"id": 4, "image_id": 7, "category_id": 2, "bbox": [1, 2, 3, 4], "area": NaN, "iscrowd": 2})"),
      kImages, R"([{"id": 90}, {"id": 2, "name": "tree"}, {"id": 3, "name": "tree"}])"), findings);
  CHECK(data.annotations[1].area == 12);
  CHECK(data.annotations[3].area == 12);
  CHECK(data.annotations[3].crowd);
  CHECK(data.categories[2].name == "90");
  CHECK(findings.count("annotation-no-id") == 1);
  CHECK(findings.count("area-invalid") == 2);
  CHECK(findings.count("category-no-name") == 1);
  CHECK(findings.count("category-duplicate-name") == 1);
  CHECK(!findings.has(Finding::Severity::error));
  refused(coco(annotation(R"({"id": 3, "image_id": 7, "category_id": 2, "bbox": [1, 2, 3, 4], "iscrowd": "no"})")),
          "annotation 3", "iscrowd is the text");
  refused(coco("", R"([{"id": 3, "width": 5, "height": 5}])"), "image 3", "file_name is absent");
  refused(coco("", R"([{"id": 3, "file_name": "a\u0000b"}])"), "image 3", "file_name");
}

TEST_CASE("coco: the real size of a picture clips again", "[cpu]") {
  Findings reading;
  CocoData data = read(coco(annotation(R"({"id": 5, "image_id": 7, "category_id": 2, "bbox": [90, 60, 30, 10]},
                                          {"id": 6, "image_id": 7, "category_id": 2, "bbox": [0, 0, 0, 10]})")), reading);
  CHECK(reading.count("box-clipped") == 1);
  Findings findings;
  set_image_size(data, 1, 200, 65, findings);
  CHECK(data.images[1].width == 200);
  CHECK(data.annotations[1].box_xyxy == std::array<double, 4>{90, 60, 120, 65});
  CHECK(findings.all().empty());   // as bad as before, which was reported
  set_image_size(data, 1, 30, 30, findings);
  CHECK(!data.annotations[1].trainable);
  CHECK(findings.count("box-outside") == 1);
  CHECK(findings.count("box-clipped") == 1);   // annotation 1, which was whole
  set_image_size(data, 1, 200, 200, findings);
  CHECK(data.annotations[1].trainable);
  CHECK(!data.annotations[2].trainable);
  expect_throws<InvalidArgument>([&] { set_image_size(data, 2, 10, 10, findings); }, "no image 2");
  expect_throws<InvalidArgument>([&] { set_image_size(data, 0, 0, 10, findings); }, "size must be >= 1");
}

TEST_CASE("coco: some images of a set", "[cpu]") {
  Findings findings;
  const CocoData data = read(coco(annotation(R"({"id": 5, "image_id": -3, "category_id": 2, "bbox": [1, 2, 3, 4]})")), findings);
  const CocoData part = select_images(data, {1});
  REQUIRE(part.images.size() == 1);
  CHECK((part.images[0].id == 7 && part.images[0].first == 0 && part.images[0].count == 1));
  CHECK((part.annotations.at(0).id == 1 && part.annotations[0].image == 0));
  CHECK(part.categories.size() == 2);
  expect_throws<InvalidArgument>([&] { select_images(data, {1, 0}); }, "must ascend");
}

TEST_CASE("findings: counted without end, named up to a limit, joined", "[cpu]") {
  Findings findings(2), all(2);
  for (const char* const item : {"a", "b", "c"}) findings.add("kind", Finding::Severity::note, item);
  all.add("kind", Finding::Severity::warning, "z");
  all.merge(findings, "val: ");
  CHECK(all.count("kind") == 4);
  CHECK(all.find("kind")->items == std::vector<std::string>{"z", "val: a"});
  CHECK(all.has(Finding::Severity::warning));
  CHECK(!all.has(Finding::Severity::error));
  CHECK(all.find("other") == nullptr);
}

TEST_CASE("coco: files with one fault each", "[cpu]") {
  if (shared_data().empty()) SKIP("no shared data");
  const std::filesystem::path folder = shared_data() / "awkward" / "faulty";
  const std::vector<std::string> refusing = {
      "box-text",          "box-three-numbers", "box-null",       "category-unknown", "category-duplicate-id",
      "image-duplicate-id", "categories-absent", "top-level-list", "json-truncated",   "json-empty-file",
      "json-trailing-comma", "json-deep-nesting", "ids-as-text",    "no-images"};
  for (const std::string& name : refusing) {
    INFO(name);
    Findings findings;
    expect_throws<DataError>([&] { read_coco(folder / (name + ".json"), findings); }, name + ".json: ");
  }
  struct Loads {
    const char* name;
    const char* kind;          // of the only finding
    std::size_t annotations;
    std::int64_t trainable;
  };
  for (const Loads& file : std::vector<Loads>{
           {"box-zero-width", "box-zero-area", 3, 2}, {"box-negative-height", "box-negative-size", 3, 2},
           {"box-wholly-outside", "box-outside", 3, 2}, {"box-nan", "box-not-finite", 2, 2}, {"box-huge", "box-not-finite", 1, 1},
           {"box-partly-outside", "box-clipped", 3, 3}, {"image-unknown", "image-unknown", 2, 2},
           {"image-file-missing", "", 2, 2},
           {"image-path-escapes", "", 2, 2}, {"image-size-wrong", "", 2, 2}, {"image-size-absent", "image-size-absent", 2, 2},
           {"annotation-duplicate-id", "annotation-duplicate-id", 3, 3}, {"keys-optional-absent", "", 2, 2},
           {"ids-over-2-to-53", "", 2, 2}, {"only-crowd", "no-boxes", 2, 0}, {"no-annotations", "no-boxes", 0, 0},
           {"json-byte-order-mark", "", 2, 2}}) {
    INFO(file.name);
    Findings findings;
    const CocoData data = read_coco(folder / (std::string(file.name) + ".json"), findings);
    std::int64_t trainable = 0;
    for (const Annotation& a : data.annotations) trainable += a.trainable;
    CHECK(data.annotations.size() == file.annotations);
    CHECK(trainable == file.trainable);
    CHECK(findings.all().size() == (*file.kind ? 1 : 0));
    if (*file.kind) CHECK(findings.find(file.kind) != nullptr);
  }
  std::int64_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files += entry.path().extension() == ".json";
  CHECK(files == 31);   // none was passed over
}

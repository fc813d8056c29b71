#include "data/coco_eval.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "data/coco_results.h"
#include "tests/support.h"

namespace detr::data {
namespace {

using test::expect_close;
using test::expect_throws;

constexpr double kSame = 1e-9;   // what we promise against the COCO API

/// The numbers of a case come from one stream, so that the recorded results can be had again from any language.
struct Draws {
  std::uint64_t state;
  std::int64_t operator()(std::int64_t bound) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<std::int64_t>((state >> 33) % static_cast<std::uint64_t>(bound));
  }
  double half(std::int64_t bound) { return static_cast<double>((*this)(bound)) / 2; }
};

/// Up to `boxes` true boxes in an image with up to 3 detections near each, and up to `strays` anywhere; sides below
/// side / 2 pixels, `levels` different scores, `crowd` per cent crowds. A third of the boxes has an area of its own. The last
/// class has no truth. Ids of images are 10, 13, ..., of categories 3, 8, ....
struct Recipe {
  std::uint64_t seed;
  std::int64_t images, classes, boxes, strays, side, levels, crowd, first_id;
};

struct Scene {
  CocoData truth;
  std::vector<Detection> dets;
};

Scene make_scene(const Recipe& r) {
  Draws draw{r.seed};
  Scene scene;
  for (std::int64_t k = 0; k < r.classes; ++k) scene.truth.categories.push_back({3 + 5 * k, concat("class ", k)});
  std::int64_t id = r.first_id;
  const auto score = [&] { return static_cast<double>(1 + draw(r.levels)) / static_cast<double>(r.levels); };
  for (std::int64_t i = 0; i < r.images; ++i) {
    ImageRecord image;
    image.id = 10 + 3 * i;
    image.first = std::ssize(scene.truth.annotations);
    image.count = draw(r.boxes + 1);
    for (std::int64_t b = 0; b < image.count; ++b) {
      Annotation a;
      a.id = id++;
      a.image = i;
      a.label = draw(std::max<std::int64_t>(r.classes - 1, 1));
      a.box_xywh = {draw.half(400), draw.half(400), draw.half(r.side), draw.half(r.side)};
      a.area = draw(3) == 0 ? static_cast<double>(draw(12000)) : a.box_xywh[2] * a.box_xywh[3];
      a.crowd = draw(100) < r.crowd;
      scene.truth.annotations.push_back(a);
      for (std::int64_t near = draw(4); near > 0; --near) {
        const std::int64_t label = draw(8) == 0 ? draw(r.classes) : a.label;
        const std::int64_t reach = draw(r.side) / 4 + 1;
        Detection d{image.id, 3 + 5 * label, a.box_xywh, 0};
        for (double& value : d.box_xywh) value += static_cast<double>(draw(2 * reach + 1) - reach) / 8;
        d.score = score();
        scene.dets.push_back(d);
      }
    }
    for (std::int64_t stray = draw(r.strays + 1); stray > 0; --stray) {
      Detection d{image.id, 3 + 5 * draw(r.classes), {draw.half(400), draw.half(400), draw.half(r.side), draw.half(r.side)}, 0};
      d.score = score();
      scene.dets.push_back(d);
    }
    scene.truth.images.push_back(image);
  }
  return scene;
}

struct Recorded {
  const char* name;
  Recipe recipe;
  std::array<double, 12> stats;
  std::vector<double> class_ap;
};

/// Results of pycocotools 2.0.11 on these recipes.
const std::vector<Recorded>& recorded() {
  static const std::vector<Recorded> cases = {
    {"plain", {1, 20, 4, 6, 5, 300, 1000000, 0, 1},
     {0.20375018236937592, 0.29834763637410383, 0.21617714636214766, 0.08734873487348734, 0.251445976688884,
      0.09823582358235822, 0.24846153846153846, 0.4388034188034188, 0.4388034188034188, 0.10833333333333334,
      0.49457435147972223, 0.24166666666666664},
     {0.20570065790592942, 0.2145794986540928, 0.1909703905481054, -1}},
    {"crowds and ties", {2, 15, 3, 8, 5, 200, 4, 30, 1},
     {0.22293710623145854, 0.32970929100006585, 0.23134438706210242, 0.1701950359871152, 0.26980146351352763,
      0.9999999999999998, 0.1931547619047619, 0.5037202380952381, 0.5037202380952381, 0.465, 0.5025000000000001, 1.0},
     {0.19152226645432002, 0.25435194600859706, -1}},
    {"one score", {3, 10, 2, 10, 10, 120, 1, 10, 1},
     {0.23130536197773605, 0.3322843726789613, 0.25782147298177155, 0.16941233107963935, 0.3165225867124528,
      0.6821782178217822, 0.12400000000000003, 0.52, 0.634, 0.4473684210526316, 0.7615384615384615, 0.68},
     {0.23130536197773605, -1}},
    {"dense", {4, 2, 1, 120, 150, 90, 50, 5, 1},
     {0.25010747228947394, 0.39282566690066106, 0.24552174303563876, 0.18293140087474366, 0.44635462277054,
      0.5237623762376238, 0.0031446540880503146, 0.06918238993710692, 0.4295597484276731, 0.39607843137254906,
      0.47906976744186053, 0.5214285714285715},
     {0.25010747228947394}},
    {"one image", {5, 1, 1, 30, 10, 80, 20, 40, 1},
     {0.4290524681577573, 0.7110921618477637, 0.47546504650465043, 0.41743112776048136, 0.8999999999999999,
      0.29999999999999993, 0.0, 0.24285714285714288, 0.6285714285714286, 0.6333333333333333, 0.9, 0.3},
     {0.4290524681577573}},
    {"small boxes", {6, 12, 3, 10, 4, 40, 100, 5, 1},
     {0.28388597037051794, 0.43993218714060006, 0.296058337551438, 0.23844019169839376, 0.43415841584158416,
      0.6004950495049505, 0.1538019451812555, 0.47714412024756864, 0.48740053050397886, 0.49968944099378876,
      0.4299999999999999, 0.6},
     {0.3046415103148115, 0.2631304304262244, -1}},
    {"many classes", {7, 30, 25, 6, 10, 250, 1000, 5, 1},
     {0.23255097118066687, 0.3286356016554036, 0.24640845036884643, 0.28077557755775573, 0.30053319617676044,
      0.4583333333333333, 0.43777777777777777, 0.5713194444444445, 0.5713194444444445, 0.445, 0.5819696969696971,
      0.625},
     {0.021452145214521448, 0.3451582081285052, 0.7019801980198019, 0.30946844684468444, 0.10065359477124186,
      0.18178217821782178, 0.6898514851485148, 0.12788778877887788, 0.2666666666666666, 0.30000000000000004,
      0.11782178217821782, 0.16831683168316833, 0.11221122112211221, 0.27983262611975485, 0.2744554455445544,
      0.04328147100424327, 0.6625755432686126, 0.09089108910891087, 0.13465346534653463, 0.06666666666666667,
      0.05680693069306931, 0.06696369636963696, 0.22934936350777935, 0.2324964639321075, -1}},
    {"ids from 0", {8, 3, 2, 4, 3, 200, 100, 0, 0},
     {0.014427157001414427, 0.024045261669024043, 0.024045261669024043, 0.0, 0.020792079207920793, -1, 0.0, 0.1, 0.1,
      0.0, 0.12000000000000002, -1},
     {0.014427157001414427, -1}},
    {"mostly empty", {9, 40, 6, 1, 1, 300, 10, 10, 1},
     {0.27841547011844037, 0.3778626434071979, 0.2845874587458746, 0.125, 0.2637138142385667, 0.5762376237623761,
      0.46333333333333326, 0.5333333333333333, 0.5333333333333333, 0.25, 0.56, 0.575},
     {0.35643564356435636, 0.32459845984598457, 0.3578877887788779, 0.23574257425742576, 0.1174128841455574, -1}},
  };
  return cases;
}

void expect_stats(const EvalResult& result, const std::array<double, 12>& wanted) {
  const auto stats = result.stats();
  for (std::size_t i = 0; i < stats.size(); ++i) {
    INFO(stats[i].first);
    expect_close(stats[i].second, wanted[i], 0, kSame);
  }
}

bool same_bits(const EvalResult& a, const EvalResult& b) {
  bool same = a.confusion == b.confusion && a.best_f1.conf == b.best_f1.conf && a.best_f1.f1 == b.best_f1.f1;
  for (std::size_t i = 0; i < a.stats().size(); ++i) same = same && a.stats()[i].second == b.stats()[i].second;
  for (std::size_t k = 0; k < a.per_class.size(); ++k)
    same = same && a.per_class[k].AP == b.per_class[k].AP && a.per_class[k].precision50 == b.per_class[k].precision50;
  return same;
}

/// Images 1 and 2, categories 4 (a) and 9 (b), no annotation.
CocoData two_images() {
  CocoData truth;
  truth.categories = {{4, "a"}, {9, "b"}};
  truth.images.resize(2);
  truth.images[0].id = 1;
  truth.images[1].id = 2;
  return truth;
}

Annotation box(std::int64_t id, std::int64_t image, std::int64_t label, std::array<double, 4> xywh, bool crowd = false) {
  return {id, image, label, xywh, {}, xywh[2] * xywh[3], crowd, !crowd};
}

TEST_CASE("coco_eval: recorded results of the COCO API", "[cpu]") {
  for (const Recorded& c : recorded()) {
    INFO(c.name);
    const Scene scene = make_scene(c.recipe);
    const EvalResult result = evaluate(scene.truth, scene.dets);
    expect_stats(result, c.stats);
    REQUIRE(result.per_class.size() == c.class_ap.size());
    for (std::size_t k = 0; k < c.class_ap.size(); ++k) expect_close(result.per_class[k].AP, c.class_ap[k], 0, kSame);
    CHECK(result.images == c.recipe.images);
    CHECK(result.dets == std::ssize(scene.dets));
  }
}

TEST_CASE("coco_eval: files with published scores", "[cpu]") {
  const auto folder = test::shared_data();
  if (folder.empty()) SKIP("no shared data");
  for (const char* name : {"val100", "crowd"}) {
    INFO(name);
    const auto file = [&](const char* what) { return folder / "coco-eval-oracle" / concat(name, "_", what, ".json"); };
    Findings findings;
    const EvalResult result = evaluate(read_coco(file("gt"), findings), read_detections(file("dets")));
    const auto wanted = nlohmann::json::parse(std::ifstream(file("expected")))["stats"];
    for (const auto& [stat, value] : result.stats()) expect_close(value, wanted[std::string(stat)].get<double>(), 0, kSame);
  }
}

TEST_CASE("coco_eval: the same bits on any number of threads", "[cpu]") {
  const Scene scene = make_scene(recorded()[6].recipe);
  const EvalResult one = evaluate(scene.truth, scene.dets);
  for (const int threads : {2, 5}) {
    EvalOptions options;
    options.threads = threads;
    CHECK(same_bits(evaluate(scene.truth, scene.dets, options), one));
  }
}

TEST_CASE("coco_eval: nothing there", "[cpu]") {
  CocoData truth = two_images();
  const EvalResult nothing = evaluate(truth, {});
  expect_stats(nothing, {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1});
  CHECK(nothing.best_f1.f1 == -1);
  CHECK(nothing.per_class[1].precision50[0] == -1);

  truth.annotations = {box(1, 0, 1, {10, 10, 20, 20})};
  const EvalResult none_found = evaluate(truth, {});
  expect_stats(none_found, {0, 0, 0, 0, -1, -1, 0, 0, 0, 0, -1, -1});
  CHECK(none_found.best_f1.f1 == 0);
  CHECK(none_found.per_class[0].AP == -1);
  CHECK(none_found.per_class[1].AP == 0);
  CHECK(none_found.per_class[1].boxes == 1);
  CHECK(none_found.confusion == std::vector<std::int64_t>{0, 0, 0, 0, 0, 1, 0, 0, 0});

  expect_stats(evaluate(CocoData{}, {}), {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1});
}

TEST_CASE("coco_eval: more boxes than detections count", "[cpu]") {
  CocoData truth = two_images();
  std::vector<Detection> dets;
  for (int i = 0; i < 250; ++i) {
    truth.annotations.push_back(box(i + 1, 0, 0, {i * 10.0, 5, 8, 8}));
    dets.push_back({1, 4, truth.annotations.back().box_xywh, 0.9});
  }
  const EvalResult standard = evaluate(truth, dets);
  expect_close(standard.AP, 41.0 / 101, 0, kSame);   // recalls 0 to 0.4
  expect_close(standard.AR100, 0.4, 0, kSame);
  CHECK(standard.densest == 250);
  EvalOptions options;
  options.max_detections = 300;
  const EvalResult all = evaluate(truth, dets, options);
  expect_close(all.AP, 1, 0, kSame);
  expect_close(all.AR100, 1, 0, kSame);
  CHECK(summary_lines(all)[0] == " Average Precision  (AP) @[ IoU=0.50:0.95 | area=   all | maxDets=300 ] = 1.000");
}

TEST_CASE("coco_eval: annotations that share an id all count", "[cpu]") {
  CocoData truth = two_images();
  truth.annotations = {box(5, 0, 0, {0, 0, 10, 10}), box(5, 1, 0, {50, 50, 10, 10})};
  const std::vector<Detection> dets = {{1, 4, {0, 0, 10, 10}, 0.9}, {2, 4, {50, 50, 10, 10}, 0.8}};
  expect_close(evaluate(truth, dets).AP, 1, 0, kSame);
  expect_close(evaluate(truth, std::span(dets).first(1)).AR100, 0.5, 0, kSame);
}

TEST_CASE("coco_eval: an annotation with id 0 is never found, as in the COCO API", "[cpu]") {
  CocoData truth = two_images();
  truth.annotations = {box(0, 0, 0, {0, 0, 10, 10}), box(-1, 1, 0, {50, 50, 10, 10})};
  const std::vector<Detection> dets = {{1, 4, {0, 0, 10, 10}, 0.9}, {2, 4, {50, 50, 10, 10}, 0.8}};
  const EvalResult result = evaluate(truth, dets);
  expect_close(result.AR100, 0.5, 0, kSame);
  expect_close(result.AP, 0.5 * 51 / 101, 0, kSame);   // wrong, right: precision 1/2 up to recall 0.5
}

TEST_CASE("coco_eval: categories as one", "[cpu]") {
  CocoData truth = two_images();
  truth.annotations = {box(1, 0, 0, {0, 0, 10, 10}), box(2, 1, 1, {50, 50, 10, 10})};
  const std::vector<Detection> swapped = {{1, 9, {0, 0, 10, 10}, 0.9}, {2, 4, {50, 50, 10, 10}, 0.8}};
  CHECK(evaluate(truth, swapped).AP == 0);
  EvalOptions options;
  options.use_categories = false;
  const EvalResult one = evaluate(truth, swapped, options);
  expect_close(one.AP, 1, 0, kSame);
  CHECK(one.confusion == std::vector<std::int64_t>{2, 0, 0, 0});
}

TEST_CASE("coco_eval: confusion, best F1 and curve by hand", "[cpu]") {
  CocoData truth = two_images();
  truth.annotations = {box(1, 0, 0, {0, 0, 10, 10}), box(2, 0, 1, {100, 0, 10, 10}), box(3, 1, 0, {0, 0, 10, 10}),
                       box(4, 1, 0, {200, 0, 50, 50}, true)};
  const std::vector<Detection> dets = {
      {1, 4, {0, 0, 10, 10}, 0.9},      // right
      {1, 4, {100, 0, 10, 9}, 0.8},     // a b called a
      {2, 4, {0, 0, 10, 10}, 0.7},      // right
      {2, 4, {210, 10, 10, 10}, 0.75},  // in the crowd: left out
      {2, 9, {300, 0, 10, 10}, 0.6},    // nothing there
      {1, 9, {100, 0, 10, 10}, 0.05},   // right, but late
  };
  EvalOptions options;
  options.confusion_score = 0.5;
  const EvalResult result = evaluate(truth, dets, options);
  CHECK(result.confusion == std::vector<std::int64_t>{2, 0, 0,    //
                                                      1, 0, 0,    // true b, called a
                                                      0, 1, 0});
  // At 0.05: 3 right of 5 found of 3 boxes, F1 6/8. At 0.7: 2 of 3, F1 4/6. At 0.9: 1 of 1, F1 2/4.
  CHECK(result.best_f1.conf == 0.05);
  expect_close(result.best_f1.p, 0.6, 0, kSame);
  expect_close(result.best_f1.r, 1, 0, kSame);
  expect_close(result.best_f1.f1, 0.75, 0, kSame);

  // By default the matrix is at the best F1, where b is found and its wrong name becomes a false alarm.
  const EvalResult best = evaluate(truth, dets);
  CHECK(best.confusion_score == 0.05);
  CHECK(best.confusion == std::vector<std::int64_t>{2, 0, 0, 0, 1, 0, 1, 1, 0});

  // Class a: right, wrong, right of 2 boxes: precision 1 up to recall 0.5, then 2/3.
  const ClassResult& a = result.per_class[0];
  CHECK(a.id == 4);
  CHECK(a.boxes == 2);
  expect_close(a.precision50[50], 1, 0, kSame);
  expect_close(a.precision50[51], 2.0 / 3, 0, kSame);
  CHECK(a.score50[50] == 0.9);
  CHECK(a.score50[100] == 0.7);
  expect_close(a.AP50, (51 + 50 * 2.0 / 3) / 101, 0, kSame);
}

TEST_CASE("coco_eval: the lines of the COCO API", "[cpu]") {
  EvalResult result;
  result.AP = 0.61249;
  result.AP75 = 0.0625;   // a tie: to the even digit, as Python prints it
  result.AR_large = 1;
  const std::vector<std::string> lines = summary_lines(result);
  REQUIRE(lines.size() == 12);
  CHECK(lines[0] == " Average Precision  (AP) @[ IoU=0.50:0.95 | area=   all | maxDets=100 ] = 0.612");
  CHECK(lines[2] == " Average Precision  (AP) @[ IoU=0.75      | area=   all | maxDets=100 ] = 0.062");
  CHECK(lines[3] == " Average Precision  (AP) @[ IoU=0.50:0.95 | area= small | maxDets=100 ] = -1.000");
  CHECK(lines[6] == " Average Recall     (AR) @[ IoU=0.50:0.95 | area=   all | maxDets=  1 ] = -1.000");
  CHECK(lines[11] == " Average Recall     (AR) @[ IoU=0.50:0.95 | area= large | maxDets=100 ] = 1.000");
}

TEST_CASE("coco_eval: what is refused", "[cpu]") {
  CocoData truth = two_images();
  truth.file = "instances_val.json";
  truth.annotations = {box(1, 0, 0, {0, 0, 10, 10})};
  const auto with = [&](Detection d) { return [&truth, d] { evaluate(truth, std::vector<Detection>{{1, 4, {0, 0, 1, 1}, 0.5}, d}); }; };
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();
  expect_throws<DataError>(with({77, 4, {0, 0, 1, 1}, 0.5}), "image ids that are not in instances_val.json: 77;");
  expect_throws<DataError>(with({1, 5, {0, 0, 1, 1}, 0.5}), "category ids that are not in instances_val.json: 5;");
  expect_throws<DataError>(with({2, 4, {0, 0, 1, 1}, kNan}), "detection 1 (image 2): score or box is not a finite number");
  expect_throws<DataError>(with({2, 4, {0, kInfinity, 1, 1}, 0.5}), "detection 1 (image 2)");
  expect_throws<DataError>(
      [&] {
        std::vector<Detection> many(12, Detection{0, 4, {0, 0, 1, 1}, 0.5});
        for (std::size_t i = 0; i < many.size(); ++i) many[i].image_id = 100 + static_cast<std::int64_t>(i);
        evaluate(truth, many);
      },
      "108, 109 and 2 more;");

  EvalOptions options;
  options.max_detections = 0;
  expect_throws<InvalidArgument>([&] { evaluate(truth, {}, options); }, "max_detections must be >= 1");
  options = {};
  options.threads = 0;
  expect_throws<InvalidArgument>([&] { evaluate(truth, {}, options); }, "threads must be >= 1");
  CocoData bad = truth;
  std::swap(bad.images[0], bad.images[1]);
  expect_throws<InvalidArgument>([&] { evaluate(bad, {}); }, "images must be in ascending id");
  bad = truth;
  bad.categories[1].id = bad.categories[0].id;
  expect_throws<InvalidArgument>([&] { evaluate(bad, {}); }, "categories must be in ascending id");
  bad = truth;
  bad.annotations[0].label = 2;
  expect_throws<InvalidArgument>([&] { evaluate(bad, {}); }, "out of range");
  bad = truth;
  bad.annotations[0].area = kNan;
  expect_throws<InvalidArgument>([&] { evaluate(bad, {}); }, "not finite");
}

TEST_CASE("coco_results: written and read back", "[cpu]") {
  const test::TempDir folder;
  const std::vector<Detection> dets = {{9007199254740993, -4, {0.1, -0.0, 1e300, 1.0 / 3}, 5e-324},
                                       {0, 2, {1, 2, 3, 4}, 1},
                                       {7, 2, {1e22, 1e16, 123456789012345678.0, -2.5}, 0.1 + 0.2}};
  const std::map<std::int64_t, std::string> names = {{7, "a \"b\"\n\xc3\xa9.jpg"}};
  write_detections(folder / "dets.json", dets, &names);
  const std::vector<Detection> back = read_detections(folder / "dets.json");
  REQUIRE(back.size() == dets.size());
  for (std::size_t i = 0; i < dets.size(); ++i) {
    CHECK(back[i].image_id == dets[i].image_id);
    CHECK(back[i].category_id == dets[i].category_id);
    CHECK(back[i].score == dets[i].score);
    CHECK(back[i].box_xywh == dets[i].box_xywh);
  }
  CHECK(std::signbit(back[0].box_xywh[1]));
  const auto json = nlohmann::json::parse(std::ifstream(folder / "dets.json"));
  CHECK(json[2]["file_name"] == names.at(7));
  CHECK(!json[1].contains("file_name"));

  write_detections(folder / "none.json", {});
  CHECK(read_detections(folder / "none.json").empty());

  const std::vector<Detection> infinite = {{1, 1, {0, 0, 1, 1}, std::numeric_limits<double>::infinity()}};
  expect_throws<DataError>([&] { write_detections(folder / "bad.json", infinite); }, "detection 0");
  expect_throws<StorageError>([&] { write_detections(folder / "no" / "folder.json", dets); }, "folder.json: cannot be created: ");
}

TEST_CASE("coco_results: other keys, whole floats, wrong records", "[cpu]") {
  const test::TempDir folder;
  const auto read = [&](const std::string& text) {
    test::write_text(folder / "dets.json", text);
    return read_detections(folder / "dets.json");
  };
  const std::string good = R"({"image_id":1,"category_id":2,"bbox":[1,2,3,4],"score":1})";
  const std::string more = R"({"id":1, "segmentation":[[1,2]], "x":{"score":"a"}, "score":0.25, "image_id":3.0, "bbox":[1,2,3,4.5],
                               "category_id":2})";
  const auto dets = read("\xef\xbb\xbf[" + good + ", " + more + "]");
  REQUIRE(dets.size() == 2);
  CHECK(dets[1].image_id == 3);
  CHECK(dets[1].score == 0.25);
  CHECK(dets[1].box_xywh == std::array<double, 4>{1, 2, 3, 4.5});

  const std::vector<std::pair<std::string, std::string>> faults = {
      {R"({"image_id":"1","category_id":2,"bbox":[1,2,3,4],"score":1})", "record 1: image_id is not a number"},
      {R"({"image_id":1.5,"category_id":2,"bbox":[1,2,3,4],"score":1})", "record 1: image_id is not a 64-bit integer"},
      {R"({"image_id":9223372036854775808,"category_id":2,"bbox":[1,2,3,4],"score":1})", "image_id is not a 64-bit integer"},
      {R"({"image_id":1,"category_id":null,"bbox":[1,2,3,4],"score":1})", "record 1: category_id is not a number"},
      {R"({"image_id":1,"category_id":2,"bbox":[1,2,3],"score":1})", "record 1: bbox has 3 numbers"},
      {R"({"image_id":1,"category_id":2,"bbox":[1,2,3,4,5],"score":1})", "record 1: bbox has 5 numbers"},
      {R"({"image_id":1,"category_id":2,"bbox":null,"score":1})", "record 1: bbox is not a list"},
      {R"({"image_id":1,"category_id":2,"bbox":[1,2,3,"4"],"score":1})", "record 1: a value of bbox is not a number"},
      {R"({"image_id":1,"category_id":2,"bbox":[1,2,3,1e400],"score":1})", "record 1: a value of bbox is not finite"},
      {R"({"image_id":1,"category_id":2,"bbox":[1,2,3,4],"score":NaN})", "record 1: score is not finite"},
      {R"({"image_id":1,"category_id":2,"bbox":[1,2,3,4]})", "record 1: no score"},
      {R"({"image_id":1,"category_id":2,"score":1})", "record 1: no bbox"},
      {R"({"image_id":1,"bbox":[1,2,3,4],"score":1})", "record 1: no category_id"},
      {R"({"category_id":2,"bbox":[1,2,3,4],"score":1})", "record 1: no image_id"},
      {"7", "record 1: not an object"},
      {R"({"image_id":1,)", "not valid JSON"},
  };
  for (const auto& [record, text] : faults) expect_throws<DataError>([&] { read('[' + good + ',' + record + ']'); }, text);
  expect_throws<DataError>([&] { read(R"({"annotations":[]})"); }, "not a list of results");
  expect_throws<DataError>([&] { read("[" + good + "] []"); }, "not valid JSON");
  expect_throws<DataError>([&] { read_detections(folder / "absent.json"); }, "absent.json");
}

}  // namespace
}  // namespace detr::data

#include "train/html_report.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "data/coco_results.h"
#include "data/image.h"
#include "runtime/error.h"
#include "tests/catch.h"
#include "tests/support.h"
#include "train/evaluation_files.h"
#include "train/html_text.h"
#include "train/metric_log.h"
#include "train/report_pictures.h"
#include "train/svg_axis.h"
#include "train/svg_chart.h"

namespace detr::train {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
const std::string kHostile = "<script>alert(\"x\")</script> & 'q' \x01\xff\xe2\x80\xae</svg>";

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

/// What is wrong with the tags of a page: each closed in turn, attributes quoted, no stray '<'; empty if nothing is.
std::string fault_of(const std::string& html) {
  std::vector<std::string> open;
  for (std::size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at)) {
    std::size_t end = at + 1;
    for (bool quoted = false; end < html.size() && (quoted || html[end] != '>'); ++end) {
      if (html[end] == '"') quoted = !quoted;
      if (html[end] == '<') return "'<' within a tag at " + std::to_string(end);
    }
    if (end == html.size()) return "tag without an end at " + std::to_string(at);
    const std::string tag = html.substr(at + 1, end - at - 1);
    at = end + 1;
    if (tag.starts_with("!DOCTYPE")) continue;
    const std::string name = tag.substr(tag[0] == '/' ? 1 : 0, tag.find_first_of(" /", 1) - (tag[0] == '/' ? 1 : 0));
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return "</" + tag.substr(1) + "> at " + std::to_string(at) + " within <" + (open.empty() ? "" : open.back()) + ">";
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
  }
  return open.empty() ? "" : "<" + open.back() + "> is not closed";
}

/// All values of one attribute, one after the other.
std::vector<std::string> attributes(const std::string& html, const std::string& name) {
  std::vector<std::string> values;
  const std::string begin = " " + name + "=\"";
  for (std::size_t at = html.find(begin); at != std::string::npos; at = html.find(begin, at + 1)) {
    const std::size_t from = at + begin.size();
    values.push_back(html.substr(from, html.find('"', from) - from));
  }
  return values;
}

void check_numbers(const std::string& html) {
  for (const char* name : {"d", "x", "y", "cx", "cy", "width", "height", "viewBox", "fill-opacity"}) {
    for (const std::string& value : attributes(html, name)) {
      INFO(name << "=" << value);
      if (value == "device-width") continue;
      CHECK(value.find_first_not_of("0123456789.- MLHVhv") == std::string::npos);
    }
  }
}

void check_page(const std::string& html) {
  CHECK(fault_of(html) == "");
  check_numbers(html);
  CHECK(html.size() < kMaxReportBytes);
  for (const char* word : {"<script", "<link", "href", "http:", "https:", "url(", "@import", "javascript:", "onload"}) CHECK(html.find(word) == std::string::npos);
  for (const char c : html) {
    if (static_cast<unsigned char>(c) < 0x20 && c != '\n') FAIL("a control character");
  }
}

/// Two images of 100 x 80 pixels with 2 and 1 boxes, one without; classes 3 and 7.
data::CocoData small_coco(const std::string& name) {
  data::CocoData coco;
  coco.file = "truth.json";
  coco.categories = {{3, name}, {7, "cat"}};
  const auto box = [](std::int64_t id, std::int64_t image, std::int64_t label, std::array<double, 4> xywh) {
    return data::Annotation{id, image, label, xywh, {xywh[0], xywh[1], xywh[0] + xywh[2], xywh[1] + xywh[3]}, xywh[2] * xywh[3], false, true};
  };
  coco.annotations = {box(1, 0, 0, {10, 10, 30, 20}), box(2, 0, 1, {50, 30, 40, 40}), box(3, 1, 0, {0, 0, 8, 8})};
  coco.images = {{11, "a.png", 100, 80, 0, 2}, {12, "b.png", 100, 80, 2, 1}, {13, "c.png", 100, 80, 3, 0}};
  return coco;
}

std::vector<data::Detection> small_detections() { return {{11, 3, {10, 10, 30, 20}, 0.9}, {11, 7, {50, 30, 40, 38}, 0.8}, {12, 7, {0, 0, 8, 8}, 0.4}}; }

ReportData full_data(const data::CocoData& coco) {
  ReportData data;
  data.name = kHostile;
  data.facts = {{kHostile, kHostile}};
  data.steps.names = {"step", "epoch", "loss", "vfl", "bbox", "giou", "lr", "grad_norm", "img_per_s", "data_wait_s", "skipped", "rss_bytes"};
  data.steps.columns.resize(data.steps.names.size());
  for (int i = 1; i <= 300; ++i) {
    const double loss = i == 100 ? kNan : i == 101 ? kInf : i == 102 ? -kInf : 100.0 / i;
    const std::vector<double> row = {double(i), double(i / 100), loss, loss, 0.5, kNan, 1e-4, 1e300, 100, 0.01, 0, 1e9};
    for (std::size_t c = 0; c < row.size(); ++c) data.steps.columns[c].push_back(row[c]);
  }
  data.epochs.names = {"epoch", "step", "loss", "AP", "AP50", "AP_small", "train_s"};
  data.epochs.columns = {{0, 1, 2}, {100, 200, 300}, {5, kNan, 2}, {0.1, kNan, 0.3}, {0.2, kNan, 0.5}, {-1, kNan, -1}, {3, 3, 3}};
  data.log.names = {"epoch", "train_loss", "train_loss_vfl", "train_loss_vfl_aux_0", "train_loss_vfl_dn_0", "train_loss_vfl_enc_0"};
  data.log.columns = {{0, 1, 2}, {5, 4, 2}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, kNan, 1}};
  data.evaluation = data::evaluate(coco, small_detections());
  data.raw_evaluation = data.evaluation;
  data.best_ap = 0.3;
  data.best_epoch = 2;
  data.splits = {{"train", &coco}, {kHostile, &coco}};
  data.warnings = {kHostile, "step 7"};
  data.config_json = "{\n  \"name\": \"" + kHostile + "\"\n}";
  return data;
}

data::Image noise(std::int64_t width, std::int64_t height) {
  data::Image image(width, height);
  std::uint32_t state = 1;
  for (std::uint8_t& byte : image.rgb) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::uint8_t>(state >> 24);
  }
  return image;
}

}  // namespace

TEST_CASE("report: text is escaped", "[cpu]") {
  CHECK(html_text("a<b>&\"'") == "a&lt;b&gt;&amp;&quot;&#39;");
  CHECK(html_text("tab\tline\n\x1b[0m\x7f") == "tab\\x09line\\x0a\\x1b[0m\\x7f");
  CHECK(html_text("a\n\tb\r", 99, true) == "a\n\tb\\x0d");
  CHECK(html_text("\xff\xc3(\xe2\x82") == "\\xff\\xc3(\\xe2\\x82");
  CHECK(html_text("naïve 猫 🐈") == "naïve 猫 🐈");
  CHECK(html_text("\xe2\x80\xae\xe2\x81\xa6\xef\xbb\xbf\xc2\x85") == "\\xe2\\x80\\xae\\xe2\\x81\\xa6\\xef\\xbb\\xbf\\xc2\\x85");
  CHECK(html_text("猫猫猫", 2) == "猫猫…");
  CHECK(html_text("&&", 2) == "&amp;&amp;");
  CHECK(html_text("") == "");
}

TEST_CASE("report: numbers as text", "[cpu]") {
  CHECK(fixed_text(0.41249, 3) == "0.412");
  CHECK(fixed_text(-0.0001, 2) == "0.00");
  CHECK(fixed_text(kNan, 2) == "–");
  CHECK(short_text(612.44) == "612.4");
  CHECK(short_text(1e-4, 3) == "1.0e-04");
  CHECK(short_text(0) == "0");
  CHECK(short_text(123456, 9) == "123456.000");
  CHECK(count_text(1234567) == "1,234,567");
  CHECK(count_text(-123) == "-123");
  CHECK(count_text(-1234) == "-1,234");
  const std::vector<std::uint8_t> bytes = {'M', 'a', 'n', 'M'};
  CHECK(base64(bytes) == "TWFuTQ==");
  CHECK(base64(std::span(bytes).first(3)) == "TWFu");
  CHECK(base64({}) == "");
}

TEST_CASE("report: tables show the first and the last row of many", "[cpu]") {
  const auto table = [](std::size_t rows) { return folded_table("Numbers", {"a"}, rows, [](std::size_t i) { return std::vector<std::string>{"row" + std::to_string(i) + "."}; }, 10); };
  CHECK(table(0) == "");
  CHECK(count_of(table(10), "<td") == 10);
  CHECK(table(10).find("rows)") == std::string::npos);
  const std::string many = table(1001);
  CHECK(count_of(many, "<td") == 10);
  CHECK(many.find("(10 of 1,001 rows)") != std::string::npos);
  CHECK(many.find("row0.") != std::string::npos);
  CHECK(many.find("row1000.") != std::string::npos);
}

TEST_CASE("report: axes have marks at 1, 2 or 5", "[cpu]") {
  const Axis lr = linear_axis(0, 1e-4, 5);
  CHECK(lr.exponent == -4);
  CHECK(lr.labels == std::vector<std::string>{"0.0", "0.2", "0.4", "0.6", "0.8", "1.0"});
  CHECK(exponent_text(lr.exponent) == " (×10⁻⁴)");
  const Axis steps = linear_axis(1, 6080, 8, true);
  CHECK(steps.labels == std::vector<std::string>{"1,000", "2,000", "3,000", "4,000", "5,000", "6,000"});
  CHECK(steps.place(1) == 0.0);
  CHECK(linear_axis(0, 2, 6, true).labels == std::vector<std::string>{"0", "1", "2"});
  const Axis one = linear_axis(3, 3, 5);
  CHECK(one.low < 3);
  CHECK(one.high > 3);
  CHECK(linear_axis(-0.3, 0.4, 5).labels == std::vector<std::string>{"-0.4", "-0.2", "0.0", "0.2", "0.4"});
  const Axis logarithmic = log_axis(0.02, 900);
  CHECK(logarithmic.low <= 0.02);
  CHECK(logarithmic.high >= 900);
  CHECK(logarithmic.labels == std::vector<std::string>{"0.01", "0.1", "1", "10", "100", "1000"});
  test::expect_close(logarithmic.place(std::sqrt(logarithmic.low * logarithmic.high)), 0.5, 1e-9);
  for (const double low : {-1e29, -3.0, 0.0, 1e-29}) {
    const Axis axis = linear_axis(low, 1e30, 5);
    CHECK(axis.ticks.size() >= 2);
    CHECK(axis.ticks.size() <= 12);
  }
}

TEST_CASE("report: thinning keeps the least and the greatest of each column", "[cpu]") {
  Curve curve;
  for (int i = 0; i < 100000; ++i) {
    curve.x.push_back(i);
    curve.y.push_back(std::sin(i * 0.37) + (i == 54321 ? 50 : i == 54322 ? -50 : 0));
  }
  const std::vector<CurvePoint> points = thin_curve(curve, 0, 99999, 500);
  CHECK(points.size() == 1000);
  for (std::size_t column = 0; column < 500; ++column) {
    double least = kInf, greatest = -kInf;
    for (int i = 0; i < 100000; ++i) {
      if (std::min<std::size_t>(static_cast<std::size_t>(i / 99999.0 * 500), 499) != column) continue;
      least = std::min(least, curve.y[static_cast<std::size_t>(i)]);
      greatest = std::max(greatest, curve.y[static_cast<std::size_t>(i)]);
    }
    const auto [a, b] = std::minmax(points[2 * column].y, points[2 * column + 1].y);
    if (a != least || b != greatest) FAIL("column " << column << ": " << a << " " << b << " for " << least << " " << greatest);
  }
  CHECK(std::is_sorted(points.begin(), points.end(), [](const CurvePoint& a, const CurvePoint& b) { return a.x < b.x; }));
  CHECK(std::count_if(points.begin(), points.end(), [](const CurvePoint& p) { return p.gap; }) == 1);

  const std::string chart = line_chart({.title = "t", .x_label = "x", .y_label = "y", .curves = {curve}, .marks = {}, .wide = true});
  for (const std::string& path : attributes(chart, "d")) CHECK(std::count_if(path.begin(), path.end(), [](char c) { return c == 'L' || c == 'M'; }) <= 2000);
}

TEST_CASE("report: curves with gaps, one point or none", "[cpu]") {
  const Curve gaps{"g", {3, 1, 2, 4, 5, kNan}, {30, 10, kNan, 40, kInf, 1}};
  const std::vector<CurvePoint> points = thin_curve(gaps, 1, 5, 100);
  REQUIRE(points.size() == 3);
  CHECK(points[0].y == 10);
  CHECK(points[1].y == 30);
  CHECK(points[0].gap);
  CHECK(points[1].gap);
  CHECK_FALSE(points[2].gap);
  CHECK(thin_curve({"", {}, {}}, 0, 1, 10).empty());
  test::expect_throws<InvalidArgument>([] { thin_curve({"c", {1, 2}, {1}}, 0, 1, 10); }, "thin_curve: c has 2 x but 1 y");
  test::expect_throws<InvalidArgument>([] { thin_curve({"c", {1}, {1}}, 0, 1, 0); }, "one column");

  const auto chart = [](std::vector<Curve> curves) { return line_chart({.title = "t", .x_label = "x", .y_label = "y", .curves = std::move(curves), .marks = {{1, "m"}}, .y_may_be_log = true}); };
  for (const std::vector<Curve>& curves : std::vector<std::vector<Curve>>{{}, {{"e", {}, {}}}, {{"n", {1, 2}, {kNan, kInf}}}}) {
    CHECK(chart(curves).find("no data") != std::string::npos);
    CHECK(fault_of(chart(curves)) == "");
  }
  for (const std::vector<Curve>& curves : std::vector<std::vector<Curve>>{{{"p", {7}, {0}}}, {{"p", {0}, {-5}}}, {{"p", {1, 2, 3}, {1e-9, 1, 1e9}}},
                                                                        {{"p", {1, 2}, {1e30, -1e30}}}, {{"p", {1, 2}, {4, 4}}}, {gaps}}) {
    const std::string svg = chart(curves);
    CHECK(fault_of(svg) == "");
    check_numbers(svg);
    CHECK(svg.find("<circle") != std::string::npos);
  }
  const std::vector<Curve> nine(9, gaps);
  test::expect_throws<InvalidArgument>([&] { line_chart({.title = "t", .x_label = "", .y_label = "", .curves = nine, .marks = {}}); }, "at most 8");
  Curve odd = gaps;
  odd.look = 8;
  test::expect_throws<InvalidArgument>([&] { line_chart({.title = "t", .x_label = "", .y_label = "", .curves = {odd}, .marks = {}}); }, "no look 8");
}

TEST_CASE("report: bars and matrices", "[cpu]") {
  BarChart bars{.title = "b", .label_axis = "l", .value_axis = "v", .labels = {"one", kHostile}, .series = {{"s", {1, kNan}}, {"t", {0.5, 2}}}, .decimals = 1};
  for (const bool horizontal : {false, true}) {
    for (const bool nested : {false, true}) {
      bars.horizontal = horizontal;
      bars.nested = nested;
      const std::string svg = bar_chart(bars);
      CHECK(fault_of(svg) == "");
      check_numbers(svg);
      CHECK(count_of(svg, "<rect") == 3);
      CHECK(svg.find("<title>s, one: 1.0</title>") != std::string::npos);
    }
  }
  bars.series[0].values.pop_back();
  test::expect_throws<InvalidArgument>([&] { bar_chart(bars); }, "s has 1 values for 2 labels");
  bars.series.resize(9);
  test::expect_throws<InvalidArgument>([&] { bar_chart(bars); }, "at most 8");
  CHECK(bar_chart({.title = "b", .label_axis = "", .value_axis = "", .labels = {}, .series = {}}).find("no data") != std::string::npos);

  const std::string matrix = matrix_chart({"m", "true", "predicted", {"a", kHostile}, {3, 1, 0, 12345}});
  CHECK(fault_of(matrix) == "");
  check_numbers(matrix);
  CHECK(count_of(matrix, "<rect") == 3);
  CHECK(matrix.find("75.0 % of the row") != std::string::npos);
  CHECK(matrix.find(">12k<") != std::string::npos);
  test::expect_throws<InvalidArgument>([] { matrix_chart({"m", "", "", {"a"}, {1, 2}}); }, "2 counts for 1 labels");
}

TEST_CASE("report: a full page is well formed and all text escaped", "[cpu]") {
  const data::CocoData coco = small_coco(kHostile);
  const ReportData data = full_data(coco);
  const std::string html = html_report(data);
  check_page(html);
  CHECK(html == html_report(data));
  for (const char* title : {"Summary", "Loss", "Average precision", "Learning rate", "Speed", "Memory",
                            "AP per class", "Precision and recall", "Confusion", "Data set", "Pictures", "Warnings", "Configuration"}) {
    CHECK(html.find("<h2>" + std::string(title) + "</h2>") != std::string::npos);
  }
  CHECK(count_of(html, "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; &amp; &#39;q&#39; \\x01\\xff\\xe2\\x80\\xae") > 8);
  CHECK(html.find("prefers-color-scheme:dark") != std::string::npos);
  CHECK(html.find("best 0.300 at epoch 2") != std::string::npos);
  CHECK(html.find("nan") == std::string::npos);
}

TEST_CASE("report: a page without data says so", "[cpu]") {
  const std::string html = html_report({});
  check_page(html);
  CHECK(html.find("There is no evaluation yet.") != std::string::npos);
  CHECK(html.find("No data set was given.") != std::string::npos);
  CHECK(html.find("no data") != std::string::npos);
  data::CocoData empty;
  ReportData data;
  data.splits = {{"train", &empty}};
  data.evaluation = data::EvalResult();
  check_page(html_report(data));
}

TEST_CASE("report: sixteen pictures of noise and hundreds of classes stay below the limit", "[cpu]") {
  const data::CocoData coco = small_coco("dog");
  ReportData data = full_data(coco);
  data::EvalResult& result = *data.evaluation;
  result.per_class.assign(400, {});
  for (std::size_t k = 0; k < 400; ++k) result.per_class[k] = {std::int64_t(k), std::string(5000, '&'), 5, 0.5, 0.6, 0.4, 0.5, {}, {}};
  result.confusion.assign(401 * 401, 3);
  for (std::size_t i = 0; i < 5000; ++i) data.warnings.push_back(std::string(3000, '<'));
  data.config_json.assign(3'000'000, '"');
  for (int i = 0; i < 20; ++i) data.pictures.push_back({"picture" + std::to_string(i), 480, 480, 1, 2, std::vector<std::uint8_t>(kMaxPictureBytes, 7), std::vector<std::uint8_t>(kMaxPictureBytes, 7)});
  const std::string crowded = html_report(data);
  check_page(crowded);
  CHECK(count_of(crowded, "<img") >= 2);
  CHECK(crowded.find("The last 200 of 5002") != std::string::npos);

  ReportData plain = full_data(coco);
  plain.pictures = data.pictures;
  const std::string html = html_report(plain);
  check_page(html);
  CHECK(count_of(html, "<img") == 2 * kMaxReportPictures);
}

TEST_CASE("report: pictures are drawn small, with truth and predictions", "[cpu]") {
  const test::TempDir folder;
  data::CocoData coco = small_coco("dog");
  data::write_image(folder / "a.png", noise(1000, 800));
  data::write_image(folder / "c.png", noise(100, 80));   // b.png cannot be read
  coco.images[0].width = 1000;
  coco.images[0].height = 800;
  std::vector<data::Detection> detections = small_detections();
  detections.push_back({11, 99, {0, 0, 5, 5}, 0.9});
  PictureChoice choice;
  choice.score = 0.85;
  const std::vector<ReportPicture> pictures = draw_report_pictures(coco, folder.path(), detections, choice);
  REQUIRE(pictures.size() == 2);
  CHECK(pictures[0].name == "a.png");
  CHECK(pictures[0].width == 480);
  CHECK(pictures[0].height == 384);
  CHECK(pictures[0].truths == 2);
  CHECK(pictures[0].predictions == 1);
  CHECK(pictures[1].name == "c.png");
  CHECK(pictures[1].width == 400);
  CHECK(pictures[1].truths == 0);
  for (const ReportPicture& picture : pictures) {
    CHECK(picture.truth_jpeg.size() <= kMaxPictureBytes);
    CHECK(picture.truth_jpeg.size() > 100);
    CHECK(picture.prediction_jpeg.size() <= kMaxPictureBytes);
  }
  detections.assign(50, {11, 3, {10, 10, 30, 20}, 0.9});
  CHECK(draw_report_pictures(coco, folder.path(), detections, choice)[0].predictions == 9);   // 2 x 2 true boxes + 5
  choice.count = 1;
  CHECK(draw_report_pictures(coco, folder.path(), detections, choice).size() == 1);
}

TEST_CASE("report: metric files are read back", "[cpu]") {
  const test::TempDir folder;
  MetricLog log(folder.path());
  StepRecord step;
  step.step = 1;
  step.loss = kNan;
  step.terms = {{"loss_vfl", 0.5}};
  step.group_lr = {1e-5, 1e-4};
  log.step(step, true);
  step.step = 2;
  step.loss = 8;
  log.step(step, true);
  EpochRecord epoch;
  epoch.step = 2;
  epoch.loss = 7;
  epoch.terms = {{"loss_vfl", 0.5}};
  log.epoch(epoch);
  epoch.epoch = 1;
  epoch.evaluation = data::EvalResult();
  epoch.evaluation->AP = 0.25;
  log.epoch(epoch);
  std::ofstream(folder / "steps.csv", std::ios::app) << "3,0,1";   // the process died here

  const MetricTable steps = read_metric_csv(folder / "steps.csv"), epochs = read_metric_csv(folder / "metrics.csv"), lines = read_metric_json_lines(folder / "log.txt");
  REQUIRE(steps.rows() == 2);
  CHECK(steps.column("step") == std::vector<double>{1, 2});
  CHECK(std::isnan(steps.column("loss")[0]));
  CHECK(steps.column("lr")[1] == 1e-4);
  CHECK(std::isnan(steps.column("nothing")[1]));
  REQUIRE(epochs.rows() == 2);
  CHECK(std::isnan(epochs.column("AP")[0]));
  CHECK(epochs.column("AP")[1] == 0.25);
  REQUIRE(lines.rows() == 2);
  CHECK(lines.column("train_loss_vfl") == std::vector<double>{0.5, 0.5});
  CHECK(lines.has("train_loss"));
  CHECK_FALSE(lines.has("test_coco_eval_bbox"));
  CHECK(read_metric_csv(folder / "absent").rows() == 0);
  CHECK(read_metric_json_lines(folder / "absent").rows() == 0);
}

TEST_CASE("report: files of an evaluation", "[cpu]") {
  const test::TempDir folder;
  const data::CocoData coco = small_coco("big, \"brown\"\ndog");
  const std::vector<data::Detection> detections = small_detections();
  const data::EvalResult result = data::evaluate(coco, detections);
  write_evaluation_files(folder / "run/eval", {4, 500, "ema"}, result, detections);
  CHECK(data::read_detections(folder / "run/eval/predictions.json").size() == 3);
  const std::string classes = test::read_text(folder / "run/eval/per_class.csv");
  CHECK(count_of(classes, "\n") == 3);
  CHECK(classes.find("3,\"big, \"\"brown\"\"\\ndog\",2,") != std::string::npos);
  const std::string confusion = test::read_text(folder / "run/eval/confusion_matrix.csv");
  CHECK(count_of(confusion, "\n") == 4);
  CHECK(confusion.ends_with("background,0,0,0\n"));
  CHECK(count_of(test::read_text(folder / "run/eval/pr_curves.csv"), "\n") == 1 + 2 * data::kRecallPoints);
  const std::string latest = test::read_text(folder / "run/eval/latest.json");
  CHECK(latest.find("\"epoch\": 4,\n  \"step\": 500,\n  \"weights\": \"ema\"") != std::string::npos);
  CHECK(latest.find("\"best_f1\"") != std::string::npos);

  std::vector<data::Detection> broken = detections;
  broken[1].score = kNan;
  test::expect_throws<DataError>([&] { write_evaluation_files(folder / "run/eval", {5, 600, "ema"}, result, broken); }, "detection 1");
  CHECK(data::read_detections(folder / "run/eval/predictions.json").size() == 3);
  CHECK(std::distance(std::filesystem::directory_iterator(folder / "run/eval"), {}) == 5);
  test::write_text(folder / "file", "x");
  test::expect_throws<StorageError>([&] { write_evaluation_files(folder / "file", {5, 600, "ema"}, result, detections); }, "file");
}

}  // namespace detr::train

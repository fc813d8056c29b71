// info and selftest, and eval of a results file.
#include "tests/apps/small_run.h"

namespace detr::test {
namespace {

namespace fs = std::filesystem;

TEST_CASE("info: models, configurations, keys, devices", "[cpu]") {
  const nlohmann::json model = expect_success({"info", "model", "-c", "r18", "--json"}).json();
  CHECK(model.at("parameters") > 20'000'000);
  CHECK(model.at("parameters") < 20'300'000);
  CHECK(model.at("parts").at("backbone").at("tensors") > 10);
  CHECK(expect_success({"info", "model", "-c", "tiny"}).out.find("backbone") != std::string::npos);
  const nlohmann::json config = expect_success({"info", "config", "-c", "tiny", "-u", "optimizer.lr=0.5", "--json"}).json();
  CHECK(config.at("config").at("optimizer").at("lr") == 0.5);
  CHECK(config.at("origins").at("optimizer.lr") == "-u");
  // What it prints can be given back to it.
  const TempDir dir;
  write_text(dir / "printed.json", expect_success({"info", "config", "-c", "r50"}).out);
  CHECK(expect_success({"info", "config", "-c", (dir / "printed.json").string()}).out == read_text(dir / "printed.json"));

  const nlohmann::json keys = expect_success({"info", "keys", "optimizer", "--json"}).json();
  CHECK(keys.at("keys").size() > 4);
  for (const auto& key : keys.at("keys")) CHECK(!key.at("help").get<std::string>().empty());
  const nlohmann::json names = expect_success({"info", "configs", "--json"}).json();
  CHECK(names.at("configs").size() >= 6);
  CHECK(expect_success({"info", "devices", "-d", "cpu", "--threads", "3", "--json"}).json().at("devices")[0].at("threads") == 3);
}

TEST_CASE("selftest: gradients of an op", "[cpu]") {
  const nlohmann::json object = expect_success({"selftest", "--ops", "^linear$", "--json"}).json();
  CHECK(object.at("ops").size() == 1);
  CHECK(object.at("ops")[0].at("passed") == true);
  expect_error({"selftest", "--ops", "nosuchop"}, 2, "no such op");
  expect_error({"selftest", "--ops", "("}, 2, "no regular expression");
}

TEST_CASE("selftest: a recorded number that is changed is found", "[cpu][slow]") {
  const fs::path source = shared_folder() / "golden" / "eval_r18.json";
  if (!fs::exists(source)) SKIP("no recorded cases");
  const TempDir dir;
  fs::create_directories(dir / "golden");
  const fs::path copy = dir / "golden" / "eval_r18.json";
  write_text(copy, read_text(source));
  const nlohmann::json good = expect_success({"selftest", "--golden", (dir / "golden").string(), "--dtype", "f32", "--json"}).json();
  REQUIRE(good.at("files").size() == 1);
  CHECK(good.at("files")[0].at("passed") == true);

  nlohmann::json changed = read_json(copy);
  changed["pred_logits"]["v"][0] = changed["pred_logits"]["v"][0].get<double>() + 0.1;
  write_text(copy, changed.dump());
  const ProcessResult bad = detrtrain({"selftest", "--golden", (dir / "golden").string(), "--dtype", "f32"});
  CHECK(bad.code == 9);
  CHECK(bad.out.find("FAIL eval_r18") != std::string::npos);
  CHECK(bad.errors().size() == 1);
}

TEST_CASE("eval: the COCO API's numbers of recorded detections", "[cpu]") {
  const fs::path data = shared_data();
  if (data.empty()) SKIP("no recorded detections");
  for (const std::string name : {"val100", "crowd"}) {
    const fs::path folder = data / "coco-eval-oracle";
    const nlohmann::json wanted = read_json(folder / (name + "_expected.json")).at("stats");
    const nlohmann::json object = expect_success({"eval", "--gt", (folder / (name + "_gt.json")).string(), "--from-json", (folder / (name + "_dets.json")).string(), "--json", "-q"}).json();
    REQUIRE(wanted.size() == 12);
    for (const auto& [key, value] : wanted.items()) {
      INFO(name << " " << key);
      expect_close(object.at("stats").at(key).get<double>(), value.get<double>(), 0, 1e-9);
    }
  }
}

TEST_CASE("eval: the twelve lines, --require-ap, a results file", "[cpu]") {
  const TempDir dir;
  const nlohmann::json truth = {{"images", {{{"id", 5}, {"file_name", "a.jpg"}, {"width", 100}, {"height", 100}}}},
                                {"annotations", {{{"id", 1}, {"image_id", 5}, {"category_id", 7}, {"bbox", {10, 10, 50, 50}}}}},
                                {"categories", {{{"id", 7}, {"name", "thing"}}}}};
  const nlohmann::json found = {{{"image_id", 5}, {"category_id", 7}, {"bbox", {10, 10, 50, 50}}, {"score", 0.9}}, {{"image_id", 5}, {"category_id", 7}, {"bbox", {0, 0, 9, 9}}, {"score", 0.1}}};
  write_text(dir / "gt.json", truth.dump());
  write_text(dir / "found.json", found.dump());
  const std::vector<std::string> base = {"eval", "--gt", (dir / "gt.json").string(), "--from-json", (dir / "found.json").string()};
  const std::string text = expect_success(base).out;
  CHECK(text.starts_with(" Average Precision  (AP) @[ IoU=0.50:0.95 | area=   all | maxDets=100 ] = 1.000\n"));
  CHECK(text.find(" Average Recall     (AR) @[ IoU=0.50:0.95 | area= small | maxDets=100 ] = -1.000\n") != std::string::npos);
  CHECK(text.find("thing") != std::string::npos);
  expect_close(expect_success(base + std::vector<std::string>{"--require-ap", "0.99", "--json"}).json().at("stats").at("AP").get<double>(), 1, 1e-12);
  CHECK(expect_success(base + std::vector<std::string>{"--min-score", "0.5", "--json"}).json().at("dets") == 1);
  write_text(dir / "found.json", nlohmann::json::array({found[1]}).dump());
  const ProcessResult low = expect_error(base + std::vector<std::string>{"--require-ap", "0.5", "--json"}, 9, "AP 0.0000 is below --require-ap 0.5");
  CHECK(low.json().at("error").is_string());
  nlohmann::json foreign = found;
  foreign[0]["image_id"] = 6;
  write_text(dir / "found.json", foreign.dump());
  expect_error(base, 3, "6");   // results that do not belong to the annotations
}

}  // namespace
}  // namespace detr::test

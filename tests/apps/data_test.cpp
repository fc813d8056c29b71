// Data sets with faults, through the binary: each is named, none ends in a signal.
#include <cmath>
#include <set>

#include "data/synth.h"
#include "tests/apps/small_run.h"

namespace detr::test {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

/// Every line of a report is a finding or a split's statistics.
void expect_report(const ProcessResult& result) {
  INFO("stdout: " << result.out << "\nstderr: " << result.err);
  CHECK(result.signal == 0);
  CHECK((result.code == 0 || result.code == 3));
  bool error = false;
  for (const std::string& line : lines_of(result.out)) {
    const bool finding = line.starts_with("error: ") || line.starts_with("warning: ") || line.starts_with("note: ");
    CHECK((finding || line.starts_with("train: ") || line.starts_with("val: ") || line == "nothing found"));
    error = error || line.starts_with("error: ");
  }
  CHECK(error == (result.code == 3));
  CHECK(result.errors().size() == (error ? 1u : 0u));
}

TEST_CASE("data: every fault of synth is answered by check-data and train alike", "[cpu][slow]") {
  const std::set<std::string> refused = {"box-null", "box-text", "box-three-numbers", "categories-absent", "category-duplicate-id", "category-unknown", "ids-as-text",
                                         "image-duplicate-id", "image-file-missing", "image-path-escapes", "json-deep-nesting", "json-empty-file", "json-trailing-comma",
                                         "json-truncated", "no-images", "top-level-list"};
  const TempDir dir;
  for (const std::string& fault : data::synth_faults()) {
    INFO(fault);
    const std::string folder = (dir / fault).string();
    expect_success({"synth", "--out", folder, "--images", "6", "--size", "64x64", "--bad", fault});
    const ProcessResult check = detrtrain({"check-data", "--data", folder});
    expect_report(check);
    CHECK(check.code == (refused.contains(fault) ? 3 : 0));
    const ProcessResult train = detrtrain({"train", "-c", "tiny", "-u", "RTDETRTransformerv2.num_queries=20", "--imgsz", "64", "--batch-size", "2", "--num-workers", "1", "--data", folder,
                                           "--output-dir", folder + "/run", "--max-steps", "2", "--eval-every", "0"});
    INFO(train.err);
    CHECK(train.code == check.code);
    if (train.code == 3) CHECK(train.errors().size() == 1);
    else for (const double loss : losses_of(fs::path(folder) / "run")) CHECK(std::isfinite(loss));
  }
}

TEST_CASE("data: check-data", "[cpu]") {
  const SmallData small({"--empty-frac", "0.3"});
  const nlohmann::json object = expect_success({"check-data", "--data", small.data(), "--stats", "--duplicates", "--vis", small.path("vis"), "--json"}).json();
  REQUIRE(object.at("stats").size() == 2);
  CHECK(object.at("stats")[0].at("images") == 10);
  CHECK(object.at("stats")[0].at("classes").size() == 3);
  CHECK(std::distance(fs::directory_iterator(small.dir() / "vis"), fs::directory_iterator()) == 10);   // 8 of train, both of val
  // The same pictures in two splits are a warning: exit 9 where that is asked for.
  fs::copy(small.dir() / "data", small.dir() / "twice", fs::copy_options::recursive);
  fs::copy_file(small.dir() / "data/annotations/instances_train.json", small.dir() / "twice/annotations/instances_val.json", fs::copy_options::overwrite_existing);
  fs::remove_all(small.dir() / "twice/images/val");
  fs::copy(small.dir() / "data/images/train", small.dir() / "twice/images/val");
  expect_report(detrtrain({"check-data", "--data", small.path("twice"), "--duplicates"}));
  expect_error({"check-data", "--data", small.path("twice"), "--duplicates", "--fail-on", "warning"}, 9, "--fail-on warning");
}

TEST_CASE("data: --fix-out writes a file that is then clean", "[cpu]") {
  const TempDir dir;
  const std::string folder = (dir / "bad").string(), fixed = (dir / "fixed.json").string();
  expect_success({"synth", "--out", folder, "--images", "6", "--size", "64x64", "--bad", "ids-as-text"});
  const std::string file = folder + "/annotations/instances_train.json", images = folder + "/images/train";
  CHECK(detrtrain({"check-data", "--ann", file, "--images", images, "--fix-out", fixed}).code == 3);
  expect_success({"check-data", "--ann", fixed, "--images", images});
  CHECK(expect_error({"check-data", "--data", folder, "--fix-out", fixed}, 2, "--fix-out repairs one annotation file").out.empty());   // told before anything is read
}

TEST_CASE("data: pictures that fail are named, skipped or refused", "[cpu]") {
  const SmallData small;
  const nlohmann::json truth = read_json(small.dir() / "data/annotations/instances_train.json");
  const std::string name = truth.at("images")[0].at("file_name");
  write_text(small.dir() / "data/images/train" / name, "<html>");
  const Words flags = {"--max-steps", "2", "--eval-every", "0"};
  expect_error(small.train("refused", flags), 3, name);
  const ProcessResult skipped = expect_success(small.train("skipped", flags + Words{"--bad-images", "skip"}));
  CHECK(skipped.err.find(name) != std::string::npos);
  expect_error({"check-data", "--data", small.data()}, 3, "cannot be used");
}

TEST_CASE("data: hard but valid sets train and are scored", "[cpu][slow]") {
  const fs::path data = shared_data();
  if (data.empty()) SKIP("no recorded data sets");
  const SmallData small;
  for (const char* name : {"awkward", "coco-tiny", "bccd"}) {
    INFO(name);
    const std::string folder = (data / name).string(), run = concat("run-", name);
    expect_success(small.train_on(folder, run, {"--max-steps", "2", "--eval-every", "0"}));
    const nlohmann::json scored = expect_success({"eval", "-r", small.path(run + "/last.safetensors"), "--data", folder, "--json", "-q"}).json();
    CHECK(scored.at("images") > 0);
    CHECK(scored.at("stats").size() == 12);
  }
}

TEST_CASE("data: recorded faulty files and pictures", "[cpu]") {
  const fs::path data = shared_data();
  if (data.empty()) SKIP("no recorded data sets");
  for (const auto& entry : fs::directory_iterator(data / "awkward/faulty")) {
    INFO(entry.path());
    expect_report(detrtrain({"check-data", "--ann", entry.path().string(), "--images", (data / "awkward/images").string()}));
  }
  // All awkward pictures in one annotation file: those that must fail are named, the good ones are not refused.
  const nlohmann::json expected = read_json(data / "awkward-images/expected.json");
  nlohmann::json coco = {{"images", nlohmann::json::array()}, {"annotations", nlohmann::json::array()}, {"categories", {{{"id", 1}, {"name", "thing"}}}}};
  for (const auto& [file, facts] : expected.items()) coco["images"].push_back({{"id", coco["images"].size()}, {"file_name", file}, {"width", facts.at("shown")[0]}, {"height", facts.at("shown")[1]}});
  const TempDir dir;
  write_text(dir / "all.json", coco.dump());
  const ProcessResult result = detrtrain({"check-data", "--ann", (dir / "all.json").string(), "--images", (data / "awkward-images/files").string(), "--max-report", "100"});
  expect_report(result);
  CHECK(result.code == 3);
  std::string refused, all;
  for (const std::string& line : lines_of(result.out)) {
    all += line;
    if (line.starts_with("error: ")) refused += line;
  }
  for (const auto& [file, facts] : expected.items()) {
    INFO(file << "\n" << result.out);
    const std::string rule = facts.at("decode");
    if (rule == "ok") CHECK(refused.find(file) == std::string::npos);
    if (rule == "must-fail-cleanly") CHECK(refused.find(file) != std::string::npos);
    if (rule == "fail-or-warn") CHECK(all.find(file) != std::string::npos);
  }
}

}  // namespace
}  // namespace detr::test

// train, eval and predict together: what is written, and that ids and names come out as they went in.
#include <algorithm>
#include <array>
#include <cstdio>

#include "dist/build.h"
#include "tests/apps/small_run.h"

namespace detr::test {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

TEST_CASE("run: train, eval, predict", "[cpu]") {
  const SmallData small;
  const nlohmann::json trained = expect_success(small.train("run", {"--epochs", "2", "--json"})).json();
  for (const char* key : {"output_dir", "steps", "epochs", "best", "last", "img_per_s", "skipped", "hash"}) CHECK(trained.contains(key));
  CHECK(trained.at("steps") == 10);
  CHECK(trained.at("best").at("epoch").is_number());
  for (const char* name : {"config.json", "train.log", "log.txt", "metrics.csv", "steps.csv", "last.safetensors", "best.safetensors", "report.html", "eval/latest.json", "eval/predictions.json"}) {
    INFO(name);
    CHECK(fs::file_size(small.dir() / "run" / name) > 0);
  }
  CHECK(losses_of(small.dir() / "run").size() == 2);
  CHECK(read_text(small.dir() / "run" / "train.log").find(" data      train 10 images, ") != std::string::npos);

  // The same weights score the same, whoever asks.
  const std::string weights = small.path("run/best.safetensors");
  const nlohmann::json scored = expect_success({"eval", "-r", weights, "--data", small.data(), "--save-json", small.path("dets.json"), "--json"}).json();
  CHECK(scored.at("stats").at("AP") == trained.at("best").at("AP"));
  CHECK(scored.at("images") == 2);
  const nlohmann::json truth = read_json(small.dir() / "data/annotations/instances_val.json");
  std::map<std::int64_t, std::string> names;
  for (const auto& category : truth.at("categories")) names[category.at("id")] = category.at("name");
  REQUIRE(scored.at("per_class").size() == names.size());
  for (const auto& c : scored.at("per_class")) CHECK(names.at(c.at("id")) == c.at("name"));
  const nlohmann::json again = expect_success({"eval", "--gt", small.path("data/annotations/instances_val.json"), "--from-json", small.path("dets.json"), "--json"}).json();
  CHECK(again.at("stats") == scored.at("stats"));
  CHECK(expect_success({"eval", "-r", weights, "--data", small.data(), "--batch-size", "1", "--threads", "1", "--json"}).json().at("stats") == scored.at("stats"));

  CHECK(expect_success({"eval", "-r", weights, "--data", small.data(), "--imgsz", "64x160", "--json"}).json().at("images") == 2);   // another size, not square

  const nlohmann::json predicted = expect_success({"predict", "-r", weights, "--input", small.path("data/images/val"), "--conf", "0", "--save-json", small.path("p.json"),
                                                "--vis", small.path("vis"), "--save-txt", small.path("txt"), "--json"}).json();
  REQUIRE(predicted.at("images").size() == 2);
  std::size_t dets = 0;
  for (const auto& image : predicted.at("images")) {
    CHECK(image.at("width") == 96);
    CHECK(fs::file_size(small.dir() / "vis" / image.at("file").get<std::string>()) > 0);
    for (const auto& det : image.at("dets")) {
      CHECK(names.at(det.at("category_id")) == det.at("name"));
      ++dets;
    }
  }
  CHECK(dets == 2 * 90);   // 30 queries of 3 classes
  CHECK(read_json(small.dir() / "p.json").size() == dets);
  const Words txt = lines_of(read_text(small.dir() / "txt" / fs::path(predicted.at("images")[0].at("file").get<std::string>()).replace_extension(".txt")));
  CHECK(txt.size() == 90);

  // A data set with other categories does not belong to these weights.
  rewrite_data(small.data(), small.dir() / "other", [](nlohmann::json& coco) { coco["categories"][0]["name"] = "blob"; });
  expect_error({"eval", "-r", weights, "--data", small.path("other")}, 3, "has other categories than");
}

TEST_CASE("run: predict names what it leaves out", "[cpu]") {
  const SmallData small;
  expect_success(small.train("run", {"--max-steps", "1", "--eval-every", "0"}));
  const std::string weights = small.path("run/last.safetensors");
  fs::create_directories(small.dir() / "in/a");
  fs::create_directories(small.dir() / "in/b");
  const nlohmann::json truth = read_json(small.dir() / "data/annotations/instances_val.json");
  const fs::path picture = small.dir() / "data/images/val" / truth.at("images")[0].at("file_name").get<std::string>();
  for (const char* name : {"in/a/1.jpg", "in/b/1.jpg", "in/b/\xff.jpg"}) fs::copy_file(picture, small.dir() / name);   // content decides; the last is no UTF-8
  write_text(small.dir() / "in/b/2.jpg", "<html>");
  const ProcessResult result = expect_success({"predict", "-r", weights, "--input", small.path("in"), "--vis", small.path("vis"), "--save-json", small.path("p.json"), "--json"});
  CHECK(result.json().at("images").size() == 3);
  CHECK(result.err.find("2.jpg") != std::string::npos);
  CHECK(result.err.find("1 of 4 pictures could not be read") != std::string::npos);
  CHECK(fs::exists(small.dir() / "vis/a/1.jpg"));
  CHECK(fs::exists(small.dir() / "vis/b/1.jpg"));
  read_json(small.dir() / "p.json");
  expect_error({"predict", "-r", weights, "--input", small.path("in"), "--bad-images", "stop"}, 3, "2.jpg");
  expect_error({"predict", "-r", weights, "--input", small.path("in/b/2.jpg")}, 3, "none of 1 pictures could be read");
  expect_error({"predict", "-r", weights, "--input", small.path("nowhere")}, 3, "no such file or folder");
  expect_error({"predict", "-r", weights, "--input", small.path("in/a"), "--vis", small.path("p.json")}, 7, "p.json: cannot be made");
}

TEST_CASE("run: pictures of one name stay as many files", "[cpu]") {
  const SmallData small;
  expect_success(small.train("run", {"--max-steps", "1", "--eval-every", "0"}));
  const fs::path pictures = small.dir() / "data/images/val", picture = fs::directory_iterator(pictures)->path();
  for (const char* name : {"in/a/1.jpg", "in/a/1.png", "in/b/1.jpg", "in/c/1-1.jpg"}) {
    fs::create_directories((small.dir() / name).parent_path());
    fs::copy_file(picture, small.dir() / name);
  }
  const nlohmann::json object = expect_success({"predict", "-r", small.path("run/last.safetensors"), "--input", small.path("in/a"), small.path("in/b"), small.path("in/c"), "--conf", "0",
                                                "--vis", small.path("vis"), "--save-txt", small.path("txt"), "--json"}).json();
  Words names;
  for (const auto& image : object.at("images")) names.push_back(image.at("file"));
  CHECK(names == Words{"1.jpg", "1.png", "1-2.jpg", "1-1.jpg"});   // the third takes no name that was given
  for (const std::string& name : names) CHECK(fs::file_size(small.dir() / "vis" / name) > 0);
  Words texts;
  for (const auto& entry : fs::directory_iterator(small.dir() / "txt")) texts.push_back(entry.path().filename());
  std::sort(texts.begin(), texts.end());
  CHECK(texts == Words{"1-1.txt", "1-2.txt", "1-3.txt", "1.txt"});
}

TEST_CASE("run: --exif holds for pixels and annotations alike", "[cpu]") {
  const SmallData small;
  expect_success(small.train("run", {"--max-steps", "1", "--eval-every", "0"}));
  const std::string weights = small.path("run/last.safetensors"), turned = small.path("turned");
  // The same pictures, with a word in each JPEG that they are upside down.
  fs::copy(small.dir() / "data", turned, fs::copy_options::recursive);
  const std::string exif("\xff\xe1\x00\x22"
                         "Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x03\0\0\0\0\0\0\0", 36);
  int jpegs = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(turned) / "images/val")) {
    const std::string bytes = read_text(entry.path());
    if (!bytes.starts_with("\xff\xd8")) continue;
    write_text(entry.path(), bytes.substr(0, 2) + exif + bytes.substr(2));
    ++jpegs;
  }
  REQUIRE(jpegs > 0);
  const auto scored = [&](const std::string& data, const Words& more) {
    expect_success(Words{"eval", "-r", weights, "--data", data, "--save-json", small.path("dets.json"), "-q"} + more);
    return read_text(small.dir() / "dets.json");
  };
  const std::string as_stored = scored(small.data(), {});
  CHECK(scored(turned, {"--exif", "ignore"}) == as_stored);
  CHECK(scored(turned, {"-u", "data.exif=ignore"}) == as_stored);
  CHECK(scored(turned, {}) != as_stored);
  const auto predicted = [&](const std::string& data, const Words& more) {
    return expect_success(Words{"predict", "-r", weights, "--input", data + "/images/val", "--conf", "0", "--json"} + more).json().at("images");
  };
  CHECK(predicted(turned, {"--exif", "ignore"}) == predicted(small.data(), {}));
  CHECK(predicted(turned, {"-u", "data.exif=ignore"}) == predicted(small.data(), {}));
  CHECK(predicted(turned, {}) != predicted(small.data(), {}));
  const auto counted = [&](const Words& more) { return expect_success(Words{"check-data", "--data", turned, "--json"} + more).json().at("stats")[1].at("exif_turned").get<int>(); };
  CHECK(counted({}) == jpegs);
  CHECK(counted({"--exif", "ignore"}) == 0);
  CHECK(counted({"-c", "tiny", "-u", "data.exif=ignore"}) == 0);
}

TEST_CASE("run: category ids change nothing but the ids", "[cpu]") {
  const SmallData small;
  const nlohmann::json base = expect_success(small.train("base", {"--epochs", "1", "--json"})).json();
  int n = 0;
  for (const std::array<std::int64_t, 3>& ids : {std::array<std::int64_t, 3>{0, 1, 2}, {1, 2, 3}, {7, 90, 2905442}}) {
    const std::map<std::int64_t, std::int64_t> renamed = {{3, ids[0]}, {7, ids[1]}, {12, ids[2]}};
    const std::string folder = concat("ids", n), run = concat("run", n++);
    rewrite_data(small.data(), small.dir() / folder, [&](nlohmann::json& coco) {
      for (auto& category : coco["categories"]) category["id"] = renamed.at(category["id"]);
      for (auto& annotation : coco["annotations"]) annotation["category_id"] = renamed.at(annotation["category_id"]);
    });
    const nlohmann::json object = expect_success(small.train_on(small.path(folder), run, {"--epochs", "1", "--json"})).json();
    CHECK(object.at("hash") == base.at("hash"));
    CHECK(object.at("last") == base.at("last"));
    CHECK(losses_of(small.dir() / run) == losses_of(small.dir() / "base"));
    const nlohmann::json dets = expect_success({"predict", "-r", small.path(run + "/best.safetensors"), "--input", small.path("data/images/val"), "--conf", "0", "--json"}).json();
    for (const auto& det : dets.at("images")[0].at("dets")) CHECK((det.at("category_id") == ids[0] || det.at("category_id") == ids[1] || det.at("category_id") == ids[2]));
  }
}

TEST_CASE("run: the same command gives the same bits for any number of threads", "[cpu]") {
  const SmallData small;
  const nlohmann::json one = expect_success(small.train("one", {"--epochs", "1", "--threads", "1", "--json"})).json();
  const nlohmann::json three = expect_success(small.train("three", {"--epochs", "1", "--threads", "3", "--json"})).json();
  CHECK(one.at("hash") == three.at("hash"));
  CHECK(one.at("last") == three.at("last"));
  expect_same_tensors(small.dir() / "one/last.safetensors", small.dir() / "three/last.safetensors");
  CHECK(expect_success(small.train("other", {"--epochs", "1", "--seed", "1", "--json"})).json().at("hash") != one.at("hash"));
}

TEST_CASE("run: corner boxes are told", "[cpu]") {
  const SmallData small;
  const Words flags = {"--max-steps", "1", "--eval-every", "0"};
  CHECK(expect_success(small.train("good", flags)).err.find("corner") == std::string::npos);
  rewrite_data(small.data(), small.dir() / "corners", [](nlohmann::json& coco) {
    for (auto& a : coco["annotations"]) a["bbox"] = {a["bbox"][0], a["bbox"][1], a["bbox"][0].get<double>() + a["bbox"][2].get<double>(), a["bbox"][1].get<double>() + a["bbox"][3].get<double>()};
  });
  CHECK(expect_success(small.train_on(small.path("corners"), "bad", flags)).err.find("warning: corner-boxes") != std::string::npos);
  CHECK(read_text(small.dir() / "bad/train.log").find(" warning: corner-boxes") != std::string::npos);
}

TEST_CASE("run: the output folder", "[cpu]") {
  const SmallData small;
  const Words flags = {"--max-steps", "1", "--eval-every", "0"};
  write_text(small.dir() / "run/notes.txt", "mine");
  expect_error(small.train("run", flags), 2, "is not empty: -r auto goes on with the run in it, --overwrite starts anew");
  expect_success(small.train("run", flags + Words{"--overwrite"}));
  CHECK(read_text(small.dir() / "run/notes.txt") == "mine");
  expect_error(small.train("run/notes.txt", flags), 7, "notes.txt");   // a file is no folder
  expect_error(small.train("none", flags + Words{"--freeze", "("}), 2, "--freeze '(' is no regular expression");
  // A start that fails leaves nothing behind, so the corrected command can use the folder.
  write_text(small.dir() / "weights.safetensors", "no weights");
  expect_error(small.train("none", flags + Words{"-t", small.path("weights.safetensors")}), 7, "weights.safetensors");
  CHECK(!fs::exists(small.dir() / "none"));
  fs::create_directories(small.dir() / "empty");
  expect_error(small.train("empty", flags + Words{"-t", small.path("weights.safetensors")}), 7, "weights.safetensors");
  CHECK(fs::is_empty(small.dir() / "empty"));
  if constexpr (dist::kHasGloo) {
    const Words ranks = {"-d", "cpu", "--ranks", "2"};
    for (const char* folder : {"none", "empty"}) expect_error(small.train(folder, flags + ranks + Words{"-t", small.path("weights.safetensors")}), 7, "weights.safetensors");
    CHECK(!fs::exists(small.dir() / "none"));
    CHECK(fs::is_empty(small.dir() / "empty"));
    expect_success(small.train("empty", flags + ranks));
  }
}

TEST_CASE("run: what cannot be written beside a run is a warning, told once", "[cpu]") {
  const SmallData small;
  write_text(small.dir() / "run/eval", "a file where a folder should be");
  const std::string err = expect_success(small.train("run", {"--epochs", "2", "--overwrite"})).err;
  const std::size_t first = err.find("warning: eval/ of epoch 0 is not written");
  REQUIRE(first != std::string::npos);
  CHECK(err.find("is not written", first + 40) == std::string::npos);
  CHECK(fs::file_size(small.dir() / "run/report.html") > 0);
}

TEST_CASE("run: one that diverges is exit 5 and names step, images and tensor", "[cpu]") {
  const SmallData small;
  const ProcessResult result = expect_error(small.train("run", {"--lr", "1e30", "--max-skips", "1", "--epochs", "20", "--eval-every", "0"}), 5, "2 such steps in a row");
  CHECK(result.errors()[0].find("images 1") != std::string::npos);
  CHECK(result.errors()[0].find("first in ") != std::string::npos);
  CHECK(!fs::exists(small.dir() / "run/last.safetensors"));   // it would hold numbers that are not finite
}

TEST_CASE("run: log styles", "[cpu]") {
  const SmallData small;
  const Words flags = {"--epochs", "1", "--eval-every", "0", "-u", "print_freq=2"};
  const std::string classic = expect_success(small.train("classic", flags + Words{"--log-style", "classic"})).err;
  // Median and mean of two steps: the median is the lower one.
  const std::size_t at = classic.find("Epoch: [0]  [1/5]  eta: ");
  REQUIRE(at != std::string::npos);
  double median = 0, mean = 0;
  REQUIRE(std::sscanf(classic.substr(classic.find("  loss: ", at)).c_str(), "  loss: %lf (%lf)", &median, &mean) == 2);
  CHECK(median < mean);
  CHECK(classic.find("  loss_vfl: ", at) != std::string::npos);
  CHECK(classic.find("  data: ", at) != std::string::npos);

  const std::string lines = expect_success(small.train("lines", flags)).err;   // no terminal: lines
  CHECK(lines.find(" step 4 epoch 0 4/5 loss ") != std::string::npos);
  CHECK(lines.find('\r') == std::string::npos);
  CHECK(lines.find('\033') == std::string::npos);

  const std::string bar = expect_success(small.train("bar", flags + Words{"--log-style", "bar"})).err;
  const std::size_t start = bar.find("\repoch 0/1 [");
  REQUIRE(start != std::string::npos);
  CHECK(bar.find("\033[K", start) - start <= 80);   // a terminal of unknown width has 80
  CHECK(expect_success(small.train("quiet", flags + Words{"-q"})).err.empty());
  const std::string verbose = expect_success(small.train("verbose", flags + Words{"-v"})).err;
  CHECK(verbose.find("key       RTDETRTransformerv2.num_queries (-u)") != std::string::npos);
  CHECK(lines.find("key       ") == std::string::npos);
}

TEST_CASE("run: a closed or full stdout and stderr do not end a run", "[cpu]") {
  const SmallData small;
  for (const auto& [streams, name] : {std::pair(Detrtrain::Streams::closed, "closed"), std::pair(Detrtrain::Streams::full, "full")}) {
    for (const char* style : {"lines", "bar"}) {
      const std::string run = concat(name, "-", style);
      INFO(run);
      CHECK(detrtrain(small.train(run, {"--epochs", "1", "--log-style", style}), streams).code == 0);
      expect_success({"info", "ckpt", small.path(run + "/last.safetensors")});
      // Nothing was printed into a file that took the number of a closed stream.
      for (const std::string& line : lines_of(read_text(small.dir() / run / "log.txt"))) CHECK(nlohmann::json::parse(line, nullptr, false).is_object());
      CHECK(nlohmann::json::parse(read_text(small.dir() / run / "config.json"), nullptr, false).is_object());
    }
    CHECK(detrtrain({"info", "configs"}, streams).code == 7);   // there, the output is the product
    CHECK(detrtrain({"info", "configs", "--json"}, streams).code == 7);
  }
}

}  // namespace
}  // namespace detr::test

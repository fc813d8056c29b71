// What a user types: commands, flags, keys; the exit code and the one line for each kind of mistake.
#include <sys/wait.h>

#include <cstdlib>

#include "runtime/gpus.h"
#include "tests/apps/small_run.h"

namespace detr::test {
namespace {

namespace fs = std::filesystem;

TEST_CASE("usage: unknown commands and flags name the nearest", "[cpu]") {
  expect_error({}, 2, "a command is needed: train, eval");
  expect_error({"trian"}, 2, "unknown command 'trian'; did you mean train?");
  expect_error({"--quiet", "train"}, 2, "flags come after the command");
  expect_error({"train", "--epoch", "3"}, 2, "unknown flag --epoch; did you mean --epochs?");
  expect_error({"train", "--num-querys=3"}, 2, "unknown flag --num-querys; did you mean --num-workers?");
  expect_error({"info"}, 2, "info needs one of model");
  expect_error({"info", "modle"}, 2, "did you mean model?");
  expect_error({"info", "configs", "r18"}, 2, "takes no 'r18'");
  expect_error({"synth", "--out", "x", "-u", "seed=1"}, 2, "unknown flag -u");
  expect_error({"synth", "--out", "x", "seed=1"}, 2, "unexpected argument 'seed=1'");
  expect_error({"check-data", "--data", "x", "seed=1"}, 2, "only together with -c");
  for (const char* verb : {"eval", "check-data"}) expect_error({verb, "--bad-images", "skip"}, 2, "unknown flag --bad-images");   // nothing there obeys it
}

TEST_CASE("usage: bench", "[cpu]") {
  expect_error({"bench", "loader"}, 2, "bench knows no 'loader'; it has: step, kernels");
  expect_error({"bench", "kernels", "-d", "cpu"}, 2, "bench kernels measures a GPU, --device cpu is none");
  expect_error({"bench", "kernels", "--batch-size", "4"}, 2, "bench kernels has no --batch-size");
  expect_error({"bench", "kernels", "--json"}, 2, "bench kernels has no --json");
  expect_error({"bench", "step", "-c", "tiny", "--filter", "x"}, 2, "bench step has no --filter");
}

TEST_CASE("usage: bench kernels goes on as the program beside it", "[cpu]") {
  const TempDir dir;
  fs::copy_file(DETRTRAIN_BINARY, dir / "detrtrain");
  const auto run = [&](const std::string& arguments) {
    const int status = std::system(concat((dir / "detrtrain").string(), " bench kernels ", arguments, " >", (dir / "out").string(), " 2>&1").c_str());
    return std::pair(WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(dir / "out"));
  };
  const auto [missing, why] = run("");
  CHECK(missing == 2);
  CHECK(why.find((dir / "detr_bench").string() + ", which a build with CUDA") != std::string::npos);
  write_text(dir / "detr_bench", "#!/bin/sh\necho \"$#:$*\"\nexit 9\n");
  fs::permissions(dir / "detr_bench", fs::perms::owner_all);
  CHECK(run("") == std::pair(9, std::string("0:\n")));
  CHECK(run("-d cuda:3 --filter 'conv|topk' --save-json out.json --iters 7") == std::pair(9, std::string("7:--device 3 --benchmark_filter=conv|topk --json out.json --runs 7\n")));
}

TEST_CASE("usage: a flag is given once", "[cpu]") {
  expect_error({"train", "--epochs", "1", "--epochs", "2"}, 2, "--epochs is given more than once");
  expect_error({"train", "-c", "tiny", "--config", "r18"}, 2, "--config is given more than once");
  expect_error({"train", "-q", "-q"}, 2, "--quiet is given more than once");
  expect_error({"train", "--use_ema", "1"}, 2, "unknown flag --use-ema");
}

TEST_CASE("usage: numbers are checked", "[cpu]") {
  for (const char* bad : {"x", "2.5", "0", "-3", "1e3", "", "99999999999999999999", "0x10"})
    expect_error({"train", "--batch-size", bad}, 2, concat("--batch-size: wanted a whole number of at least 1, got '", bad, "'"));
  for (const char* bad : {"nan", "inf", "0", "-1", "1,5", "1.5.2"}) expect_error({"train", "--lr", bad}, 2, "--lr: wanted a number above 0");
  expect_error({"train", "--seed", "-1"}, 2, "--seed: wanted a whole number of at least 0");
  expect_error({"train", "--threads", "0"}, 2, "--threads: wanted a whole number from 1 to 4096");
  expect_error({"predict", "-r", "x", "--input", "y", "--conf", "nan"}, 2, "--conf: wanted a number from 0 to 1");
  expect_error({"train", "-c", "tiny", "--imgsz", "97", "--data", "x"}, 2, "multiples of 32, got 97");
  for (const char* size : {"0", "64x", "64by96", "-64", "64x96x3", "1e3"}) expect_error({"train", "-c", "tiny", std::string("--imgsz=") + size, "--data", "x"}, 2, "wanted HxW");
  expect_error({"train", "-c", "tiny", "--time-limit", "soon"}, 2, "'soon' is no duration");
  expect_error({"train", "-c", "tiny", "--save-every", "2x"}, 2, "--save-every 2x");
  expect_error({"synth", "--out", "x", "--size", "12by12"}, 2, "--size 12by12");
  expect_error({"train", "--seed", "010"}, 2, "got '010'");   // ten or eight?
}

TEST_CASE("usage: flags that exclude each other, and wrong words", "[cpu]") {
  expect_error({"train", "-r", "auto", "-t", "w.safetensors"}, 2, "-r and -t exclude each other");
  expect_error({"train", "-r", "auto"}, 2, "-r auto needs --output-dir");
  expect_error({"train", "--data", "x"}, 2, "-c CONFIG is needed");
  expect_error({"eval", "--data", "x"}, 2, "-r WEIGHTS is needed");
  expect_error({"eval", "--from-json", "x"}, 2, "--from-json needs --gt");
  expect_error({"eval", "--from-json", "x", "--gt", "y", "-r", "z"}, 2, "excludes -r");
  expect_error({"train", "-c", "tiny", "--data", "x", "-d", "gpu"}, 2, "--device gpu");
  expect_error({"train", "--log-style", "pretty"}, 2, "--log-style");
  expect_error({"check-data"}, 2, "nothing to check");
  expect_error({"check-data", "--data", "x", "--decode", "some"}, 2, "--decode some");
}

TEST_CASE("usage: configuration keys", "[cpu]") {
  const TempDir dir;
  expect_error({"info", "config", "-c", "nonsense"}, 2, "no configuration 'nonsense'; built-in: tiny r18");
  expect_error({"info", "config", "-c", "tiny", "-u", "optimizer.learning_rate=1"}, 2, "unknown key 'optimizer.learning_rate' (-u); did you mean 'optimizer.lr'?");
  expect_error({"train", "-c", "tiny", "--data", "x", "optimizer.lrr=1"}, 2, "did you mean 'optimizer.lr'?");
  expect_error({"train", "-c", "tiny", "--data", "x", "-u", "optimizer.lrr=1", "epochs=3"}, 2, "unknown key 'optimizer.lrr'");   // -u counts beside bare keys
  expect_error({"info", "config", "-c", "tiny", "-u", "optimizer.lr"}, 2, "wanted KEY=VALUE");
  expect_error({"info", "config", "-c", "tiny", "-u", "optimizer.lr=fast"}, 2, "optimizer.lr");
  write_text(dir / "a.json", "{\"optimizer\": {\n  \"lrr\": 1}}");
  expect_error({"info", "config", "-c", (dir / "a.json").string()}, 2, "a.json:2");
  expect_error({"info", "keys", "zzz"}, 2, "the nearest is");
}

TEST_CASE("usage: _ and - are the same in long flags", "[cpu]") {
  const SmallData small;
  expect_error({"train", "--batch_size", "x"}, 2, "--batch-size: wanted");
  const ProcessResult result = expect_success({"train", "-c", "tiny", "-u", "RTDETRTransformerv2.num_queries=30", "--imgsz", "96", "--batch_size=2", "--data", small.data(),
                                               "--max_steps", "1", "--eval_every", "0", "--output_dir", small.path("run_1"), "--json"});
  CHECK(result.json().at("output_dir") == small.path("run_1"));   // in values they stay as they are
}

TEST_CASE("usage: data errors are exit 3", "[cpu]") {
  const TempDir dir;
  expect_error({"train", "-c", "tiny"}, 3, "no train data: --data DIR");
  expect_error({"train", "-c", "tiny", "--data", (dir / "none").string()}, 3, "no such folder");
  expect_error({"train", "-c", "tiny", "--data", dir.path().string()}, 3, "annotations/instances_train");
  expect_error({"check-data", "--data", dir.path().string()}, 3, "no annotation file");
  expect_error({"eval", "--gt", (dir / "a.json").string(), "--from-json", (dir / "b.json").string()}, 3, "a.json");
}

TEST_CASE("usage: weights and checkpoints are exit 7", "[cpu]") {
  const SmallData small;
  write_text(small.dir() / "text.safetensors", "this is no checkpoint");
  expect_error({"train", "-r", small.path("none.safetensors"), "--data", small.data()}, 7, "no such checkpoint");
  expect_error({"train", "-r", small.path("weights.pth"), "--data", small.data()}, 7, "a .pth is not read; -r takes a checkpoint that train has written");
  expect_error({"eval", "-r", small.path("text.safetensors"), "--data", small.data()}, 7, "text.safetensors");
  expect_error({"info", "ckpt", small.path("text.safetensors")}, 7, "no safetensors file");
  // A start that fails for want of weights leaves no folder behind, so the corrected command can use it.
  expect_error(small.train("run", {"-t", small.path("none.safetensors")}), 7, "no such file");
  CHECK(!fs::exists(small.dir() / "run"));
}

TEST_CASE("usage: a device that is not there is exit 8", "[cpu]") {
  const SmallData small;
  expect_error(small.train("run", {"-d", "cuda:99"}), 8, "cuda");
  expect_error({"info", "devices", "-d", "cuda:99"}, 8, "cuda");
}

TEST_CASE("usage: number formats and graphs", "[cpu]") {
  const SmallData small;
  expect_error(small.train("run", {"--amp", "fp16"}), 2, "--amp");
  expect_error(small.train("run", {"-d", "cpu", "--amp", "bf16"}), 2, "amp: bf16 needs a GPU");
  expect_error(small.train("run", {"-d", "cpu", "-u", "amp=half"}), 2, "amp");
  expect_error({"train", "--no-graphs"}, 2, "unknown flag --no-graphs; did you mean --no-graph?");
  expect_error({"eval", "-r", "x", "--data", "y", "--no-graph"}, 2, "unknown flag --no-graph");
  // On the CPU there is nothing to choose: the flags are taken, and the run has the bits of one without them.
  const std::vector<std::string> once = {"-d", "cpu", "--max-steps", "2", "--eval-every", "0", "--json"};
  const ProcessResult plain = expect_success(small.train("plain", once));
  const ProcessResult flagged = expect_success(small.train("flagged", once + std::vector<std::string>{"--amp", "off", "--no-graph"}));
  const ProcessResult automatic = expect_success(small.train("automatic", once + std::vector<std::string>{"--use-amp"}));
  for (const ProcessResult* result : {&flagged, &automatic}) CHECK(result->json().at("hash") == plain.json().at("hash"));
  CHECK(read_text(small.dir() / "plain" / "train.log").find(", f32, deterministic") != std::string::npos);
}

TEST_CASE("usage: the devices that are asked for", "[cpu]") {
  for (const char* bad : {"gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1000", "cpu:0", ""}) expect_error({"selftest", "-d", bad}, 2, concat("--device ", bad));
  CHECK(expect_success({"selftest", "-d", "cpu", "--ops", "^add$", "--json"}).json().at("ops").size() == 1);
  if (!list_gpus().empty()) SKIP("there is a CUDA device");
  for (const char* device : {"cuda", "cuda:0"}) {
    expect_error({"selftest", "-d", device}, 8, "cuda:0");
    expect_error({"info", "devices", "-d", device}, 8, "cuda:0");
  }
  CHECK(expect_success({"selftest", "-d", "auto", "--ops", "^add$", "--json"}).json().at("ops").size() == 1);   // auto: the CPU then
}

TEST_CASE("usage: --json is one object on stdout, in errors too", "[cpu]") {
  const auto error = [](const std::vector<std::string>& arguments, int code) {
    const ProcessResult result = detrtrain(arguments);
    CHECK(result.code == code);
    const nlohmann::json object = result.json();
    CHECK(object.at("error").is_string());
    REQUIRE(result.errors().size() == 1);
    CHECK((result.errors()[0] == "detrtrain: error: " + object.at("error").get<std::string>() || result.err.find('\xff') != std::string::npos));
  };
  error({"--json"}, 2);
  error({"trian", "--json"}, 2);
  error({"train", "--bogus", "--json"}, 2);
  error({"train", "--epochs", "x", "--json"}, 2);
  error({"train", "-c", "tiny", "--data", "/nonexistent", "--json"}, 3);
  error({"info", "ckpt", "/nonexistent", "--json"}, 7);
  error({"info", "ckpt", "/nonexistent\xff\n", "--json"}, 7);   // no UTF-8 (replaced in the json), and a line break
}

TEST_CASE("usage: help and version", "[cpu]") {
  CHECK(expect_success({"--version"}).out.starts_with("detrtrain "));
  CHECK(expect_success({"--help"}).out.find("check-data") != std::string::npos);
  for (const char* verb : {"train", "eval", "predict", "synth", "check-data", "info", "selftest"}) {
    CHECK(expect_success({verb, "--help"}).out.find("--json") != std::string::npos);
  }
}

}  // namespace
}  // namespace detr::test

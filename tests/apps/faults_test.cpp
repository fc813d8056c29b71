// Rehearsed failures that would hit nothing, what a failed job leaves in the output folder, and folders of runs that start at once.
#include <unistd.h>

#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "tests/apps/small_run.h"

namespace detr::test {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

ProcessResult with_fault(const Words& words, const std::string& fault) {
  return Detrtrain(words, Detrtrain::Streams::kept, {"", {{"DETRTRAIN_FAULT", fault}}, -1}).wait();
}

TEST_CASE("faults: one that would hit nothing ends the run before its first step", "[cpu]") {
  const SmallData small;
  const Words one = {"-d", "cpu", "--max-steps", "2", "--eval-every", "0"}, two = one + Words{"--ranks", "2"};
  for (const auto& [ranks, fault, text] :
       {std::tuple(1, "set:param=nope,index=0,value=nan", "there is no trainable parameter 'nope'; did you mean '"),
        std::tuple(2, "set:param=nope,index=0,value=nan,rank=1", "no trainable parameter 'nope'"),
        std::tuple(1, "set:param=decoder.dec_score_head.0.bias,index=3000,value=1", "the parameter has 3 values, 0 to 2"), std::tuple(1, "drop:param=^nope", "no trainable parameter"),
        std::tuple(2, "drop:param=^nope,rank=1", "no trainable parameter"), std::tuple(2, "manifest:field=nope,rank=1", "the manifest has no field 'nope'; did you mean '"),
        std::tuple(1, "manifest:field=/seed", "one rank has nobody"), std::tuple(2, "swap:a=0,b=77,rank=1", "slots, 0 to "), std::tuple(2, "short:slot=77,rank=1", "slots, 0 to ")}) {
    const ProcessResult result = with_fault(small.train("run", ranks == 1 ? one : two), fault);
    INFO(fault << ": " << result.err);
    CHECK(result.code == 2);
    REQUIRE(result.errors().size() == 1);
    CHECK(result.errors()[0].find(concat("DETRTRAIN_FAULT, '", fault, "': ")) != std::string::npos);
    CHECK(result.errors()[0].find(text) != std::string::npos);
    CHECK(!fs::exists(small.path("run")));
  }
  // What is there is hit.
  const ProcessResult result = with_fault(small.train("run", two), "manifest:field=/seed,rank=1;drop:param=decoder,rank=1;swap:a=0,b=1,step=5");
  INFO(result.err);
  CHECK(result.code == 6);
  CHECK(result.last_line().find("/seed") != std::string::npos);
}

TEST_CASE("faults: ranks that rehearse other failures than rank 0 disagree", "[cpu]") {
  const SmallData small;
  std::vector<std::unique_ptr<Detrtrain>> ranks;
  const std::string port = std::to_string(20000 + ::getpid() % 20000);
  for (const std::string rank : {"0", "1"}) {
    std::map<std::string, std::string> variables = {{"RANK", rank}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", rank}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}};
    if (rank == "1") variables["DETRTRAIN_FAULT"] = "sleep:ms=1";
    ranks.push_back(std::make_unique<Detrtrain>(small.train("run", {"-d", "cpu", "--max-steps", "2"}), Detrtrain::Streams::kept, Setting{"", variables, -1}));
  }
  for (const auto& rank : ranks) CHECK(rank->wait().code == 6);
  CHECK(ranks[0]->err().find("rank 1: rehearsed failures is sleep:ms=1, rank 0 has none") != std::string::npos);
}

TEST_CASE("faults: an output folder that is begun anew has no record of an older failure", "[cpu]") {
  const SmallData small;
  const Words two = {"-d", "cpu", "--ranks", "2", "--max-steps", "3", "--eval-every", "0"};
  CHECK(with_fault(small.train("run", two), "throw:rank=1,step=1,phase=backward").code == 1);
  CHECK(fs::exists(fs::path(small.path("run")) / "fault" / "collectives-rank1.json"));
  expect_success(small.train("run", two + Words{"--overwrite"}));
  CHECK(!fs::exists(fs::path(small.path("run")) / "fault"));
}

TEST_CASE("folders: runs that start at once get one each", "[cpu]") {
  const SmallData small;
  const TempDir dir;
  Setting shell;
  shell.program = "/bin/sh";
  std::vector<std::unique_ptr<Detrtrain>> runs;
  const std::string words = concat(DETRTRAIN_BINARY, " train -c tiny -u RTDETRTransformerv2.num_queries=30 --imgsz 96 --batch-size 2 --num-workers 1 --threads 1 -d cpu",
                                   " --max-steps 1 --eval-every 0 --json --data ", small.data());
  for (int i = 0; i < 5; ++i) runs.push_back(std::make_unique<Detrtrain>(Words{"-c", concat("cd ", dir.path().string(), " && exec ", words)}, Detrtrain::Streams::kept, shell));
  std::set<std::string> folders;
  for (const auto& run : runs) {
    const ProcessResult result = run->wait();
    INFO(result.err);
    CHECK(result.code == 0);
    folders.insert(result.json().at("output_dir").get<std::string>());
  }
  CHECK(folders == std::set<std::string>{"runs/tiny-001", "runs/tiny-002", "runs/tiny-003", "runs/tiny-004", "runs/tiny-005"});
}

TEST_CASE("test-only: train evaluates, as eval does", "[cpu]") {
  const SmallData small;
  expect_success(small.train("run", {"-d", "cpu", "--max-steps", "2"}));
  const std::string weights = small.path("run") + "/last.safetensors";
  const Words shared = {"-r", weights, "--data", small.data(), "--batch-size", "3", "-d", "cpu", "--json"};
  const ProcessResult eval = expect_success(Words{"eval"} + shared), train = expect_success(Words{"train", "--test-only"} + shared);
  CHECK(train.json().at("stats") == eval.json().at("stats"));
  CHECK(train.json().at("per_class") == eval.json().at("per_class"));
  expect_success({"train", "--test-only", "-r", "auto", "--output-dir", small.path("run"), "--data", small.data(), "-d", "cpu"});
  expect_error({"train", "--test-only", "--data", small.data()}, 2, "--test-only needs -r WEIGHTS; it is detrtrain eval");
  expect_error(Words{"train", "--test-only", "--epochs", "3"} + shared, 2, "--test-only is eval -r WEIGHTS, which has no --epochs");
  expect_error(Words{"train", "--test-only", "--ranks", "2"} + shared, 2, "which has no --ranks");
}

}  // namespace
}  // namespace detr::test

// Signals, locks and resume: stopping is invisible in the result.
#include <csignal>
#include <thread>

#include "tests/apps/small_run.h"

namespace detr::test {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

std::int64_t step_of(const fs::path& checkpoint) { return expect_success({"info", "ckpt", checkpoint.string(), "--json"}).json().at("step"); }

TEST_CASE("stop: interrupted and killed runs go on to the same bits", "[cpu][slow]") {
  const SmallData small;
  const Words flags = {"--epochs", "8", "--eval-every", "4"};
  expect_success(small.train("straight", flags));
  CHECK(step_of(small.dir() / "straight/last.safetensors") == 40);
  for (const int signal : {SIGINT, SIGUSR1, SIGKILL}) {
    const std::string run = concat("signal", signal);
    INFO(run);
    const fs::path last = small.dir() / run / "last.safetensors";
    {
      Detrtrain process(small.train(run, flags));
      process.wait_until([&] { return fs::exists(last); });
      process.send(signal);
      const ProcessResult result = process.wait();
      if (signal == SIGKILL) {
        CHECK(result.signal == SIGKILL);
      } else {
        CHECK(result.code == 75);
        CHECK(result.err.find("-r auto --output-dir " + small.path(run) + " goes on") != std::string::npos);
      }
    }
    const std::int64_t step = step_of(last);
    CHECK(step >= 5);
    CHECK(step < 40);
    const ProcessResult resumed = expect_success({"train", "-r", "auto", "--output-dir", small.path(run), "--data", small.data()});
    CHECK(resumed.err.find(concat("at step ", step)) != std::string::npos);
    expect_same_tensors(last, small.dir() / "straight/last.safetensors");
    expect_same_tensors(small.dir() / run / "best.safetensors", small.dir() / "straight/best.safetensors");
    CHECK(losses_of(small.dir() / run) == losses_of(small.dir() / "straight"));
  }
  // A finished run says so and changes nothing.
  const std::string before = read_text(small.dir() / "straight/last.safetensors");
  CHECK(expect_success({"train", "-r", "auto", "--output-dir", small.path("straight"), "--data", small.data()}).err.find("this run is finished") != std::string::npos);
  CHECK(read_text(small.dir() / "straight/last.safetensors") == before);
}

TEST_CASE("stop: a second signal ends it at once", "[cpu]") {
  const SmallData small;
  // A step of this size takes seconds.
  Detrtrain process({"train", "-c", "tiny", "--imgsz", "640", "--batch-size", "10", "--data", small.data(), "--output-dir", small.path("run"), "--eval-every", "0"});
  process.wait_until([&] { return read_text(small.dir() / "run/train.log").find(" augment ") != std::string::npos; });
  process.send(SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));   // else the kernel joins the two
  process.send(SIGTERM);
  CHECK(process.wait().code == 143);
  CHECK(!fs::exists(small.dir() / "run/last.safetensors"));
}

TEST_CASE("stop: the time limit saves", "[cpu]") {
  const SmallData small;
  const ProcessResult result = detrtrain(small.train("run", {"--epochs", "2000", "--eval-every", "0", "--time-limit", "0.3", "--json"}));
  CHECK(result.code == 75);
  CHECK(result.json().at("steps") >= 1);
  CHECK(step_of(small.dir() / "run/last.safetensors") == result.json().at("steps"));
}

TEST_CASE("stop: a folder in use is refused", "[cpu]") {
  const SmallData small;
  Detrtrain process(small.train("run", {"--epochs", "2000", "--eval-every", "0"}));
  const fs::path last = small.dir() / "run/last.safetensors";
  process.wait_until([&] { return fs::exists(last); });
  expect_error(small.train("run", {"--overwrite"}), 7, "is in use by a running job");
  const ProcessResult result = expect_error(small.train("run", {"-r", "auto"}), 7, "is in use by a running job");
  CHECK(result.err.find("warning: skipped") == std::string::npos);   // nothing in it was judged while it changes
  expect_success({"info", "ckpt", last.string()});   // a file that is replaced meanwhile is read to its end
  process.send(SIGINT);
  CHECK(process.wait().code == 75);
}

TEST_CASE("stop: resume refuses what does not fit", "[cpu]") {
  const SmallData small;
  const Words flags = {"--max-steps", "2", "--eval-every", "0"};
  expect_success(small.train("run", flags));
  const std::string last = small.path("run/last.safetensors");
  expect_error({"train", "-r", last, "--data", small.data(), "-u", "HybridEncoder.dim_feedforward=64", "--max-steps", "4"}, 7, "last.safetensors");
  // A cut-off file is named and not used; an older one that is whole is.
  const std::string text = read_text(last);
  write_text(last, text.substr(0, text.size() / 2));
  expect_error({"train", "-r", "auto", "--output-dir", small.path("run"), "--data", small.data(), "--max-steps", "4"}, 7, "no checkpoint can be used");
  expect_error({"train", "-r", last, "--data", small.data(), "--max-steps", "4"}, 7, "last.safetensors");
}

}  // namespace
}  // namespace detr::test

#include "train/golden.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/support.h"

using namespace detr;
using namespace detr::test;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

/// Numbers that the public PyTorch reference computed in float64, some of each case; the inputs are in train/golden_inputs.h.
fs::path recorded(const std::string& name) { return fs::path(DETR_SOURCE_DIR) / "tests" / "train" / "golden" / (name + ".json"); }

json read(const std::string& name) { return json::parse(read_text(recorded(name))); }

void expect_recorded(const std::string& name) {
  const train::GoldenReport report = train::run_golden(recorded(name), DType::f64, Stream::cpu(2));
  CHECK(report.name == name);
  for (const std::string& fault : report.faults) FAIL_CHECK(fault);
  for (const train::GoldenError& e : report.errors) {
    CAPTURE(e.kind, e.tensor, e.error);
    CHECK(e.error <= 1e-6);
  }
  CHECK(report.passed(1e-6));
  CHECK(report.errors.size() >= 2);
}

const train::GoldenError& error_of(const train::GoldenReport& report, const std::string& kind) {
  for (const train::GoldenError& e : report.errors) {
    if (e.kind == kind) return e;
  }
  throw CheckFailed("no errors of kind ", kind);
}

}  // namespace

TEST_CASE("golden: a training step", "[cpu][slow]") { expect_recorded("train_r18_two_images"); }
TEST_CASE("golden: one picture without boxes", "[cpu][slow]") { expect_recorded("train_r18_one_empty"); }
TEST_CASE("golden: three classes", "[cpu][slow]") { expect_recorded("train_r18_three_classes"); }
TEST_CASE("golden: discrete sampling", "[cpu][slow]") { expect_recorded("train_r18_discrete_sampling"); }
TEST_CASE("golden: evaluation", "[cpu][slow]") { expect_recorded("eval_r18"); }

TEST_CASE("golden: in f32 with the recorded selection", "[cpu][slow]") {
  const train::GoldenReport report = train::run_golden(recorded("train_r18_two_images"), DType::f32, Stream::cpu(2));
  CHECK(report.faults.empty());
  CHECK(error_of(report, "losses").error < 1e-3);
  CHECK(error_of(report, "losses").error > 1e-12);   // it is not the f64 run
}

TEST_CASE("golden: a changed number is found and named", "[cpu][slow]") {
  const TempDir dir;
  json file = read("train_r18_three_classes");
  const std::string gradient = "decoder.enc_output.proj.weight";
  file["losses"]["loss_giou_aux_1"] = file["losses"]["loss_giou_aux_1"].get<double>() * (1 + 1e-5);
  file["grads"][gradient]["v"][1] = file["grads"][gradient]["v"][1].get<double>() + 1e-5 * file["grads"][gradient]["max"].get<double>();
  file["grads"]["decoder.no_such.weight"] = file["grads"][gradient];
  file["running"]["encoder.no_such.running_mean"] = file["grads"][gradient];
  std::swap(file["topk_indices"][0][0], file["topk_indices"][0][1]);
  file["matches"]["value"][0][0][0][0] = file["matches"]["value"][0][0][0][0].get<std::int64_t>() + 1;
  file["n_params"] = 1;
  file.erase("partial");   // then all gradients must be listed
  file["frozen"] = {"decoder.enc_score_head.bias"};
  write_text(dir / "train_changed.json", file.dump());
  const train::GoldenReport report = train::run_golden(dir / "train_changed.json", DType::f64, Stream::cpu(2));
  CHECK_FALSE(report.passed(1e-6));
  CHECK(report.largest() > 1e-6);
  CHECK(error_of(report, "losses").error > 5e-6);
  CHECK(error_of(report, "losses").tensor == "loss_giou_aux_1");
  CHECK(error_of(report, "gradients").error > 5e-6);
  CHECK(error_of(report, "gradients").tensor == gradient);
  CHECK(error_of(report, "outputs").error < 1e-6);
  const std::string count = std::to_string(file["grads"].size() - 1) + " of the file's " + std::to_string(file["grads"].size()) + " gradients";
  for (const std::string& wanted : {std::string("another top-k selection"), std::string("matching 0 of image 0 differs"), count, std::string("no buffer encoder.no_such.running_mean"),
                                    std::string("decoder.enc_score_head.bias should be frozen"), std::string("parameters, wanted 1"),
                                    std::string("gradient of decoder.dec_bbox_head.2.layers.2.weight is not in the file")}) {
    const bool found = std::any_of(report.faults.begin(), report.faults.end(), [&](const std::string& fault) { return fault.find(wanted) != std::string::npos; });
    INFO(wanted);
    CHECK(found);
  }
}

TEST_CASE("golden: what is no recorded case is refused", "[cpu]") {
  const TempDir dir;
  const Stream stream = Stream::cpu(1);
  const auto refused = [&](const std::string& name, const std::string& text, const std::string& wanted) {
    write_text(dir / name, text);
    expect_throws<DataError>([&] { train::run_golden(dir / name, DType::f64, stream); }, wanted);
  };
  json file = read("eval_r18");
  file["options"]["colour"] = 1;
  refused("eval_option.json", file.dump(), "eval_option.json: unknown option 'colour'");
  file = read("eval_r18");
  file["variant"] = "r19";
  refused("eval_variant.json", file.dump(), "unknown variant 'r19'");
  refused("train_broken.json", "{\"variant\": ", "train_broken.json: not a recorded case: ");
  refused("train_empty.json", "{}", "not a recorded case: ");
  refused("other.json", "{}", "the name must begin with train_, eval_ or optim_");
  expect_throws<DataError>([&] { train::run_golden(dir / "train_none.json", DType::f64, stream); }, "train_none.json: cannot be read");

  CHECK(train::golden_files(dir.path()).size() == 4);
  CHECK(train::golden_files(dir.path()).front() == dir / "eval_option.json");
  expect_throws<DataError>([&] { train::golden_files(dir / "none"); }, "none: no such folder");
  fs::create_directories(dir / "empty");
  expect_throws<DataError>([&] { train::golden_files(dir / "empty"); }, "no train_*.json, eval_*.json or optim_*.json");
}

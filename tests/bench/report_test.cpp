#include "bench/report.h"

#include <sys/wait.h>

#include <cstdlib>

#include "bench/compare.h"
#include "tests/support.h"

using namespace detr;
using namespace detr::bench;

namespace {

Record record_of(const std::string& op, double ms) {
  Record record;
  record.c = {.op = op, .variant = "v", .shape = {{"N", 2}, {"D", 8}}};
  record.c.cost = kernel_cost(790e9, 4.3e6);   // 2 ms
  record.cold = {ms, ms - 1, ms + 1};
  record.warm_ms = ms / 2;
  record.runs = 100;
  record.check.ok = true;
  return record;
}

RunContext run_of(double copy_gb_s) {
  RunContext run;
  run.machine.device = "gpu";
  run.before.copy_gb_s = copy_gb_s;
  return run;
}

std::string text_of(const std::vector<Record>& records, double copy_gb_s = 4300) {
  std::string text;
  for (const Record& record : records) text += json_line(record, run_of(copy_gb_s)) + "\n";
  return text;
}

bool tells(const Comparison& comparison, const std::string& part) {
  for (const std::string& line : comparison.lines) {
    if (line.find(part) != std::string::npos) return true;
  }
  return false;
}

TEST_CASE("bench report: drift is the larger change of the two yardsticks", "[cpu]") {
  test::expect_close(drift({4000, 700}, {3900, 707}), 0.025, 1e-9);
  test::expect_close(drift({4000, 700}, {4000, 672}), 0.04, 1e-9);
}

TEST_CASE("bench report: a line has the figures", "[cpu]") {
  const std::string line = table_line(record_of("op", 4));
  INFO(line);
  for (const char* part : {"op", "v N=2 D=8", "bf16", "4.0000", "3.0000", "5.0000", "395.0", "50.0", "ok"}) CHECK(line.find(part) != std::string::npos);
  Record failed = record_of("op", 4);
  failed.check = {false, -1, "two runs differ"};
  CHECK(table_line(failed).find("FAIL: two runs differ") != std::string::npos);
  failed.cold = {};
  CHECK(table_line(failed).find("FAIL: two runs differ") != std::string::npos);
}

TEST_CASE("bench report: JSON", "[cpu]") {
  const std::string line = json_line(record_of("op", 4), run_of(4300));
  INFO(line);
  for (const char* part : {R"("op":"op")", R"("shape":{"N":2,"D":8})", R"("ms":4.0)", R"("floor_share":0.5)", R"("tflop_s":395.0)",
                          R"("peer":null)", R"("max_error":null)", R"("ok":true)", R"("device":"gpu")"})
    CHECK(line.find(part) != std::string::npos);
  Record peered = record_of("assign", 1);
  peered.c.variant = "";
  peered.c.shape = {{"N", 448}, {"Q", 300}, {"G", 100}};
  CHECK(json_line(peered, run_of(1)).find(R"("peer":{"name":"torch-linear-assignment","kind":"m","ms":39.8},"ratio":39.8)") != std::string::npos);
}

TEST_CASE("bench compare: more than three percent slower fails", "[cpu]") {
  const std::string before = text_of({record_of("a", 100), record_of("b", 100)});
  const Comparison good = compare_runs(before, text_of({record_of("a", 102.9), record_of("b", 50)}));
  CHECK(good.passed());
  CHECK(good.compared == 2);
  const Comparison bad = compare_runs(before, text_of({record_of("a", 103.1), record_of("b", 50)}));
  CHECK(!bad.passed());
  CHECK(bad.slower == 1);
  CHECK(tells(bad, "SLOWER"));
}

TEST_CASE("bench compare: wrong, missing and new cases", "[cpu]") {
  Record wrong = record_of("a", 100);
  wrong.check.ok = false;
  CHECK(!compare_runs(text_of({record_of("a", 100)}), text_of({wrong})).passed());
  const Comparison other = compare_runs(text_of({record_of("a", 1), record_of("b", 1)}), text_of({record_of("a", 1), record_of("c", 1)}));
  CHECK(other.passed());
  CHECK(tells(other, "only in the old run"));
  CHECK(tells(other, "only in the new run"));
  CHECK(tells(compare_runs(text_of({record_of("a", 1)}, 4300), text_of({record_of("a", 1)}, 4000)), "a copy ran at"));
  test::expect_throws<DataError>([] { compare_runs(text_of({record_of("a", 1)}), text_of({record_of("b", 1)})); }, "in common");
  test::expect_throws<DataError>([] { compare_runs(text_of({record_of("a", 1)}), "{\"op\": 3}\n"); }, "line 1 of the new run");
  test::expect_throws<DataError>([] { compare_runs("no json\n", text_of({record_of("a", 1)})); }, "line 1 of the old run");
}

TEST_CASE("bench compare: two files of a run", "[cpu]") {
  const test::TempDir dir;
  const auto compare = [&](const std::string& arguments) {
    const int status = std::system(concat("cd ", dir.path().string(), " && ", BENCH_COMPARE_BINARY, " ", arguments, " >out 2>&1").c_str());
    return std::pair(WIFEXITED(status) ? WEXITSTATUS(status) : -1, test::read_text(dir / "out"));
  };
  const auto ends_with = [](const std::pair<int, std::string>& result, int code, const std::string& text) {
    INFO(result.second);
    return result.first == code && result.second.ends_with(text + "\n");
  };
  Record wrong = record_of("b", 10);
  wrong.check = {false, -1, "two runs differ"};
  test::write_text(dir / "old.json", text_of({record_of("a", 100), record_of("b", 10)}));
  test::write_text(dir / "same.json", text_of({record_of("a", 102), record_of("b", 10)}));
  test::write_text(dir / "slower.json", text_of({record_of("a", 104), record_of("b", 10)}));
  test::write_text(dir / "wrong.json", text_of({record_of("a", 100), wrong}));
  test::write_text(dir / "cut.json", text_of({record_of("a", 100)}).substr(0, 40));
  CHECK(ends_with(compare("old.json same.json"), 0, "2 compared, 0 slower, 0 wrong"));
  CHECK(ends_with(compare("old.json slower.json"), 9, "2 compared, 1 slower, 0 wrong"));
  CHECK(ends_with(compare("old.json wrong.json"), 9, "2 compared, 0 slower, 1 wrong"));
  CHECK(compare("old.json cut.json").first == 3);
  CHECK(ends_with(compare("old.json missing.json"), 3, "cannot read missing.json"));
  CHECK(compare("old.json").first == 2);
}

}  // namespace

// bench_compare OLD NEW: fails where a case of NEW is more than 3 % slower than in OLD, or wrong.
#include <cstdio>
#include <exception>
#include <fstream>
#include <sstream>

#include "bench/compare.h"
#include "runtime/error.h"

namespace {

std::string read_text(const char* file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) throw detr::DataError("cannot read ", file);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: bench_compare OLD NEW (files of detr_bench --json)\n");
    return 2;
  }
  try {
    const detr::bench::Comparison result = detr::bench::compare_runs(read_text(argv[1]), read_text(argv[2]));
    for (const std::string& line : result.lines) std::puts(line.c_str());
    std::printf("%d compared, %d slower, %d wrong\n", result.compared, result.slower, result.wrong);
    return result.passed() ? 0 : 9;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_compare: %s\n", error.what());
    return 3;
  }
}

// Who may include what: the table of folders that this tree is built on.
#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>

#include "tests/support.h"

namespace detr {
namespace {

namespace fs = std::filesystem;

/// The folders of this tree that the files of a folder may include, besides their own.
const std::map<std::string, std::set<std::string>> kAllowed = {
    {"runtime", {}},
    {"kernels", {"runtime"}},
    {"autograd", {"runtime", "kernels"}},
    {"models", {"runtime", "kernels", "autograd"}},
    {"data", {"runtime"}},
    {"dist", {"runtime"}},
    {"train", {"runtime", "kernels", "autograd", "models", "data", "dist"}},
    {"apps", {"runtime", "kernels", "autograd", "models", "data", "dist", "train"}},
    {"bench", {"runtime", "kernels", "autograd", "models", "data", "dist", "train", "apps", "tests"}},
    {"tests", {"runtime", "kernels", "autograd", "models", "data", "dist", "train", "apps", "bench"}},
};

bool is_below(const fs::path& file, const std::string& folder) {
  return std::any_of(file.begin(), file.end(), [&](const fs::path& part) { return part == folder; });
}

bool starts_with_any(const std::string& text, std::initializer_list<const char*> starts) {
  return std::any_of(starts.begin(), starts.end(), [&](const char* start) { return text.starts_with(start); });
}

/// What is wrong with one include of a file (a path from the root of the tree); empty if nothing is.
std::string fault(const fs::path& file, const std::string& included, bool quoted) {
  const std::string from = file.begin()->string();
  if (quoted) {
    const std::string to = fs::path(included).begin()->string();
    if (!kAllowed.contains(to)) return concat(file.string(), ": \"", included, "\" is no path from the root of the tree");
    if (to != from && !kAllowed.at(from).contains(to)) return concat(file.string(), ": ", from, " may not include ", to, " (", included, ")");
    const bool inner = is_below(included, "cpu") || is_below(included, "cuda");
    if (to == "kernels" && inner && from != "kernels" && from != "tests" && from != "bench") return concat(file.string(), ": ", included, " is the inside of kernels");
    return {};
  }
  if (starts_with_any(included, {"cuda", "cublas", "cudnn", "nccl", "cub/", "thrust/", "cooperative_groups", "nvtx", "nvToolsExt"}) && !is_below(file, "cuda") && !is_below(file, "nccl"))
    return concat(file.string(), ": <", included, "> belongs under a folder cuda or nccl");
  if (starts_with_any(included, {"Eigen/", "unsupported/Eigen"}) && !(file.parent_path() == "kernels/cpu" && file.extension() == ".cpp"))
    return concat(file.string(), ": <", included, "> belongs in kernels/cpu/*.cpp");
  if (starts_with_any(included, {"gloo/"}) && !is_below(file, "gloo")) return concat(file.string(), ": <", included, "> belongs under a folder gloo");
  if (starts_with_any(included, {"catch2/"}) && file != "tests/catch.h") return concat(file.string(), ": <", included, "> comes by tests/catch.h");
  return {};
}

/// The faults of a source text.
std::vector<std::string> faults(const fs::path& file, const std::string& text) {
  std::vector<std::string> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    char hash = 0;
    std::string directive;
    if (!(words >> hash) || hash != '#' || !(words >> directive) || !directive.starts_with("include")) continue;
    const std::size_t begin = line.find_first_of("\"<"), end = line.find_first_of("\">", begin + 1);
    if (begin == std::string::npos || end == std::string::npos) continue;
    const std::string one = fault(file, line.substr(begin + 1, end - begin - 1), line[begin] == '"');
    if (!one.empty()) found.push_back(one);
  }
  return found;
}

TEST_CASE("includes: the tree keeps to its table", "[cpu]") {
  const fs::path root = DETR_SOURCE_DIR;
  std::size_t files = 0;
  for (const auto& [folder, allowed] : kAllowed) {
    if (!fs::is_directory(root / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      const fs::path ending = entry.path().extension();
      if (ending != ".h" && ending != ".cpp" && ending != ".cu" && ending != ".cuh") continue;
      ++files;
      for (const std::string& one : faults(entry.path().lexically_relative(root), test::read_text(entry.path()))) FAIL_CHECK(one);
    }
  }
  CHECK(files > 100);
}

TEST_CASE("includes: what the table does not have is found", "[cpu]") {
  const auto count = [](const char* file, const std::string& text) { return faults(file, text).size(); };
  CHECK(count("runtime/a.cpp", "#include \"runtime/b.h\"\n#include <vector>\n") == 0);
  CHECK(count("runtime/a.cpp", "#include \"kernels/b.h\"\n") == 1);
  CHECK(count("data/a.h", "#include \"runtime/b.h\"\n#include \"autograd/b.h\"\n#include \"train/c.h\"\n") == 2);
  CHECK(count("dist/a.h", "#include \"data/b.h\"\n") == 1);
  CHECK(count("kernels/conv2d.h", "  #  include \"autograd/b.h\"   // why\n") == 1);
  CHECK(count("models/detr/a.cpp", "#include \"data/b.h\"\n") == 1);
  CHECK(count("train/a.cpp", "#include \"apps/b.h\"\n#include \"tests/support.h\"\n") == 2);
  CHECK(count("apps/a.cpp", "#include \"train/b.h\"\n#include \"data/b.h\"\n") == 0);
  CHECK(count("apps/a.cpp", "#include \"b.h\"\n") == 1);          // not from the root
  CHECK(count("apps/a.cpp", "#include \"../train/b.h\"\n") == 1);
  CHECK(count("autograd/a.cpp", "#include \"kernels/cpu/exp.h\"\n") == 1);
  CHECK(count("tests/kernels/a.cpp", "#include \"kernels/cpu/exp.h\"\n") == 0);
  CHECK(count("runtime/stream.h", "#include <cuda_runtime.h>\n") == 1);
  CHECK(count("runtime/cuda/stream.h", "#include <cuda_runtime.h>\n") == 0);
  CHECK(count("dist/nccl/a.h", "#include <nccl.h>\n") == 0);
  CHECK(count("dist/a.h", "#include <nccl.h>\n#include <gloo/context.h>\n") == 2);
  CHECK(count("kernels/cpu/gemm.cpp", "#include <Eigen/Core>\n") == 0);
  CHECK(count("kernels/cpu/gemm.h", "#include <Eigen/Core>\n") == 1);
  CHECK(count("train/a.cpp", "#include <Eigen/Core>\n") == 1);
  CHECK(count("tests/a.cpp", "#include <catch2/catch.hpp>\n") == 1);
  CHECK(count("runtime/a.cpp", "// #include is a word of this text\nint x;\n") == 0);
}

}  // namespace
}  // namespace detr

#include "tests/support.h"

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>

namespace detr::test {

namespace fs = std::filesystem;

fs::path shared_folder() {
  static const fs::path found = [] {
    const char* set = std::getenv("DETR_SHARED");
    const fs::path folder = set ? fs::path(set) : fs::path(DETR_SOURCE_DIR).parent_path() / "shared";
    if (fs::is_directory(folder)) return folder;
    std::cerr << "no folder " << folder << ": cases on real pictures and on recorded results are skipped; DETR_SHARED names a folder "
              << "with data/{bccd,coco-tiny,awkward,awkward-images} and golden/\n";
    return fs::path();
  }();
  return found;
}

fs::path shared_data() {
  const fs::path folder = shared_folder();
  return folder.empty() || !fs::is_directory(folder / "data") ? fs::path() : folder / "data";
}

TempDir::TempDir() {
  static std::atomic<int> counter{0};
  path_ = fs::temp_directory_path() / concat("detrtrain-test-", getpid(), "-", counter++);
  fs::create_directories(path_);
}

TempDir::~TempDir() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void write_text(const fs::path& file, const std::string& text) {
  if (file.has_parent_path()) fs::create_directories(file.parent_path());
  std::ofstream(file, std::ios::binary) << text;
}

std::string read_text(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}

void expect_close(double a, double b, double rtol, double atol) {
  INFO("got " << a << ", wanted " << b);
  CHECK((a == b || std::abs(a - b) <= atol + rtol * std::abs(b)));
}

std::vector<double> values_of(const Tensor& tensor) {
  std::vector<double> values(static_cast<std::size_t>(tensor.numel()));
  const auto copy = [&](auto span) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(span[i]);
  };
  switch (tensor.dtype()) {
    case DType::f32: copy(tensor.span<float>()); break;
    case DType::f64: copy(tensor.span<double>()); break;
    case DType::i64: copy(tensor.span<std::int64_t>()); break;
    case DType::u8: copy(tensor.span<std::uint8_t>()); break;
    default: throw InvalidArgument("values_of: ", tensor);
  }
  return values;
}

void expect_close(const Tensor& a, const Tensor& b, double rtol, double atol) {
  REQUIRE(a.shape() == b.shape());
  const std::vector<double> x = values_of(a), y = values_of(b);
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i] || std::abs(x[i] - y[i]) <= atol + rtol * std::abs(y[i])) continue;
    FAIL_CHECK("element " << i << " of " << a.shape() << ": got " << x[i] << ", wanted " << y[i]);
    return;
  }
}

void expect_same_bits(const Tensor& a, const Tensor& b) {
  REQUIRE(a.shape() == b.shape());
  REQUIRE(a.dtype() == b.dtype());
  CHECK((a.bytes() == 0 || std::memcmp(a.raw(), b.raw(), static_cast<std::size_t>(a.bytes())) == 0));
}

}  // namespace detr::test

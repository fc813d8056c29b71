#pragma once
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "runtime/error.h"
#include "runtime/tensor.h"
#include "tests/catch.h"

namespace detr::test {

/// The folder with real images and annotations beside a developer's checkout (environment variable DETR_SHARED, else
/// ../shared next to the source tree); empty where it is absent.
std::filesystem::path shared_folder();
/// shared_folder() / "data", or empty.
std::filesystem::path shared_data();

/// A fresh folder that is removed with the object.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

/// Writes text to a file, making its folder.
void write_text(const std::filesystem::path& file, const std::string& text);
std::string read_text(const std::filesystem::path& file);

/// Fails the test unless `call` throws an E whose text contains `text`.
template <class E>
void expect_throws(const std::function<void()>& call, const std::string& text) {
  try {
    call();
  } catch (const E& error) {
    INFO("text: " << error.what() << "\nwanted: " << text);
    CHECK(std::string(error.what()).find(text) != std::string::npos);
    return;
  } catch (const std::exception& error) {
    FAIL_CHECK("another type was thrown: " << error.what());
    return;
  }
  FAIL_CHECK("nothing was thrown; wanted: " << text);
}

/// |a - b| <= atol + rtol * |b|, and both finite or equal.
void expect_close(double a, double b, double rtol, double atol = 0);
/// Every element of two f32 or f64 tensors of one shape.
void expect_close(const Tensor& a, const Tensor& b, double rtol, double atol = 0);
/// Same shape, dtype and bytes.
void expect_same_bits(const Tensor& a, const Tensor& b);
/// All elements as doubles (f32, f64, i64, u8).
std::vector<double> values_of(const Tensor& tensor);

}  // namespace detr::test

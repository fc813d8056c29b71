// The layout of the gradient buffer and its buckets.
#include "dist/layout.h"

#include "tests/support.h"

namespace detr::dist {
namespace {

TEST_CASE("layout: in the order given, multiples of 256 bytes, closed at the caps", "[cpu]") {
  // In bytes: a 4 -> 256, b 1200 -> 1280, c 256 -> 256, d 24 -> 256.
  const Layout layout = make_layout({{"a", DType::f32, {}}, {"b", DType::f32, {300}}, {"c", DType::f32, {64}}, {"d", DType::f32, {2, 3}}}, {256, 1536});
  CHECK(layout.offsets == std::vector<std::int64_t>{0, 64, 64 + 320, 64 + 320 + 64});
  CHECK(layout.total == 64 + 320 + 64 + 64);
  REQUIRE(layout.buckets.size() == 3);
  CHECK(layout.buckets[0].parameters == std::vector<int>{0});
  CHECK(layout.buckets[1].parameters == std::vector<int>{1, 2});   // exactly the cap closes
  CHECK(layout.buckets[2].parameters == std::vector<int>{3});
  CHECK(layout.bucket_of == std::vector<int>{0, 1, 1, 2});
  std::int64_t end = 0;
  for (const Bucket& bucket : layout.buckets) {
    CHECK(bucket.begin == end);
    end = bucket.end;
  }
  CHECK(end == layout.total);
}

TEST_CASE("layout: other element sizes, a parameter above the cap, and none at all", "[cpu]") {
  const Layout wide = make_layout({{"a", DType::f64, {1}}, {"b", DType::f64, {33}}});
  CHECK(wide.offsets == std::vector<std::int64_t>{0, 32});
  CHECK(wide.total == 96);
  const Layout narrow = make_layout({{"a", DType::bf16, {1}}, {"b", DType::bf16, {129}}});
  CHECK(narrow.offsets == std::vector<std::int64_t>{0, 128});
  CHECK(narrow.total == 384);
  const Layout large = make_layout({{"a", DType::f32, {1000}}, {"b", DType::f32, {1000}}}, {4, 4});
  CHECK(large.buckets.size() == 2);
  CHECK(make_layout({}).buckets.empty());
  CHECK(make_layout({}).total == 0);
}

TEST_CASE("layout: errors", "[cpu]") {
  const auto expect = [](std::vector<ParameterSpec> parameters, BucketCaps caps, const std::string& text) {
    detr::test::expect_throws<InvalidArgument>([&] { make_layout(std::move(parameters), caps); }, text);
  };
  expect({{"a", DType::f32, {1}}, {"a", DType::f32, {2}}}, {}, "two parameters named a");
  expect({{"a", DType::f32, {1}}, {"b", DType::f64, {2}}}, {}, "b is f64, the others f32");
  expect({{"a", DType::i64, {1}}}, {}, "a is i64");
  expect({{"a", DType::f32, {1}}}, {0, 1}, "caps must be positive");
}

}  // namespace
}  // namespace detr::dist

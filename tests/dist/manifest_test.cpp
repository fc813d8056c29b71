// What the ranks must agree on before they exchange a gradient.
#include "dist/manifest.h"

#include "tests/dist/ranks.h"
#include "tests/support.h"

namespace detr::dist {
namespace {

Manifest manifest_of(const std::string& seed, std::vector<ParameterSpec> parameters, const BucketCaps& caps = {}) {
  Manifest manifest;
  manifest.add("seed", seed);
  manifest.add(make_layout(std::move(parameters), caps));
  return manifest;
}

const std::vector<ParameterSpec> kTwo = {{"neck.weight", DType::f32, {256, 1, 1, 256}}, {"head.bias", DType::f32, {80}}};

TEST_CASE("manifest: the first difference as text", "[cpu]") {
  const Manifest reference = manifest_of("7", kTwo);
  const auto difference = [&](const Manifest& manifest) { return first_difference(manifest, 2, reference, 0); };
  CHECK(difference(manifest_of("7", kTwo)).empty());
  CHECK(difference(manifest_of("8", kTwo)) == "rank 2: seed is 8, rank 0 has 7");
  CHECK(difference(manifest_of("7", {{"neck.weight", DType::f32, {256, 1, 1, 384}}, kTwo[1]})) == "rank 2: parameter 0 neck.weight is (256, 1, 1, 384), rank 0 has (256, 1, 1, 256)");
  CHECK(difference(manifest_of("7", {kTwo[1], kTwo[0]})) == "rank 2: has parameter 0 head.bias where rank 0 has parameter 0 neck.weight");
  CHECK(difference(manifest_of("7", {kTwo[0]})) == "rank 2: has bucket 0 where rank 0 has parameter 1 head.bias");
  CHECK(difference(manifest_of("7", {{"neck.weight", DType::f64, {256, 1, 1, 256}}, {"head.bias", DType::f64, {80}}})) == "rank 2: gradient dtype is f64, rank 0 has f32");
  CHECK(difference(manifest_of("7", kTwo, {4, 4})) == "rank 2: bucket 0 is elements 0 to 65536, parameters 0 to 0, rank 0 has elements 0 to 65664, parameters 0 to 1");
  Manifest shorter;
  shorter.add("seed", "7");
  CHECK(difference(shorter) == "rank 2: there is no gradient dtype, rank 0 has f32");
  CHECK(first_difference(reference, 0, shorter, 3) == "rank 0: gradient dtype is f32, rank 3 has none");
}

TEST_CASE("manifest: bytes and back", "[cpu]") {
  Manifest manifest = manifest_of("7", kTwo);
  manifest.add("a\tname\n", "a\nvalue\t");
  manifest.add("", "");
  CHECK(Manifest::parse(manifest.bytes()).entries() == manifest.entries());
  CHECK(manifest.bytes() == manifest.bytes());
  CHECK(Manifest::parse("").entries().empty());
  for (const char* bad : {"name", "name\tvalue", "name\n", "a\tb\nc\n", "\n"}) {
    INFO(bad);
    CHECK_THROWS_AS(Manifest::parse(bad), CommError);
  }
}

TEST_CASE("manifest: a difference is the same error on every rank", "[cpu]") {
  const auto run = [](int odd) {
    return test::run_ranks(4, [&](const Meeting& meeting) {
      expect_equal_manifests(*test::meet(meeting), manifest_of(meeting.rank == odd ? "8" : "7", kTwo), Clock::now() + Milliseconds(10000));
    });
  };
  for (const std::string& text : run(4)) CHECK(text.empty());
  for (const std::string& text : run(2)) CHECK(text == "rank 2: seed is 8, rank 0 has 7");
  for (const std::string& text : run(0)) CHECK(text == "rank 1: seed is 7, rank 0 has 8");
}

}  // namespace
}  // namespace detr::dist

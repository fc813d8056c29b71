#include "runtime/safetensors.h"

#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/support.h"

using namespace detr;
using namespace detr::test;
namespace fs = std::filesystem;

namespace {

/// A file with this header text and data; the length in front is the header's unless given.
std::string file_of(const std::string& header, const std::string& data = "", std::int64_t length = -1) {
  const std::uint64_t n = length < 0 ? header.size() : static_cast<std::uint64_t>(length);
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &n, 8);
  return bytes + header + data;
}

/// "name":{...} of a header.
std::string entry(const std::string& name, const std::string& dtype, const std::string& shape, std::int64_t begin, std::int64_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}

const std::string kVectorHeader = "{\"__metadata__\":{\"format\":\"pt\"},\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}   ";

std::string vector_file() {
  std::string data(8, '\0');
  const float values[] = {1, -2};
  std::memcpy(data.data(), values, 8);
  return file_of(kVectorHeader, data);
}

void expect_refused(const std::string& bytes, const std::string& text) {
  const TempDir dir;
  write_text(dir / "bad.safetensors", bytes);
  expect_throws<StorageError>([&] { SafetensorsFile(dir / "bad.safetensors"); }, text);
}

}  // namespace

TEST_CASE("safetensors: a file of 104 bytes", "[cpu]") {
  const TempDir dir;
  const std::string bytes = vector_file();
  REQUIRE(bytes.size() == 104);
  REQUIRE(bytes[0] == 0x58);
  write_text(dir / "a.safetensors", bytes);
  const SafetensorsFile file(dir / "a.safetensors");
  CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}});
  CHECK(file.names() == std::vector<std::string>{"b"});
  CHECK(file.contains("b"));
  CHECK_FALSE(file.contains("a"));
  CHECK(file.shape("b") == Shape{2});
  CHECK(values_of(file.read("b")) == std::vector<double>{1, -2});
  file.verify();   // has no hashes: nothing to compare
  expect_throws<StorageError>([&] { file.read("a"); }, "a.safetensors: no tensor a");
  expect_throws<StorageError>([&] { file.shape("a"); }, "a.safetensors: no tensor a");
}

TEST_CASE("safetensors: every type goes out and in", "[cpu]") {
  const TempDir dir;
  const Tensor f32 = host_tensor<float>({2, 3}, {1, -2, std::numeric_limits<float>::infinity(), 1e-45f, 0, -0.0f});
  const Tensor f64 = host_tensor<double>({1}, {1.0 / 3}), i64 = host_tensor<std::int64_t>({}, {std::numeric_limits<std::int64_t>::min()});
  const Tensor u8 = host_tensor<std::uint8_t>({3}, {0, 7, 255}), none = host_zeros({0, 4}, DType::f32);
  Tensor bf16 = host_zeros({2}, DType::bf16);
  bf16.data<BFloat16>()[0].bits = 0x3f80;
  bf16.data<BFloat16>()[1].bits = 0xc040;
  const std::vector<NamedTensor> tensors = {{"z", u8}, {"f32", f32}, {"f64", f64}, {"i64", i64}, {"none", none}, {"bf16", bf16}, {"view", f32.slice(1, 2)}};
  write_safetensors(dir / "a.safetensors", tensors, {{"note", "caf\xc3\xa9 \"x\""}});
  const SafetensorsFile file(dir / "a.safetensors");
  CHECK(file.metadata().at("format") == "pt");
  CHECK(file.metadata().at("note") == "caf\xc3\xa9 \"x\"");
  CHECK(file.names().size() == 7);
  expect_same_bits(file.read("f32"), f32);
  expect_same_bits(file.read("f64"), f64);
  expect_same_bits(file.read("i64"), i64);
  expect_same_bits(file.read("z"), u8);
  expect_same_bits(file.read("none"), none);
  expect_same_bits(file.read("view"), f32.slice(1, 2));
  CHECK(values_of(file.read("bf16")) == std::vector<double>{1, -3});   // widened
  file.verify();

  // Header padded to 8 bytes; data by falling element size, then name; the same input gives the same bytes.
  const std::string bytes = read_text(dir / "a.safetensors");
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  CHECK(length % 8 == 0);
  double first = 0;
  std::memcpy(&first, bytes.data() + 8 + length, 8);
  CHECK(first == 1.0 / 3);
  CHECK(static_cast<unsigned char>(bytes.back()) == 255);
  write_safetensors(dir / "b.safetensors", tensors, {{"note", "caf\xc3\xa9 \"x\""}});
  CHECK(read_text(dir / "b.safetensors") == bytes);
}

TEST_CASE("safetensors: types that only others write", "[cpu]") {
  const TempDir dir;
  std::string data;
  for (const std::int32_t v : {-5, 2147483647}) data.append(reinterpret_cast<const char*>(&v), 4);
  for (const std::uint16_t v : std::vector<std::uint16_t>{0x3c00, 0xc100, 0x0001, 0x7c00, 0xfc00, 0x7bff}) data.append(reinterpret_cast<const char*>(&v), 2);   // 1, -2.5, 2^-24, inf, -inf, 65504
  data += std::string("\x01\x00", 2) + "ab";
  write_text(dir / "a.safetensors", file_of("{" + entry("i32", "I32", "[2]", 0, 8) + "," + entry("f16", "F16", "[6]", 8, 20) + "," + entry("bool", "BOOL", "[2]", 20, 22) + "," +
                                                        entry("i8", "I8", "[2]", 22, 24) + "}", data));
  const SafetensorsFile file(dir / "a.safetensors");
  CHECK(values_of(file.read("i32")) == std::vector<double>{-5, 2147483647});
  const double inf = std::numeric_limits<double>::infinity();
  CHECK(values_of(file.read("f16")) == std::vector<double>{1, -2.5, std::ldexp(1.0, -24), inf, -inf, 65504});
  CHECK(values_of(file.read("bool")) == std::vector<double>{1, 0});
  expect_throws<StorageError>([&] { file.read("i8"); }, "tensor i8 has dtype I8, which nothing here uses");
}

TEST_CASE("safetensors: torn files", "[cpu]") {
  const std::string whole = vector_file();
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CAPTURE(size);
    expect_refused(whole.substr(0, size), "bad.safetensors: ");
  }
  expect_refused(whole + "x", "1 bytes after the last tensor");
  expect_throws<StorageError>([] { SafetensorsFile("no-such-folder/none.safetensors"); }, "none.safetensors: ");
  const TempDir dir;
  REQUIRE(::mkfifo((dir / "pipe").c_str(), 0600) == 0);   // and nobody waits for a writer
  expect_throws<StorageError>([&] { SafetensorsFile(dir / "pipe"); }, "pipe: is not a regular file");
}

TEST_CASE("safetensors: faults of the header", "[cpu]") {
  const std::string four(4, '\0'), eight(8, '\0'), twelve(12, '\0');
  expect_refused(file_of("{", eight, std::numeric_limits<std::int64_t>::max()), "bad.safetensors: ");
  expect_refused(std::string(8, '\xff') + "{}", "bad.safetensors: ");
  expect_refused(file_of("{}", "", 3), "bad.safetensors: ");
  expect_refused(file_of("{" + std::string(17 << 20, ' ') + "}"), "bad.safetensors: ");   // more than 16 MiB
  expect_refused(file_of("[]"), "bad.safetensors: ");
  expect_refused(file_of(" {}"), "bad.safetensors: ");
  expect_refused(file_of("{\"a\":"), "bad.safetensors: ");
  expect_refused(file_of("{\"a\":1}"), "bad.safetensors: ");
  expect_refused(file_of("{\"a\":{}}"), "bad.safetensors: ");
  expect_refused(file_of("{\"__metadata__\":{\"x\":1}}"), "bad.safetensors: ");
  expect_refused(file_of(std::string(100000, '[')), "bad.safetensors: ");

  const auto one = [&](const std::string& text, const std::string& data, const std::string& wanted) { expect_refused(file_of("{" + text + "}", data), wanted); };
  one(entry("a", "F32", "[1]", 0, 4) + "," + entry("a", "F32", "[1]", 4, 8), eight, "bad.safetensors: ");   // one name twice
  one("\"__metadata__\":{\"x\":\"1\",\"x\":\"2\"}", "", "bad.safetensors: ");
  one(entry("a", "F33", "[1]", 0, 4), four, "tensor a has unknown dtype F33");
  one(entry("a", "F32", "[-1]", 0, 4), four, "tensor a has an impossible shape");
  one(entry("a", "F32", "[4611686018427387904,4]", 0, 0), "", "tensor a has an impossible shape");
  one(entry("a", "F32", "[9223372036854775808]", 0, 4), four, "bad.safetensors: ");
  one(entry("a", "F32", "[1.5]", 0, 6), std::string(6, '\0'), "bad.safetensors: ");
  one(entry("a", "F32", "[1,1,1,1,1,1,1]", 0, 4), four, "tensor a has 7 dimensions");
  one(entry("a", "F32", "[2]", 0, 4), four, "tensor a does not fit its offsets or the file");
  one(entry("a", "F32", "[1]", -4, 0), four, "tensor a does not fit its offsets or the file");
  one(entry("a", "F32", "[1]", 4, 0), four, "tensor a does not fit its offsets or the file");
  one(entry("a", "F32", "[1]", 4, 8), four, "tensor a does not fit its offsets or the file");   // beyond the end
  one(entry("a", "F32", "[2]", 0, 8) + "," + entry("b", "F32", "[2]", 4, 12), twelve, "overlap or leave a hole at byte 8");
  one(entry("a", "F32", "[1]", 0, 4) + "," + entry("b", "F32", "[1]", 8, 12), twelve, "overlap or leave a hole at byte 4");
  one(entry("a", "F32", "[1]", 4, 8), eight, "overlap or leave a hole at byte 0");
  one(entry("a", "F32", "[1]", 0, 4), eight, "4 bytes after the last tensor");
  one("\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}", four, "bad.safetensors: ");
}

TEST_CASE("safetensors: a hostile header costs no more than its size", "[cpu]") {
  std::string tensors, metadata;
  for (int i = 0; i <= 100'000; ++i) tensors += (i == 0 ? "" : ",") + entry(std::to_string(i), "F32", "[0]", 0, 0);
  expect_refused(file_of("{" + tensors + "}"), "the header names more than 100000 tensors");
  const std::string last = "," + entry("100000", "F32", "[0]", 0, 0);
  const TempDir dir;
  write_text(dir / "most.safetensors", file_of("{\"__metadata__\":{}," + tensors.substr(0, tensors.size() - last.size()) + "}"));
  CHECK(SafetensorsFile(dir / "most.safetensors").names().size() == 100'000);

  for (int i = 0; i < 800'000; ++i) metadata += concat(i == 0 ? "" : ",", '"', i, "\":\"\"");   // pairwise they would take an hour
  write_text(dir / "metadata.safetensors", file_of("{\"__metadata__\":{" + metadata + "}}"));
  CHECK(SafetensorsFile(dir / "metadata.safetensors").metadata().size() == 800'000);
  expect_refused(file_of("{\"__metadata__\":{" + metadata + ",\"7\":\"\"}}"), "the header has '7' twice");

  expect_refused(file_of("{" + entry(std::string(513, 'a'), "F32", "[0]", 0, 0) + "}"), "a tensor's name has 513 bytes, more than 512");
  write_text(dir / "long.safetensors", file_of("{" + entry(std::string(512, 'a'), "F32", "[0]", 0, 0) + "}"));
  CHECK(SafetensorsFile(dir / "long.safetensors").contains(std::string(512, 'a')));
  expect_throws<InvalidArgument>([&] { write_safetensors(dir / "a.safetensors", std::vector<NamedTensor>{{std::string(513, 'a'), host_zeros({1}, DType::f32)}}, {}); },
                                "a name of 513 bytes, at most 512");
  expect_refused(file_of("{\"a\":{\"shape\":[[1]]}}"), "the header is nested too deeply");
  std::string deep;
  for (int i = 0; i < 1'000'000; ++i) deep += "{\"\":";
  expect_refused(file_of(deep), "the header is nested too deeply");
}

TEST_CASE("safetensors: damage is found", "[cpu]") {
  const TempDir dir;
  const fs::path path = dir / "a.safetensors";
  write_safetensors(path, std::vector<NamedTensor>{{"a", host_tensor<float>({3}, {1, 2, 3})}, {"b", host_tensor<float>({3}, {4, 5, 6})}}, {{"step", "7"}});
  const std::string whole = read_text(path);
  const auto change = [&](std::size_t at) {
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ 4);
    write_text(path, bytes);
  };
  change(whole.size() - 1);
  const SafetensorsFile file(path);
  CHECK(values_of(file.read("a")) == std::vector<double>{1, 2, 3});
  expect_throws<StorageError>([&] { file.read("b"); }, "tensor b is damaged: its hash does not fit");
  expect_throws<StorageError>([&] { file.verify(); }, "tensor b is damaged");
  change(whole.size() - 24);
  expect_throws<StorageError>([&] { SafetensorsFile(path).verify(); }, "tensor a is damaged");
  change(whole.find("\"7\"") + 1);
  expect_throws<StorageError>([&] { SafetensorsFile{path}; }, "the header's hash does not fit: damaged");
}

TEST_CASE("safetensors: no bit of a header flips unnoticed", "[cpu]") {
  const TempDir dir;
  const fs::path path = dir / "a.safetensors";
  write_safetensors(path, std::vector<NamedTensor>{{"a", host_tensor<float>({2, 1, 1}, {1, 2})}, {"count", host_tensor<std::int64_t>({}, {7})}, {"mask", host_tensor<std::uint8_t>({3}, {0, 1, 255})}},
                    {{"step", "7"}});
  const std::string whole = read_text(path);
  std::uint64_t length = 0;
  std::memcpy(&length, whole.data(), 8);
  const SafetensorsFile wanted(path);
  int accepted = 0;
  for (std::size_t bit = 0; bit < 8 * (8 + length); ++bit) {
    std::string bytes = whole;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    write_text(dir / "b.safetensors", bytes);
    try {
      SafetensorsFile(dir / "b.safetensors").verify();
      ++accepted;
      INFO("bit " << bit % 8 << " of '" << whole.substr(bit / 8, 20) << "'");
      CHECK(bytes == whole);
    } catch (const StorageError&) {
    }
  }
  CHECK(accepted == 0);

  expect_refused(whole.substr(0, 8) + std::string(whole).replace(whole.find("\"hash\""), 6, "\"iash\"").substr(8), "the header's hash does not fit: damaged");
  expect_refused(file_of("{}  " + std::string(4, '\0')), "the header has a NUL: damaged");
  std::string data(8, '\0');
  expect_refused(file_of("{" + entry("a", "F32", "[2,1.1]", 0, 8) + "}", data), "1.1 where a whole number is wanted");
}

TEST_CASE("safetensors: writing keeps the one before", "[cpu]") {
  const TempDir dir;
  const auto one = [](float value) { return std::vector<NamedTensor>{{"a", host_tensor<float>({1}, {value})}}; };
  write_safetensors(dir / "a", one(1), {}, dir / "a.previous");
  write_safetensors(dir / "a", one(2), {}, dir / "a.previous");
  CHECK(values_of(SafetensorsFile(dir / "a").read("a")) == std::vector<double>{2});
  CHECK(values_of(SafetensorsFile(dir / "a.previous").read("a")) == std::vector<double>{1});
  expect_throws<StorageError>([&] { write_safetensors(dir / "none" / "a", one(3), {}); }, "cannot be created");
}

TEST_CASE("safetensors: who waits for a file is told as each tensor goes by", "[cpu]") {
  const TempDir dir;
  int moved = 0;
  const Moved count = [&] { ++moved; };
  std::vector<NamedTensor> tensors{{"count", host_tensor<std::int64_t>({}, {7})}, {"large", host_zeros({20 << 20}, DType::f32)}};   // synced after it
  for (const char* name : {"x", "y"}) tensors.push_back({name, host_zeros({3}, DType::f32)});
  write_safetensors(dir / "a", tensors, {}, {}, count);
  CHECK(moved == 4);
  const SafetensorsFile file(dir / "a", count);
  CHECK(moved == 4);
  file.verify();
  CHECK(moved == 8);
  file.read("count");
  CHECK(moved == 9);
}

TEST_CASE("safetensors: hash", "[cpu]") {
  const auto hash = [](const std::string& text, std::uint64_t seed = 0) { return hash_bytes(std::as_bytes(std::span(text.data(), text.size())), seed); };
  const std::string text(100, 'a');
  CHECK(hash(text) == hash(text));
  CHECK(hash(text) != hash(text, 1));
  CHECK(hash(text) != hash(text + "a"));
  CHECK(hash("") != hash(std::string(1, '\0')));
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string other = text;
    other[i] = 'b';
    CHECK(hash(other) != hash(text));
  }
  // The order of equal lanes counts.
  CHECK(hash(std::string(8, 'a') + std::string(8, 'b')) != hash(std::string(8, 'b') + std::string(8, 'a')));
}

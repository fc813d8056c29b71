#include "runtime/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <cmath>
#include <iomanip>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "runtime/error.h"
#include "runtime/files.h"

namespace detr {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr std::int64_t kMaxHeader = 16 << 20;
constexpr std::int64_t kSyncEvery = 64 << 20;
constexpr std::size_t kMaxTensors = 100'000, kMaxName = 512;

struct FileType {
  const char* name;
  std::int64_t size;
};
constexpr std::array<FileType, 10> kTypes = {{{"F64", 8}, {"I64", 8}, {"F32", 4}, {"I32", 4}, {"F16", 2}, {"BF16", 2}, {"I16", 2}, {"I8", 1}, {"U8", 1}, {"BOOL", 1}}};

const char* type_name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "F32";
    case DType::f64: return "F64";
    case DType::bf16: return "BF16";
    case DType::i64: return "I64";
    case DType::u8: return "U8";
  }
  return "?";
}

std::string hex(std::uint64_t value) {
  std::ostringstream out;
  out << std::hex << std::setw(16) << std::setfill('0') << value;
  return out.str();
}

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text.data(), text.size())); }

/// Hash of all metadata but the hash itself.
std::string metadata_hash(const std::map<std::string, std::string>& metadata) {
  std::uint64_t hash = 0;
  for (const auto& [key, value] : metadata) {
    if (key == "hash") continue;
    hash = hash_bytes(bytes_of(value), hash_bytes(bytes_of(key), hash));
  }
  return hex(hash);
}

/// Reads a header once for what nlohmann's parser takes: a key that an object has twice, any depth, any number of names. Stops at the
/// first fault, and takes time in proportion to the text (the parser's own callbacks do not).
class HeaderRules final : public nlohmann::json_sax<json> {
 public:
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(std::size_t) override {
    keys_.emplace_back();
    return enter();
  }
  bool key(string_t& name) override {
    if (!keys_.back().insert(name).second) return refuse(concat("the header has '", name.substr(0, kMaxName), "' twice"));
    if (keys_.size() > 1 || name == "__metadata__") return true;
    if (name.size() > kMaxName) return refuse(concat("a tensor's name has ", name.size(), " bytes, more than ", kMaxName));
    return ++tensors_ <= kMaxTensors || refuse(concat("the header names more than ", kMaxTensors, " tensors"));
  }
  bool end_object() override {
    keys_.pop_back();
    --depth_;
    return true;
  }
  bool start_array(std::size_t) override { return enter(); }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const json::exception&) override { return refuse("the header is no JSON object"); }

  const std::string& fault() const { return fault_; }

 private:
  bool enter() { return ++depth_ <= kDepth || refuse("the header is nested too deeply"); }
  bool refuse(std::string why) {
    fault_ = std::move(why);
    return false;
  }

  static constexpr int kDepth = 3;   // header, tensor, list
  std::vector<std::unordered_set<std::string>> keys_;   // of the objects that are open
  std::size_t tensors_ = 0;
  int depth_ = 0;
  std::string fault_;
};

float half_to_float(std::uint16_t half) {
  const int sign = half >> 15, exponent = half >> 10 & 31, fraction = half & 1023;
  float value = 0;
  if (exponent == 31) value = fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  else if (exponent == 0) value = std::ldexp(static_cast<float>(fraction), -24);
  else value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return sign ? -value : value;
}

}  // namespace

std::uint64_t hash_bytes(std::span<const std::byte> bytes, std::uint64_t seed) {
  constexpr std::uint64_t kPrime = 0x100000001b3ULL;
  std::array<std::uint64_t, 4> lanes;
  for (std::size_t l = 0; l < 4; ++l) lanes[l] = 0xcbf29ce484222325ULL ^ (seed + l * 0x9E3779B97F4A7C15ULL);
  std::size_t at = 0;
  for (; at + 32 <= bytes.size(); at += 32) {
    for (std::size_t l = 0; l < 4; ++l) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes.data() + at + 8 * l, 8);
      lanes[l] = (lanes[l] ^ word) * kPrime;
      lanes[l] ^= lanes[l] >> 29;
    }
  }
  for (; at < bytes.size(); ++at) lanes[at % 4] = (lanes[at % 4] ^ std::to_integer<std::uint64_t>(bytes[at])) * kPrime;
  std::uint64_t hash = bytes.size();
  for (const std::uint64_t lane : lanes) {
    hash = (hash ^ lane) * kPrime;
    hash ^= hash >> 32;
  }
  return hash;
}

void write_safetensors(const fs::path& file, std::span<const NamedTensor> tensors, const std::map<std::string, std::string>& metadata, const fs::path& previous, const Moved& moved) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& t : tensors) order.push_back(&t);
  std::sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    const auto x = size_of(a->tensor.dtype()), y = size_of(b->tensor.dtype());
    return x != y ? x > y : a->name < b->name;
  });
  std::map<std::string, std::string> complete = metadata;
  complete.emplace("format", "pt");
  json header = json::object();
  std::int64_t end = 0;
  for (const NamedTensor* t : order) {
    DETR_CHECK(t->tensor.device().is_cpu(), "write_safetensors: ", t->name, " is on ", t->tensor.device());
    const std::vector<std::int64_t> shape(t->tensor.shape().dims().begin(), t->tensor.shape().dims().end());
    DETR_CHECK(!header.contains(t->name), "write_safetensors: two tensors named ", t->name);
    DETR_CHECK(t->name.size() <= kMaxName, "write_safetensors: a name of ", t->name.size(), " bytes, at most ", kMaxName);
    header[t->name] = {{"dtype", type_name(t->tensor.dtype())}, {"shape", shape}, {"data_offsets", {end, end + t->tensor.bytes()}}};
    end += t->tensor.bytes();
    complete["hash." + t->name] = hex(hash_bytes({static_cast<const std::byte*>(t->tensor.raw()), static_cast<std::size_t>(t->tensor.bytes())}));
  }
  complete["hash"] = metadata_hash(complete);
  header["__metadata__"] = complete;
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  const std::uint64_t size = text.size();
  const std::size_t total = 8 + text.size() + static_cast<std::size_t>(end);
  replace_file(file, total, previous, [&](int descriptor) {
    if (::lseek(descriptor, static_cast<off_t>(8 + text.size()), SEEK_SET) < 0) throw StorageError(file.string(), ": cannot seek: ", std::strerror(errno));
    std::int64_t unsynced = 0;
    for (const NamedTensor* t : order) {
      write_all(descriptor, {static_cast<const std::byte*>(t->tensor.raw()), static_cast<std::size_t>(t->tensor.bytes())}, file);
      if (!moved) continue;
      unsynced += t->tensor.bytes();
      if (unsynced >= kSyncEvery) {
        if (::fdatasync(descriptor) != 0) throw StorageError(file.string(), ": cannot be synced: ", std::strerror(errno));
        unsynced = 0;
      }
      moved();
    }
    if (::lseek(descriptor, 0, SEEK_SET) < 0) throw StorageError(file.string(), ": cannot seek: ", std::strerror(errno));
    write_all(descriptor, std::as_bytes(std::span(&size, 1)), file);
    write_all(descriptor, bytes_of(text), file);
  });
}

SafetensorsFile::SafetensorsFile(const fs::path& file, Moved moved) : file_(file), moved_(std::move(moved)) {
  const auto refuse = [&](auto... parts) { throw StorageError(file.string(), ": ", parts...); };
  handle_ = FileHandle(::open(file.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (handle_.get() < 0) refuse("cannot be opened: ", std::strerror(errno));
  struct stat info {};
  if (::fstat(handle_.get(), &info) != 0 || !S_ISREG(info.st_mode)) refuse("is not a regular file");
  const std::int64_t size = info.st_size;
  if (size < 8) refuse("has ", size, " bytes, too few for a safetensors file");
  std::uint64_t length = 0;
  read_all(handle_.get(), std::as_writable_bytes(std::span(&length, 1)), 0, file);
  if (length > static_cast<std::uint64_t>(kMaxHeader) || static_cast<std::int64_t>(length) > size - 8) refuse("header of ", length, " bytes in a file of ", size, ": torn, or no safetensors file");
  std::string text(length, '\0');
  read_all(handle_.get(), std::as_writable_bytes(std::span(text.data(), text.size())), 8, file);
  if (text.empty() || text[0] != '{') refuse("the header is no JSON object: torn, or no safetensors file");
  if (text.find('\0') != std::string::npos) refuse("the header has a NUL: damaged");   // the parser would take it for the end
  HeaderRules rules;
  if (!json::sax_parse(text, &rules)) refuse(rules.fault());
  const json header = json::parse(text, nullptr, false);
  if (header.is_discarded() || !header.is_object()) refuse("the header is no JSON object");
  data_start_ = 8 + static_cast<std::int64_t>(length);
  const std::int64_t data = size - data_start_;

  const auto whole_number = [&](const json& number) {
    if (!number.is_number_integer()) refuse("bad header: ", number.dump(), " where a whole number is wanted");
    return number.get<std::int64_t>();
  };
  std::vector<std::pair<std::int64_t, std::int64_t>> spans;
  try {
    for (const auto& [name, value] : header.items()) {
      if (name == "__metadata__") {
        metadata_ = value.get<std::map<std::string, std::string>>();
        continue;
      }
      Entry entry;
      entry.dtype = value.at("dtype").get<std::string>();
      const auto type = std::find_if(kTypes.begin(), kTypes.end(), [&](const FileType& t) { return entry.dtype == t.name; });
      if (type == kTypes.end()) refuse("tensor ", name, " has unknown dtype ", entry.dtype);
      std::vector<std::int64_t> shape;
      for (const json& d : value.at("shape")) shape.push_back(whole_number(d));
      if (shape.size() > Shape::kMaxRank) refuse("tensor ", name, " has ", shape.size(), " dimensions");
      std::int64_t bytes = type->size;
      for (const std::int64_t d : shape) {
        if (d < 0 || __builtin_mul_overflow(bytes, d, &bytes)) refuse("tensor ", name, " has an impossible shape");
      }
      entry.shape = Shape(shape);
      entry.begin = whole_number(value.at("data_offsets").at(0));
      entry.end = whole_number(value.at("data_offsets").at(1));
      if (entry.begin < 0 || entry.end < entry.begin || entry.end > data || entry.end - entry.begin != bytes) refuse("tensor ", name, " does not fit its offsets or the file");
      spans.emplace_back(entry.begin, entry.end);
      entries_.emplace(name, entry);
    }
  } catch (const json::exception& error) {
    refuse("bad header: ", error.what());
  }
  std::sort(spans.begin(), spans.end());
  std::int64_t end = 0;
  for (const auto& [from, to] : spans) {
    if (from != end) refuse("the tensors overlap or leave a hole at byte ", end);
    end = to;
  }
  if (end != data) refuse(data - end, " bytes after the last tensor");
  expect_hashes();
}

/// Who has one hash has them all: otherwise damage to a key would turn the checks off.
void SafetensorsFile::expect_hashes() const {
  const auto whole = metadata_.find("hash"), first = metadata_.lower_bound("hash.");
  if (whole == metadata_.end() && (first == metadata_.end() || !first->first.starts_with("hash."))) return;
  if (whole == metadata_.end() || whole->second != metadata_hash(metadata_)) throw StorageError(file_.string(), ": the header's hash does not fit: damaged");
  for (const auto& [name, entry] : entries_) {
    if (!metadata_.contains("hash." + name)) throw StorageError(file_.string(), ": tensor ", name, " has no hash, unlike others: damaged");
  }
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

const Shape& SafetensorsFile::shape(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw StorageError(file_.string(), ": no tensor ", name);
  return found->second.shape;
}

Tensor SafetensorsFile::read(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw StorageError(file_.string(), ": no tensor ", name);
  const Entry& entry = found->second;
  const auto load = [&](Tensor into) {
    const std::span<std::byte> bytes(static_cast<std::byte*>(into.raw()), static_cast<std::size_t>(into.bytes()));
    read_all(handle_.get(), bytes, static_cast<std::size_t>(data_start_ + entry.begin), file_);
    const auto wanted = metadata_.find("hash." + name);
    if (wanted != metadata_.end() && wanted->second != hex(hash_bytes(bytes))) throw StorageError(file_.string(), ": tensor ", name, " is damaged: its hash does not fit");
    if (moved_) moved_();
    return into;
  };
  if (entry.dtype == "F32") return load(host_zeros(entry.shape, DType::f32));
  if (entry.dtype == "F64") return load(host_zeros(entry.shape, DType::f64));
  if (entry.dtype == "I64") return load(host_zeros(entry.shape, DType::i64));
  if (entry.dtype == "U8" || entry.dtype == "BOOL") return load(host_zeros(entry.shape, DType::u8));
  if (entry.dtype == "BF16" || entry.dtype == "F16") {
    const Tensor raw = load(host_zeros(entry.shape, DType::bf16));
    Tensor wide = host_zeros(entry.shape, DType::f32);
    for (std::int64_t i = 0; i < raw.numel(); ++i) {
      const std::uint16_t bits = raw.data<BFloat16>()[i].bits;
      if (entry.dtype == "F16") {
        wide.data<float>()[i] = half_to_float(bits);
      } else {
        const std::uint32_t upper = static_cast<std::uint32_t>(bits) << 16;
        std::memcpy(wide.data<float>() + i, &upper, 4);
      }
    }
    return wide;
  }
  if (entry.dtype == "I32") {
    const Tensor raw = load(host_zeros({entry.shape.numel() * 4}, DType::u8));
    Tensor wide = host_zeros(entry.shape, DType::i64);
    for (std::int64_t i = 0; i < wide.numel(); ++i) {
      std::int32_t value = 0;
      std::memcpy(&value, raw.data<std::uint8_t>() + 4 * i, 4);
      wide.data<std::int64_t>()[i] = value;
    }
    return wide;
  }
  throw StorageError(file_.string(), ": tensor ", name, " has dtype ", entry.dtype, ", which nothing here uses");
}

void SafetensorsFile::verify() const {
  for (const auto& [name, entry] : entries_) {
    if (metadata_.contains("hash." + name)) read(name);
  }
}

}  // namespace detr

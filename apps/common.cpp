#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <iostream>
#include <new>
#include <optional>
#include <regex>

#include "apps/cli.h"
#include "runtime/error.h"
#include "runtime/gpus.h"
#include "runtime/text.h"

#ifndef DETR_COMMIT
#define DETR_COMMIT "unknown"
#endif
#ifndef DETR_BUILD
#define DETR_BUILD "unknown build"
#endif

namespace detr::apps {

namespace fs = std::filesystem;

std::string version_text() { return concat("detrtrain ", DETR_VERSION, " (", DETR_COMMIT, ")"); }

std::string build_text() { return concat(version_text(), ", ", DETR_BUILD); }

std::string escaped(const std::string& text) { return escape_control(text); }

nlohmann::json number(double value) { return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(nullptr); }

void print_line(const std::string& line) {
  std::cout << line << '\n' << std::flush;
  if (!std::cout) throw StorageError("stdout: cannot be written");
}

CLI::Validator whole_number(std::int64_t lowest, std::int64_t highest) {
  const auto check = [=](std::string& text) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool octal = text.size() > 1 && text[0] == '0';   // to CLI11, and nobody else
    if (octal || error != std::errc() || end != text.data() + text.size() || value < lowest || value > highest) {
      return highest == std::numeric_limits<std::int64_t>::max() ? concat("wanted a whole number of at least ", lowest, ", got '", text, "'")
                                                                 : concat("wanted a whole number from ", lowest, " to ", highest, ", got '", text, "'");
    }
    return std::string();
  };
  return CLI::Validator(check, "", "whole number");
}

namespace {

/// The number that the whole text is, or nothing.
std::optional<double> parse_real(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return std::nullopt;
  return value;
}

/// Host memory that is used up at the n-th request.
class EndingMemory final : public MemorySource {
 public:
  explicit EndingMemory(std::int64_t n) : left_(n) {}
  Device device() const override { return memory_->device(); }
  void* take(std::size_t bytes) override { return --left_ <= 0 ? nullptr : memory_->take(bytes); }
  void give(void* memory, std::size_t bytes) override { memory_->give(memory, bytes); }

 private:
  const std::shared_ptr<MemorySource> memory_ = host_memory();
  std::atomic<std::int64_t> left_;
};

}  // namespace

int code_of(const std::exception& error) {
  if (dynamic_cast<const ConfigError*>(&error)) return kUsage;
  if (dynamic_cast<const DataError*>(&error)) return kData;
  if (dynamic_cast<const OutOfMemory*>(&error) || dynamic_cast<const std::bad_alloc*>(&error)) return kMemory;
  if (dynamic_cast<const Diverged*>(&error)) return kDiverged;
  if (dynamic_cast<const CommError*>(&error)) return kCommunication;
  if (dynamic_cast<const StorageError*>(&error) || dynamic_cast<const std::filesystem::filesystem_error*>(&error)) return kStorage;
  if (dynamic_cast<const DeviceError*>(&error)) return kDevice;
  if (dynamic_cast<const CheckFailed*>(&error)) return kCheckFailed;
  return kBug;
}

std::string text_of(const std::exception& error) { return dynamic_cast<const std::bad_alloc*>(&error) ? "out of host memory" : error.what(); }

CLI::Validator real_number(double lowest, double highest) {
  const auto check = [=](std::string& text) {
    const std::optional<double> value = parse_real(text);
    return value && *value >= lowest && *value <= highest ? std::string() : concat("wanted a number from ", lowest, " to ", highest, ", got '", text, "'");
  };
  return CLI::Validator(check, "", "number");
}

CLI::Validator positive_number() {
  const auto check = [](std::string& text) {
    const std::optional<double> value = parse_real(text);
    return value && *value > 0 ? std::string() : concat("wanted a number above 0, got '", text, "'");
  };
  return CLI::Validator(check, "", "number");
}

PictureSize parse_size(const std::string& flag, const std::string& text) {
  static const std::regex pattern("([1-9][0-9]{0,5})(x([1-9][0-9]{0,5}))?");
  std::smatch parts;
  if (!std::regex_match(text, parts, pattern)) throw ConfigError(flag, " ", text, ": wanted HxW, such as 256x320, or one number");
  const std::int64_t height = std::stoll(parts[1]);
  return {height, parts[3].matched ? std::stoll(parts[3]) : height};
}

Stream open_stream(const CommonOptions& common, std::int64_t failing_allocation) {
  static const std::regex known("auto|cpu|cuda(:[0-9]{1,3})?");
  if (!std::regex_match(common.device, known)) throw ConfigError("--device ", common.device, ": wanted cpu, cuda or cuda:0");
  if (common.device == "cpu" || (common.device == "auto" && list_gpus().empty()))
    return Stream::cpu(common.threads, failing_allocation > 0 ? std::make_shared<EndingMemory>(failing_allocation) : host_memory());
  const std::size_t colon = common.device.find(':');
  return Stream::cuda(colon == std::string::npos ? 0 : std::stoi(common.device.substr(colon + 1)), common.threads);
}

fs::path builtin_configs() {
  std::error_code error;
  const fs::path binary = fs::read_symlink("/proc/self/exe", error);
  for (const fs::path& folder : {binary.parent_path().parent_path() / "share" / "detrtrain" / "configs", fs::path(DETR_CONFIG_DIR)}) {
    if (fs::is_directory(folder, error)) return folder;
  }
  throw ConfigError("the folder of the built-in configurations is missing beside ", binary.string());
}

train::Config load_config(const CommonOptions& common, const std::string& fallback_json) {
  train::Config config = !common.config.empty() ? train::Config::load(common.config, builtin_configs())
                         : !fallback_json.empty() ? train::Config::parse(fallback_json)
                                                  : throw ConfigError("-c CONFIG is needed: a file, or r18 r34 r50m r50 r101 tiny");
  for (const auto* updates : {&common.updates, &common.bare_updates}) {
    for (const std::string& update : *updates) config.update(update);
  }
  if (common.seed_given) config.set("seed", std::to_string(common.seed), "--seed");
  return config;
}

void add_data_flags(CLI::App& app, DataFlags& flags) {
  app.add_option("--data", flags.data, "folder with annotations and images");
  app.add_option("--ann", flags.annotations, "annotation file, or train=FILE, val=FILE, test=FILE")->take_all()->allow_extra_args(false);
  app.add_option("--images", flags.images, "image folder, or train=DIR, val=DIR, test=DIR")->take_all()->allow_extra_args(false);
  app.add_option("--exif", flags.exif, "auto, apply or ignore")->check(CLI::IsMember({"auto", "apply", "ignore"}));
}

void print_findings(const data::Findings& findings, bool quiet) {
  if (quiet) return;
  for (const std::string& line : finding_lines(findings)) std::cerr << line << '\n';
}

std::vector<std::string> finding_lines(const data::Findings& findings) {
  std::vector<std::string> lines;
  for (const data::Finding& finding : findings.all()) {
    std::string items;
    for (const std::string& item : finding.items) items += (items.empty() ? "" : "; ") + item;
    if (finding.count > static_cast<std::int64_t>(finding.items.size())) items += "; ...";
    lines.push_back(escaped(fmt::format("{}: {} ({}): {}", data::name_of(finding.severity), finding.kind, finding.count, items)));
  }
  return lines;
}

}  // namespace detr::apps

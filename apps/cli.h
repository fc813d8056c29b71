#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/coco.h"
#include "runtime/stream.h"
#include "train/config.h"

namespace detr::apps {

/// Exit codes; the one table from error type to code is code_of().
enum ExitCode {
  kDone = 0,
  kBug = 1,
  kUsage = 2,
  kData = 3,
  kMemory = 4,
  kDiverged = 5,
  kCommunication = 6,
  kStorage = 7,
  kDevice = 8,
  kCheckFailed = 9,
  kStoppedAndSaved = 75,
  kInterrupted = 130,
  kTerminated = 143,
};

int code_of(const std::exception& error);
/// What an error says; words of ours for those of the language.
std::string text_of(const std::exception& error);

/// Flags that every verb has.
struct CommonOptions {
  std::string config;                  ///< -c
  std::vector<std::string> updates;    ///< -u
  std::vector<std::string> bare_updates;   ///< KEY=VALUE at the end of the line; they win over -u
  std::string device = "auto";         ///< -d
  std::uint64_t seed = 0;
  bool seed_given = false;
  int threads = 0;                     ///< 0: all
  bool json = false, quiet = false, verbose = false;
  std::string log_style = "auto";
};

/// What a verb returns: the exit code and the members of its --json object.
struct Outcome {
  int code = kDone;
  std::string error;   ///< where the code says that a check failed: what failed, in one line
  nlohmann::json json = nlohmann::json::object();
  bool reported = false;   ///< another process has printed what there is to print
};

/// A verb: adds its flags to its own subcommand and returns what to run once they are parsed.
using Verb = std::function<Outcome()>;
Verb add_train(CLI::App& app, const CommonOptions& common);
Verb add_eval(CLI::App& app, const CommonOptions& common);
Verb add_predict(CLI::App& app, const CommonOptions& common);
Verb add_synth(CLI::App& app, const CommonOptions& common);
Verb add_check_data(CLI::App& app, const CommonOptions& common);
Verb add_info(CLI::App& app, const CommonOptions& common);
Verb add_bench(CLI::App& app, const CommonOptions& common);
Verb add_selftest(CLI::App& app, const CommonOptions& common);

/// Checks of a flag's value, so that numbers read the same everywhere (decimal, no locale, no leading zero) and the message says
/// what is wanted.
CLI::Validator whole_number(std::int64_t lowest, std::int64_t highest = std::numeric_limits<std::int64_t>::max());
CLI::Validator real_number(double lowest, double highest);
CLI::Validator positive_number();

/// Height and width of "HxW", or of one number for both. Throws ConfigError naming the flag.
struct PictureSize {
  std::int64_t height = 0, width = 0;
};
PictureSize parse_size(const std::string& flag, const std::string& text);

/// The stream for -d and --threads. Throws DeviceError if the device asked for is not there.
/// failing_allocation: a rehearsed failure, the request for memory on the CPU from which on none is left; 0: none.
Stream open_stream(const CommonOptions& common, std::int64_t failing_allocation = 0);

/// Folder of the built-in configurations: beside the binary's folder when installed, else that of the source tree.
std::filesystem::path builtin_configs();

/// The configuration of -c (or `fallback` text of a checkpoint, or the defaults) with -u and --seed applied.
train::Config load_config(const CommonOptions& common, const std::string& fallback_json = "");

/// Data flags shared by train, eval and check-data; --bad-images is train's alone, which adds it itself.
struct DataFlags {
  std::string data;
  std::vector<std::string> annotations, images;   ///< "PATH" or "train=PATH"
  std::string exif, bad_images;
};
void add_data_flags(CLI::App& app, DataFlags& flags);

/// Version and commit.
std::string version_text();
/// The same and what the build was made with: CUDA, cuDNN, GPU architectures.
std::string build_text();
/// The lines of finding_lines on stderr.
void print_findings(const data::Findings& findings, bool quiet);
/// One line per finding, the first items named.
std::vector<std::string> finding_lines(const data::Findings& findings);
/// Writes one line to stdout. Throws StorageError where stdout is closed or full.
void print_line(const std::string& line);
/// Text with control characters escaped, for names that come from data.
std::string escaped(const std::string& text);

/// A number for JSON, which has no NaN: null then.
nlohmann::json number(double value);

}  // namespace detr::apps

#pragma once
#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support.h"

namespace detr::test {

/// What became of a process.
struct ProcessResult {
  int code = -1;          ///< exit code, or -1 where a signal ended it
  int signal = 0;         ///< the signal that ended it, or 0
  std::string out, err;   ///< all of stdout and stderr

  /// stdout as exactly one line that is a JSON object; fails the test where it is anything else.
  nlohmann::json json() const;
  /// The lines of stderr that start with "detrtrain: error: ".
  std::vector<std::string> errors() const;
  /// The last line of stderr.
  std::string last_line() const;
};

/// How a process is started, besides its arguments.
struct Setting {
  std::string program;                             ///< empty: detrtrain
  std::map<std::string, std::string> variables;    ///< set in its environment
  int error_descriptor = -1;                       ///< its stderr, instead of a file
};

/// The `detrtrain` of this build as a process. Its stdout and stderr go to files in a folder of its own.
class Detrtrain {
 public:
  enum class Streams { kept, closed, full };   ///< full: every write fails for want of space
  explicit Detrtrain(const std::vector<std::string>& arguments, Streams streams = Streams::kept, const Setting& setting = {});
  ~Detrtrain();   ///< kills it where it still runs
  Detrtrain(const Detrtrain&) = delete;
  Detrtrain& operator=(const Detrtrain&) = delete;

  void send(int signal) const;
  /// Waits until `condition` holds; fails the test where the process ends, or two minutes pass, before.
  void wait_until(const std::function<bool()>& condition);
  /// Waits for its end, two minutes at most.
  ProcessResult wait();

  std::string err() const { return read_text(folder_ / "err"); }
  /// It has not ended yet.
  bool running();

 private:

  TempDir folder_;
  pid_t pid_ = -1;
  int status_ = 0;
};

/// Runs `detrtrain` to its end.
ProcessResult detrtrain(const std::vector<std::string>& arguments, Detrtrain::Streams streams = Detrtrain::Streams::kept);

/// Runs it, and checks that it failed with `code` and one line of error that holds `text`.
ProcessResult expect_error(const std::vector<std::string>& arguments, int code, const std::string& text);

/// Runs it, and fails the test unless it ended with 0.
ProcessResult expect_success(const std::vector<std::string>& arguments);

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b);

}  // namespace detr::test

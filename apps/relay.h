#pragma once
#include <poll.h>

#include <chrono>
#include <list>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/files.h"

namespace detr::apps {

/// Brings what ranks write to stderr, in whole lines with `[rank 3] ` in front, and the launcher's own lines between them. A stderr that takes
/// nothing holds up the ranks that write, never this process; one that is closed loses text.
class Relay {
 public:
  Relay();
  /// The read end of a pipe, which must not block.
  void add(int rank, FileHandle pipe);
  /// A line of the launcher.
  void say(const std::string& line);
  /// Adds what to wait for with poll(2).
  void add_polls(std::vector<pollfd>& wanted) const;
  /// Takes what is there and writes what fits.
  void pump();
  /// What is still in the pipes, to be written by the deadline.
  void finish(std::chrono::steady_clock::time_point deadline);

 private:
  struct Source {
    int rank = 0;
    FileHandle pipe;
    std::string rest;   // a line without its end
  };
  void read(Source& source);
  void line(const Source& source, std::string_view text);
  bool write_some();

  std::list<Source> sources_;
  std::string out_;
  bool terminal_ = false;
};

}  // namespace detr::apps

#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "train/config_schema.h"

// Text to JSON: files with their includes, and values of the command line. Private to train/config*.
namespace detr::train {

/// "optimizer.lr" of a path and a key under it; an empty path is the root.
inline std::string join(const std::string& path, const std::string& name) { return path.empty() ? name : path + "." + name; }

/// A JSON text, before anyone asks whether its keys are known.
struct ConfigDocument {
  schema::Json root;
  std::string name;                      ///< of the file, as shown in messages
  std::map<std::string, int> lines;      ///< line of each key, by its path with dots; empty where there is no file

  /// "name:line" of a key, or the name alone.
  std::string place(const std::string& path) const;
};

/// Reads JSON with // and /* */ comments, with or without byte order mark. Throws ConfigError with name (and line, if `lines` says
/// that the text is a file) for bad syntax, numbers that overflow, a key that comes twice and nesting over 64.
ConfigDocument parse_document(const std::string& text, const std::string& name, bool lines);

/// A file and what it includes, in the order in which they are to be merged: later wins. `__include__` is taken out.
/// Throws ConfigError: unreadable files, endings other than .json, cycles, depth over 16, and files outside the configuration
/// tree, which is the nearest folder `configs` above the file, else the file's own folder.
std::vector<ConfigDocument> read_documents(const std::filesystem::path& file);

/// A value of the command line: a JSON list, object or string, text in single quotes, or a plain scalar as YAML 1.2 has it (null,
/// true, numbers, else text), where yes, no, on and off are booleans too. Throws ConfigError that names `origin`.
schema::Json parse_value(const std::string& text, const std::string& origin);

}  // namespace detr::train

#pragma once
#include <functional>
#include <string>

#include "train/config.h"
#include "train/config_schema.h"

namespace detr::train {

/// The typed configuration of a document that has every key of the schema. `place` says where a key was set, as " (file:line)".
/// Throws ConfigError naming the key: a value of the wrong type, out of range, not built here, or at odds with another one.
RunConfig resolve_config(const schema::Json& root, const std::function<std::string(const std::string& path)>& place);

}  // namespace detr::train

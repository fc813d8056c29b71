#pragma once
#include <functional>
#include <memory>
#include <string>

#include "apps/cli.h"
#include "data/coco.h"
#include "train/config.h"
#include "train/trainer.h"

namespace detr::apps {

/// Takes one line of text.
using Tell = std::function<void(const std::string& line)>;
/// Writes lines to stderr, or drops them where `quiet` is set.
Tell tell_stderr(bool quiet);

/// Finds, reads and checks one split: from --data, --ann and --images, else from the configuration's paths. Picture sizes are read
/// from the files, boxes clipped to them. `for_training`: unusable pictures follow --bad-images; otherwise they stay, as pictures
/// without detections. What was noticed goes to `tell`, a line each. Throws DataError.
train::SplitData open_split(const DataFlags& flags, const train::RunConfig& config, const std::string& split, bool for_training, const Stream& stream, const Tell& tell);

/// Whether --data, --ann or the configuration give this split.
bool has_split(const DataFlags& flags, const train::RunConfig& config, const std::string& split);

/// Sets the configuration's data keys from flags.
void apply_data_flags(const DataFlags& flags, train::Config& config);

/// Throws DataError with both lists unless two splits (or a checkpoint) have the same categories.
void expect_same_classes(const std::string& what, const std::vector<data::Category>& a, const std::string& other, const std::vector<data::Category>& b);

}  // namespace detr::apps

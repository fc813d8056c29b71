#pragma once
#include <cstdint>
#include <string>

#include "apps/cli.h"

namespace detr::apps {

/// What the verb `eval` has in common with `train --test-only`.
struct EvalRequest {
  DataFlags data;
  std::string weights_file, imgsz;
  std::int64_t batch_size = 0;   ///< 0: the configuration's
};

/// `eval` of the val split, with the defaults of its own flags.
Outcome evaluate_weights(const EvalRequest& request, const CommonOptions& common);

}  // namespace detr::apps

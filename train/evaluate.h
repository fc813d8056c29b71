#pragma once
#include <functional>
#include <vector>

#include "data/coco_eval.h"
#include "data/loader.h"
#include "models/detr/rtdetr.h"
#include "runtime/stream.h"

namespace detr::train {

/// Detections of every picture that the loader (an evaluation loader) brings, with original image and category ids.
/// `top` detections a picture; boxes in pixels of the shown picture. The model's parameters are used as they are pointed.
/// `progress` gets the number of pictures done; it returns false to stop early. Throws Diverged naming the image where the model's
/// output is not finite.
std::vector<data::Detection> detect(models::RtDetr& model, data::Loader& loader, const std::vector<data::Category>& categories, std::int64_t top,
                                    DType dtype, const Stream& stream, const std::function<bool(std::int64_t)>& progress = {});

/// Why an AP is near zero, in a few lines: AP without classes, spread of the boxes over the queries' places, predicted against true
/// classes, scores. For an evaluation that went wrong.
std::vector<std::string> diagnose_low_ap(const data::CocoData& truth, const std::vector<data::Detection>& detections, int threads);

}  // namespace detr::train

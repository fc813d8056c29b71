#pragma once
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "data/coco_eval.h"

namespace detr::train {

/// What was evaluated.
struct EvaluatedState {
  std::int64_t epoch = 0, step = 0;
  std::string weights = "ema";   ///< "ema" or "model"
};

/// Writes the files of an evaluation into `folder`, which is made where need be, each so that the old or the new one is there whole:
/// latest.json          epoch, step, weights, stats, per_class, confusion_score, best_f1, images, dets
/// predictions.json     the detections as a COCO results file
/// per_class.csv        id,name,boxes,AP,AP50,AP75,AR
/// confusion_matrix.csv counts at IoU 0.5; rows true, columns predicted, "background" last
/// pr_curves.csv        id,name,recall,precision,score at IoU 0.5
/// -1 and empty cells mean "no true box". Names are quoted, with control characters and bytes that are not UTF-8 escaped.
/// Throws StorageError where writing fails, DataError for a detection that is not finite.
void write_evaluation_files(const std::filesystem::path& folder, const EvaluatedState& state, const data::EvalResult& result, std::span<const data::Detection> detections);

}  // namespace detr::train

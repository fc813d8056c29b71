#include "train/evaluate.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "models/detr/postprocess.h"
#include "runtime/error.h"
#include "train/inputs.h"

namespace detr::train {

std::vector<data::Detection> detect(models::RtDetr& model, data::Loader& loader, const std::vector<data::Category>& categories, std::int64_t top,
                                    DType dtype, const Stream& stream, const std::function<bool(std::int64_t)>& progress) {
  DETR_CHECK(static_cast<std::int64_t>(categories.size()) == model.config().decoder.num_classes, "detect: ", categories.size(), " categories for a model of ",
             model.config().decoder.num_classes, " classes");
  std::vector<data::Detection> detections;
  Context ctx(stream, nullptr, false);
  loader.start(0);
  data::Batch batch;
  std::int64_t done = 0;
  while (loader.next(batch)) {
    const models::DecoderOutput output = model.forward(ctx, Variable(pictures_to_device(stream, batch, dtype)));
    const auto boxes = models::postprocess(stream, output.logits.back().value(), output.boxes.back().value(), batch.orig_width, batch.orig_height, top);
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      for (const models::ScoredBox& box : boxes[i]) {
        const auto& [x0, y0, x1, y1] = box.xyxy_px;
        if (!std::isfinite(box.score + x0 + y0 + x1 + y1))
          throw Diverged("image ", batch.image_ids[i], ": the model's boxes or scores are not finite: its weights have diverged; a lower learning rate may help");
        detections.push_back({batch.image_ids[i], categories[static_cast<std::size_t>(box.label)].id, {x0, y0, x1 - x0, y1 - y0}, box.score});
      }
    }
    done += static_cast<std::int64_t>(boxes.size());
    if (progress && !progress(done)) break;
  }
  return detections;
}

std::vector<std::string> diagnose_low_ap(const data::CocoData& truth, const std::vector<data::Detection>& detections, int threads) {
  std::vector<std::string> lines;
  if (detections.empty()) return {"there are no detections at all"};
  data::EvalOptions options;
  options.threads = threads;
  options.use_categories = false;
  const double agnostic = data::evaluate(truth, detections, options).AP;
  lines.push_back(concat("AP without regard to classes: ", agnostic, agnostic > 0.05 ? " - boxes are found but classes are wrong: look at class ids and their order" : ""));

  double sum[4] = {}, squares[4] = {}, best = 0, mean = 0;
  std::map<std::int64_t, std::int64_t> predicted, actual;
  for (const data::Detection& d : detections) {
    const double v[4] = {d.box_xywh[0] + d.box_xywh[2] / 2, d.box_xywh[1] + d.box_xywh[3] / 2, d.box_xywh[2], d.box_xywh[3]};
    for (int k = 0; k < 4; ++k) {
      sum[k] += v[k];
      squares[k] += v[k] * v[k];
    }
    best = std::max(best, d.score);
    mean += d.score;
    ++predicted[d.category_id];
  }
  const double n = static_cast<double>(detections.size());
  const auto spread = [&](int k) { return std::sqrt(std::max(0.0, squares[k] / n - sum[k] / n * (sum[k] / n))); };
  const double position = std::max(spread(0), spread(1));
  lines.push_back(concat("spread of box centres ", position, " px, of sizes ", std::max(spread(2), spread(3)), " px",
                         position < 1 ? " - all boxes are alike: the decoder tells the pictures' places not apart" : ""));
  lines.push_back(concat("scores: highest ", best, ", mean ", mean / n, best < 0.05 ? " - the classifier has learnt nothing yet" : ""));
  for (const data::Annotation& a : truth.annotations) ++actual[truth.categories[static_cast<std::size_t>(a.label)].id];
  std::int64_t shared = 0;
  for (const auto& [id, count] : predicted) shared += actual.contains(id) ? 1 : 0;
  lines.push_back(concat(predicted.size(), " classes predicted, ", actual.size(), " true, ", shared, " in common"));
  std::int64_t corners = 0;
  for (const data::Annotation& a : truth.annotations) {
    const data::ImageRecord& image = truth.images[static_cast<std::size_t>(a.image)];
    const bool leaves = image.width > 0 && (a.box_xywh[0] + a.box_xywh[2] > static_cast<double>(image.width) + 1 || a.box_xywh[1] + a.box_xywh[3] > static_cast<double>(image.height) + 1);
    corners += leaves ? 1 : 0;
  }
  if (corners * 10 > static_cast<std::int64_t>(truth.annotations.size()))
    lines.push_back(concat(corners, " of ", truth.annotations.size(), " true boxes leave their picture: are they corners (x0, y0, x1, y1) instead of x, y, width, height?"));
  return lines;
}

}  // namespace detr::train

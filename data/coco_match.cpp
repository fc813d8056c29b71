#include "data/coco_match.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace detr::data::detail {
namespace {

constexpr std::uint16_t kAllSteps = (1u << kIouSteps) - 1;
constexpr int kStep75 = 5;

struct Range {
  double low, high;
};
constexpr std::array<Range, kAreas> kRanges = {{{0, 1e10}, {0, 1024}, {1024, 9216}, {9216, 1e10}}};   // square pixels

bool outside(double area, const Range& range) { return area < range.low || area > range.high; }

// np.linspace(.5, .95, 10) and np.linspace(0, 1, 101), bit by bit: a product, then a sum, and the last value as given.
std::array<double, kIouSteps> iou_steps() {
  std::array<double, kIouSteps> steps{};
  const double width = (0.95 - 0.5) / (kIouSteps - 1);
  for (int i = 0; i < kIouSteps; ++i) {
    const double offset = i * width;
    steps[static_cast<std::size_t>(i)] = i == kIouSteps - 1 ? 0.95 : offset + 0.5;
  }
  return steps;
}

std::array<double, kRecallPoints> recall_points() {
  std::array<double, kRecallPoints> points{};
  for (int i = 0; i < kRecallPoints; ++i) points[static_cast<std::size_t>(i)] = i == kRecallPoints - 1 ? 1.0 : i * 0.01;
  return points;
}

/// Matches the detections of one image and category. Its buffers are reused from image to image.
class Matcher {
 public:
  Matcher(std::span<const Annotation> annotations, std::span<const Detection> detections)
      : annotations_(annotations), detections_(detections) {}

  /// `boxes`: annotation indices; `scored`: by falling score, with `detection` set.
  void match(std::span<const std::int64_t> boxes, std::span<Scored> scored) {
    collect(boxes, scored);
    for (int area = 0; area < kAreas; ++area) {
      if (!pairs_.empty()) match_area(area, boxes, scored);
      const Range& range = kRanges[static_cast<std::size_t>(area)];
      for (Scored& s : scored) {
        const auto& box = detection(s).box_xywh;
        const std::size_t a = static_cast<std::size_t>(area);
        if (outside(box[2] * box[3], range)) s.ignored[a] |= static_cast<std::uint16_t>(kAllSteps & ~s.matched[a]);
      }
    }
  }

 private:
  /// A true box that a detection can take at some step.
  struct Pair {
    std::size_t box;
    double iou;
  };

  const Detection& detection(const Scored& s) const { return detections_[static_cast<std::size_t>(s.detection)]; }
  const Annotation& annotation(std::int64_t index) const { return annotations_[static_cast<std::size_t>(index)]; }

  /// The pairs of each detection are pairs_[starts_[d], starts_[d + 1]), boxes in file order.
  void collect(std::span<const std::int64_t> boxes, std::span<const Scored> scored) {
    pairs_.clear();
    starts_.assign(1, 0);
    for (const Scored& s : scored) {
      for (std::size_t b = 0; b < boxes.size(); ++b) {
        const Annotation& truth = annotation(boxes[b]);
        const double iou = box_iou(detection(s).box_xywh, truth.box_xywh, truth.crowd);
        if (!(iou < steps_[0])) pairs_.push_back({b, iou});   // not >=: 0 / 0 of vanishing boxes matches in the API
      }
      starts_.push_back(pairs_.size());
    }
  }

  void match_area(int area, std::span<const std::int64_t> boxes, std::span<Scored> scored) {
    const std::size_t a = static_cast<std::size_t>(area);
    ignored_.resize(boxes.size());
    for (std::size_t b = 0; b < boxes.size(); ++b) ignored_[b] = is_ignored(annotation(boxes[b]), area);
    for (int step = 0; step < kIouSteps; ++step) {
      const std::uint16_t bit = static_cast<std::uint16_t>(1u << step);
      taken_.assign(boxes.size(), false);
      for (std::size_t d = 0; d < scored.size(); ++d) {
        std::size_t box = best(d, step, boxes, false);
        if (box == kNone) box = best(d, step, boxes, true);
        if (box == kNone) continue;
        taken_[box] = true;
        if (ignored_[box]) scored[d].ignored[a] |= bit;
        // The API tells "taken" from "free" by the annotation's id, so id 0 looks free; its numbers are what we promise.
        if (annotation(boxes[box]).id != 0) scored[d].matched[a] |= bit;
        if (area == 0 && step == 0) scored[d].truth = boxes[box];
      }
    }
  }

  /// The free box of largest IoU at or over the step, the later of equal ones; among the ignored or among the others.
  std::size_t best(std::size_t d, int step, std::span<const std::int64_t> boxes, bool ignored) const {
    double iou = steps_[static_cast<std::size_t>(step)];
    std::size_t found = kNone;
    for (std::size_t p = starts_[d]; p < starts_[d + 1]; ++p) {
      const Pair& pair = pairs_[p];
      if (ignored_[pair.box] != ignored || pair.iou < iou) continue;
      if (taken_[pair.box] && !annotation(boxes[pair.box]).crowd) continue;
      iou = pair.iou;
      found = pair.box;
    }
    return found;
  }

  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  std::span<const Annotation> annotations_;
  std::span<const Detection> detections_;
  const std::array<double, kIouSteps> steps_ = iou_steps();
  std::vector<Pair> pairs_;
  std::vector<std::size_t> starts_;
  std::vector<bool> ignored_, taken_;
};

/// Interpolated precision of one area range and IoU step at each recall. `scored` by falling score, `boxes` > 0.
struct Curve {
  std::array<double, kRecallPoints> precision{}, score{};
  double recall = 0;   ///< of all detections
};

/// What is known at each right detection: only there does recall grow, and only there can precision have a peak.
struct Hit {
  double precision, score;
};

Curve trace(const std::vector<Scored>& scored, int area, int step, std::int64_t boxes, std::vector<Hit>& hits) {
  static const std::array<double, kRecallPoints> recalls = recall_points();
  const std::size_t a = static_cast<std::size_t>(area);
  const double total = static_cast<double>(boxes);
  hits.clear();
  std::int64_t seen = 0;
  for (const Scored& s : scored) {
    if ((s.ignored[a] >> step) & 1) continue;
    ++seen;
    if (!((s.matched[a] >> step) & 1)) continue;
    const double right = static_cast<double>(hits.size() + 1);
    hits.push_back({right / (static_cast<double>(seen) + std::numeric_limits<double>::epsilon()), s.score});
  }
  for (std::size_t i = hits.size(); i-- > 1;) hits[i - 1].precision = std::max(hits[i - 1].precision, hits[i].precision);

  Curve curve;
  curve.recall = static_cast<double>(hits.size()) / total;
  std::size_t hit = 0;
  for (std::size_t r = 0; r < recalls.size(); ++r) {
    while (hit < hits.size() && static_cast<double>(hit + 1) / total < recalls[r]) ++hit;
    if (hit == hits.size()) break;
    curve.precision[r] = hits[hit].precision;
    curve.score[r] = hits[hit].score;
  }
  if (!scored.empty()) curve.score[0] = scored[0].score;   // recall 0 is reached by the first detection, right or not
  return curve;
}

/// Recall of the first `max_detections` of each image at one IoU step, all areas.
double recall_at(const std::vector<Scored>& scored, int step, int max_detections, std::int64_t boxes) {
  std::int64_t right = 0;
  for (const Scored& s : scored)
    right += s.rank < max_detections && ((s.matched[0] & ~s.ignored[0]) >> step & 1) != 0;
  return static_cast<double>(right) / static_cast<double>(boxes);
}

void accumulate(CategoryScore& category) {
  category.ap.fill(-1);
  category.ar.fill(-1);
  category.precision50.fill(-1);
  category.score50.fill(-1);
  std::vector<Hit> hits;
  for (int area = 0; area < kAreas; ++area) {
    const std::size_t a = static_cast<std::size_t>(area);
    const std::int64_t boxes = category.boxes[a];
    if (boxes == 0) continue;
    double precision_sum = 0, recall_sum = 0;
    for (int step = 0; step < kIouSteps; ++step) {
      const Curve curve = trace(category.scored, area, step, boxes, hits);
      double sum = 0;
      for (const double p : curve.precision) sum += p;
      precision_sum += sum;
      recall_sum += curve.recall;
      if (area != 0) continue;
      if (step == 0) {
        category.ap50 = sum / kRecallPoints;
        category.precision50 = curve.precision;
        category.score50 = curve.score;
      }
      if (step == kStep75) category.ap75 = sum / kRecallPoints;
    }
    category.ap[a] = precision_sum / (kIouSteps * kRecallPoints);
    category.ar[a] = recall_sum / kIouSteps;
  }
  if (category.boxes[0] == 0) return;
  double one = 0, ten = 0;
  for (int step = 0; step < kIouSteps; ++step) {
    one += recall_at(category.scored, step, 1, category.boxes[0]);
    ten += recall_at(category.scored, step, 10, category.boxes[0]);
  }
  category.ar1 = one / kIouSteps;
  category.ar10 = ten / kIouSteps;
}

}  // namespace

bool is_ignored(const Annotation& annotation, int area) {
  return annotation.crowd || outside(annotation.area, kRanges[static_cast<std::size_t>(area)]);
}

double box_iou(const std::array<double, 4>& detection, const std::array<double, 4>& truth, bool crowd) {
  const double w = std::min(detection[2] + detection[0], truth[2] + truth[0]) - std::max(detection[0], truth[0]);
  if (w <= 0) return 0;
  const double h = std::min(detection[3] + detection[1], truth[3] + truth[1]) - std::max(detection[1], truth[1]);
  if (h <= 0) return 0;
  const double detection_area = detection[2] * detection[3];
  const double truth_area = truth[2] * truth[3];
  const double both = w * h;
  const double sum = detection_area + truth_area;
  const double either = crowd ? detection_area : sum - both;
  return both / either;
}

CategoryScore score_category(std::span<const Annotation> annotations, std::span<const std::int64_t> boxes,
                             std::span<const Detection> detections, std::span<const std::int64_t> images,
                             std::span<const std::int64_t> dets, int max_detections) {
  CategoryScore category;
  std::vector<Scored>& scored = category.scored;
  scored.reserve(dets.size());
  Matcher matcher(annotations, detections);
  const auto image_of_box = [&](std::size_t b) { return annotations[static_cast<std::size_t>(boxes[b])].image; };
  const auto image_of_det = [&](std::size_t d) { return images[static_cast<std::size_t>(dets[d])]; };
  std::size_t b = 0, d = 0;
  while (b < boxes.size() || d < dets.size()) {
    const std::int64_t image = std::min(b < boxes.size() ? image_of_box(b) : std::numeric_limits<std::int64_t>::max(),
                                        d < dets.size() ? image_of_det(d) : std::numeric_limits<std::int64_t>::max());
    const std::size_t first_box = b, first_scored = scored.size();
    std::int64_t counting = 0;
    for (; b < boxes.size() && image_of_box(b) == image; ++b) {
      const Annotation& truth = annotations[static_cast<std::size_t>(boxes[b])];
      for (int area = 0; area < kAreas; ++area) category.boxes[static_cast<std::size_t>(area)] += !is_ignored(truth, area);
      counting += !truth.crowd;
    }
    category.densest = std::max(category.densest, counting);
    for (std::int32_t rank = 0; d < dets.size() && image_of_det(d) == image; ++d, ++rank)
      if (rank < max_detections)
        scored.push_back({detections[static_cast<std::size_t>(dets[d])].score, dets[d], image, -1, rank, {}, {}});
    matcher.match(boxes.subspan(first_box, b - first_box), std::span(scored).subspan(first_scored));
  }
  std::stable_sort(scored.begin(), scored.end(), [](const Scored& x, const Scored& y) { return x.score > y.score; });
  accumulate(category);
  return category;
}

std::vector<std::int64_t> confusion_matrix(std::span<const Annotation> annotations, std::int64_t image_count,
                                           std::span<const Detection> detections,
                                           const std::vector<CategoryScore>& categories, double lowest_score) {
  const std::size_t classes = categories.size(), side = classes + 1;
  const bool one_class = classes == 1;
  const auto label = [&](const Annotation& a) { return one_class ? 0 : static_cast<std::size_t>(a.label); };
  std::vector<std::int64_t> matrix(side * side, 0);

  struct Left {
    double score;
    std::size_t predicted;
    std::int64_t detection;
  };
  std::vector<std::vector<Left>> left(static_cast<std::size_t>(image_count));
  std::vector<bool> found(annotations.size(), false);
  for (std::size_t c = 0; c < classes; ++c)
    for (const Scored& s : categories[c].scored) {
      if (s.score < lowest_score) break;
      if (s.ignored[0] & 1) continue;
      if (s.truth < 0) {
        left[static_cast<std::size_t>(s.image)].push_back({s.score, c, s.detection});
      } else {
        found[static_cast<std::size_t>(s.truth)] = true;
        ++matrix[c * side + c];
      }
    }

  std::vector<std::vector<std::size_t>> missed(static_cast<std::size_t>(image_count));
  for (std::size_t i = 0; i < annotations.size(); ++i)
    if (!found[i] && !is_ignored(annotations[i], 0)) missed[static_cast<std::size_t>(annotations[i].image)].push_back(i);

  for (std::size_t image = 0; image < left.size(); ++image) {
    std::stable_sort(left[image].begin(), left[image].end(), [](const Left& x, const Left& y) { return x.score > y.score; });
    for (const Left& l : left[image]) {
      double best = iou_steps()[0];
      std::size_t truth = annotations.size();
      for (const std::size_t i : missed[image]) {
        const double iou = box_iou(detections[static_cast<std::size_t>(l.detection)].box_xywh, annotations[i].box_xywh, false);
        if (found[i] || iou < best) continue;
        best = iou;
        truth = i;
      }
      if (truth == annotations.size()) {
        ++matrix[classes * side + l.predicted];
      } else {
        found[truth] = true;
        ++matrix[label(annotations[truth]) * side + l.predicted];
      }
    }
    for (const std::size_t i : missed[image])
      if (!found[i]) ++matrix[label(annotations[i]) * side + classes];
  }
  return matrix;
}

}  // namespace detr::data::detail

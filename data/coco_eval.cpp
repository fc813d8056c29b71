#include "data/coco_eval.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <set>

#include "data/coco_match.h"
#include "runtime/error.h"
#include "runtime/thread_pool.h"

namespace detr::data {
namespace {

using detail::CategoryScore;
using detail::Scored;
using Order = std::vector<std::int64_t>;

/// "3, 7, 12 and 4 more".
std::string list(const std::set<std::int64_t>& ids) {
  constexpr std::size_t kShown = 10;
  std::string text;
  std::size_t shown = 0;
  for (const std::int64_t id : ids) {
    if (shown == kShown) return concat(text, " and ", ids.size() - kShown, " more");
    text += (shown++ ? ", " : "") + std::to_string(id);
  }
  return text;
}

/// Stable counting sort of `order` by key(element) in [0, keys); `starts` receives the first place of each key, and the end.
template <class Key>
Order sort_by(const Order& order, std::int64_t keys, const Key& key, Order* starts = nullptr) {
  Order next(static_cast<std::size_t>(keys) + 1, 0);
  for (const std::int64_t i : order) ++next[static_cast<std::size_t>(key(i)) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  if (starts) *starts = next;
  Order sorted(order.size());
  for (const std::int64_t i : order) sorted[static_cast<std::size_t>(next[static_cast<std::size_t>(key(i))]++)] = i;
  return sorted;
}

Order identity(std::size_t size) {
  Order order(size);
  std::iota(order.begin(), order.end(), std::int64_t{0});
  return order;
}

void check_truth(const CocoData& truth) {
  const auto ascends = [](const auto& items) {
    return std::adjacent_find(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.id >= b.id; }) == items.end();
  };
  DETR_CHECK(ascends(truth.images), "evaluate: images must be in ascending id");
  DETR_CHECK(ascends(truth.categories), "evaluate: categories must be in ascending id");
  for (const Annotation& a : truth.annotations) {
    DETR_CHECK(a.image >= 0 && a.image < std::ssize(truth.images) && a.label >= 0 && a.label < std::ssize(truth.categories),
               "evaluate: annotation ", a.id, " has image ", a.image, " and label ", a.label, ", out of range");
    bool finite = std::isfinite(a.area);
    for (const double value : a.box_xywh) finite = finite && std::isfinite(value);
    DETR_CHECK(finite, "evaluate: annotation ", a.id, " has a box or area that is not finite");
  }
}

/// Index of an id in items of ascending id, or -1.
template <class Items>
std::int64_t index_of(const Items& items, std::int64_t id) {
  const auto at = std::lower_bound(items.begin(), items.end(), id, [](const auto& item, std::int64_t wanted) { return item.id < wanted; });
  return at == items.end() || at->id != id ? -1 : at - items.begin();
}

struct Located {
  Order image, label;   ///< index into CocoData::images and categories, per detection
};

Located locate(const CocoData& truth, std::span<const Detection> detections) {
  Located places{Order(detections.size()), Order(detections.size())};
  std::set<std::int64_t> images, categories;
  for (std::size_t i = 0; i < detections.size(); ++i) {
    const Detection& d = detections[i];
    bool finite = std::isfinite(d.score);
    for (const double value : d.box_xywh) finite = finite && std::isfinite(value);
    if (!finite) throw DataError("detection ", i, " (image ", d.image_id, "): score or box is not a finite number");
    const bool same_image = i > 0 && d.image_id == detections[i - 1].image_id;   // results mostly come image by image
    places.image[i] = same_image ? places.image[i - 1] : index_of(truth.images, d.image_id);
    places.label[i] = index_of(truth.categories, d.category_id);
    if (places.image[i] < 0) images.insert(d.image_id);
    if (places.label[i] < 0) categories.insert(d.category_id);
  }
  const auto refuse = [&](const char* what, const std::set<std::int64_t>& ids) {
    if (!ids.empty())
      throw DataError("detections have ", what, " ids that are not in ", truth.file.empty() ? "the annotations" : truth.file.string(), ": ",
                      list(ids), "; the results belong to other annotations");
  };
  refuse("image", images);
  refuse("category", categories);
  return places;
}

BestF1 best_f1(const std::vector<CategoryScore>& categories) {
  struct Point {
    double score;
    bool hit;
  };
  std::vector<Point> points;
  std::int64_t boxes = 0;
  for (const CategoryScore& c : categories) {
    boxes += c.boxes[0];
    for (const Scored& s : c.scored)
      if (!(s.ignored[0] & 1)) points.push_back({s.score, (s.matched[0] & 1) != 0});
  }
  if (boxes == 0) return {};
  std::sort(points.begin(), points.end(), [](const Point& a, const Point& b) { return a.score > b.score; });
  BestF1 best{0, 0, 0, 0};
  std::int64_t hits = 0;
  for (std::size_t i = 0; i < points.size(); ++i) {
    hits += points[i].hit;
    if (i + 1 < points.size() && points[i + 1].score == points[i].score) continue;   // a threshold cannot part equal scores
    const double found = static_cast<double>(i + 1), right = static_cast<double>(hits), all = static_cast<double>(boxes);
    const double f1 = 2 * right / (found + all);
    if (f1 > best.f1) best = {points[i].score, right / found, right / all, f1};
  }
  return best;
}

/// Mean of the numbers that exist, -1 where none does.
class Mean {
 public:
  void add(double value) {
    if (value < 0) return;
    sum_ += value;
    ++count_;
  }
  double value() const { return count_ == 0 ? -1 : sum_ / static_cast<double>(count_); }

 private:
  double sum_ = 0;
  std::int64_t count_ = 0;
};

/// Every category that has true boxes has as many numbers as any other, so a mean over categories is a mean over all numbers.
void fill_stats(const std::vector<CategoryScore>& categories, EvalResult& result) {
  const auto mean = [&](auto&& number) {
    Mean m;
    for (const CategoryScore& c : categories) m.add(number(c));
    return m.value();
  };
  result.AP = mean([](const CategoryScore& c) { return c.ap[0]; });
  result.AP50 = mean([](const CategoryScore& c) { return c.ap50; });
  result.AP75 = mean([](const CategoryScore& c) { return c.ap75; });
  result.AP_small = mean([](const CategoryScore& c) { return c.ap[1]; });
  result.AP_medium = mean([](const CategoryScore& c) { return c.ap[2]; });
  result.AP_large = mean([](const CategoryScore& c) { return c.ap[3]; });
  result.AR1 = mean([](const CategoryScore& c) { return c.ar1; });
  result.AR10 = mean([](const CategoryScore& c) { return c.ar10; });
  result.AR100 = mean([](const CategoryScore& c) { return c.ar[0]; });
  result.AR_small = mean([](const CategoryScore& c) { return c.ar[1]; });
  result.AR_medium = mean([](const CategoryScore& c) { return c.ar[2]; });
  result.AR_large = mean([](const CategoryScore& c) { return c.ar[3]; });
}

}  // namespace

EvalResult evaluate(const CocoData& truth, std::span<const Detection> detections, const EvalOptions& options) {
  DETR_CHECK(options.max_detections >= 1, "evaluate: max_detections must be >= 1, got ", options.max_detections);
  DETR_CHECK(options.threads >= 1, "evaluate: threads must be >= 1, got ", options.threads);
  check_truth(truth);
  const Located places = locate(truth, detections);
  const std::int64_t images = std::ssize(truth.images), labels = std::ssize(truth.categories);
  const std::int64_t groups = options.use_categories ? labels : 1;
  const auto group = [&](std::int64_t label) { return options.use_categories ? label : 0; };
  const auto at = [](const Order& of, std::int64_t i) { return of[static_cast<std::size_t>(i)]; };

  // By group, then image, then falling score, then (for one group of all categories) label, then place in the input.
  Order det_starts, truth_starts;
  Order dets = sort_by(identity(detections.size()), labels, [&](std::int64_t i) { return at(places.label, i); });
  std::stable_sort(dets.begin(), dets.end(), [&](std::int64_t a, std::int64_t b) {
    return detections[static_cast<std::size_t>(a)].score > detections[static_cast<std::size_t>(b)].score;
  });
  dets = sort_by(dets, images, [&](std::int64_t i) { return at(places.image, i); });
  dets = sort_by(dets, groups, [&](std::int64_t i) { return group(at(places.label, i)); }, &det_starts);
  const auto annotation = [&](std::int64_t i) -> const Annotation& { return truth.annotations[static_cast<std::size_t>(i)]; };
  Order boxes = sort_by(identity(truth.annotations.size()), labels, [&](std::int64_t i) { return annotation(i).label; });
  boxes = sort_by(boxes, images, [&](std::int64_t i) { return annotation(i).image; });
  boxes = sort_by(boxes, groups, [&](std::int64_t i) { return group(annotation(i).label); }, &truth_starts);

  std::vector<CategoryScore> categories(static_cast<std::size_t>(groups));
  const auto part = [&](const Order& of, const Order& starts, std::int64_t g) {
    return std::span<const std::int64_t>(of).subspan(static_cast<std::size_t>(at(starts, g)),
                                                     static_cast<std::size_t>(at(starts, g + 1) - at(starts, g)));
  };
  ThreadPool pool(options.threads);
  pool.parallel_for(groups, [&](std::int64_t g) {
    categories[static_cast<std::size_t>(g)] = detail::score_category(
        truth.annotations, part(boxes, truth_starts, g), detections, places.image, part(dets, det_starts, g), options.max_detections);
  });

  EvalResult result;
  result.images = images;
  result.dets = std::ssize(detections);
  result.max_detections = options.max_detections;
  fill_stats(categories, result);
  for (std::int64_t g = 0; g < groups; ++g) {
    CategoryScore& c = categories[static_cast<std::size_t>(g)];
    result.densest = std::max(result.densest, c.densest);
    const Category category = options.use_categories ? truth.categories[static_cast<std::size_t>(g)] : Category{-1, "all"};
    result.per_class.push_back({category.id, category.name, c.boxes[0], c.ap[0], c.ap50, c.ap75, c.ar[0], c.precision50, c.score50});
  }
  result.best_f1 = best_f1(categories);
  constexpr double kPlainScore = 0.5;   // where nothing is right, no score is better than another
  result.confusion_score = options.confusion_score.value_or(result.best_f1.f1 > 0 ? result.best_f1.conf : kPlainScore);
  result.confusion = detail::confusion_matrix(truth.annotations, images, detections, categories, result.confusion_score);
  return result;
}

std::array<std::pair<std::string_view, double>, 12> EvalResult::stats() const {
  return {{{"AP", AP}, {"AP50", AP50}, {"AP75", AP75}, {"AP_small", AP_small}, {"AP_medium", AP_medium}, {"AP_large", AP_large},
           {"AR1", AR1}, {"AR10", AR10}, {"AR100", AR100}, {"AR_small", AR_small}, {"AR_medium", AR_medium}, {"AR_large", AR_large}}};
}

std::vector<std::string> summary_lines(const EvalResult& result) {
  const int most = result.max_detections, ten = std::min(10, most);
  struct Line {
    const char *iou, *area;
    int max_detections;
  };
  const char* const all = "0.50:0.95";
  const std::array<Line, 12> lines = {{{all, "   all", most}, {"0.50     ", "   all", most}, {"0.75     ", "   all", most},
                                       {all, " small", most}, {all, "medium", most}, {all, " large", most},
                                       {all, "   all", 1}, {all, "   all", ten}, {all, "   all", most},
                                       {all, " small", most}, {all, "medium", most}, {all, " large", most}}};
  const auto stats = result.stats();
  std::vector<std::string> text;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    std::array<char, 32> digits{};   // to_chars: the same in every locale
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), stats[i].second, std::chars_format::fixed, 3).ptr;
    std::string dets = std::to_string(lines[i].max_detections);
    dets.insert(0, dets.size() < 3 ? 3 - dets.size() : 0, ' ');
    text.push_back(concat(i < 6 ? " Average Precision  (AP)" : " Average Recall     (AR)", " @[ IoU=", lines[i].iou, " | area=", lines[i].area,
                          " | maxDets=", dets, " ] = ", std::string_view(digits.data(), static_cast<std::size_t>(end - digits.data()))));
  }
  return text;
}

}  // namespace detr::data

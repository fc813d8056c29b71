#include "data/synth.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "data/image.h"
#include "data/synth_draw.h"
#include "data/synth_faults.h"
#include "data/text.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "runtime/random.h"
#include "runtime/thread_pool.h"

namespace detr::data {
namespace fs = std::filesystem;
namespace {

using Json = nlohmann::ordered_json;
using synth::Drawn;

constexpr std::int64_t kMinSide = 32, kMaxSide = 8192, kMaxBoxes = 300;

enum Site : std::uint64_t { kSize, kScene, kGround, kNoise };   // what a picture's random numbers are for

/// One picture to be made.
struct Plan {
  std::int64_t index = 0;         ///< among all pictures
  std::int64_t with_boxes = -1;   ///< place among the pictures with boxes, or -1: empty
  bool crowd = false;
  bool val = false;
};

struct Box {
  std::int64_t label = 0;
  Drawn drawn;
  bool crowd = false;
};

/// A picture as it was written.
struct Made {
  std::string file_name;
  std::int64_t width = 0, height = 0;
  std::vector<Box> boxes;
};

/// 3, 7, 12, 18, 25, ...: a category's id is neither its label nor its label plus one.
std::int64_t category_id(std::int64_t label) { return 3 + 4 * label + label * (label - 1) / 2; }
std::int64_t image_id(std::int64_t index) { return 100 + 7 * index; }

/// Whether item i is one of the floor(share * n) that are spread evenly over n items.
bool is_chosen(std::int64_t i, double share) {
  constexpr double kRounding = 1e-9;   // 0.1 * 10 is meant to be 1
  const auto upto = [&](std::int64_t n) { return std::floor(static_cast<double>(n) * share + kRounding); };
  return upto(i + 1) > upto(i);
}

std::vector<Plan> plan_pictures(const SynthOptions& o) {
  const std::int64_t val = std::clamp<std::int64_t>(std::llround(static_cast<double>(o.images) * o.val_share), 1, o.images - 1);
  std::vector<Plan> plans;
  std::int64_t with_boxes = 0;
  for (std::int64_t i = 0; i < o.images; ++i) {
    Plan plan{i, -1, false, i >= o.images - val};
    if (!is_chosen(i, o.empty_share)) {
      plan.crowd = is_chosen(with_boxes, o.crowd_share);
      plan.with_boxes = with_boxes++;
    }
    plans.push_back(plan);
  }
  return plans;
}

/// Pixels that two boxes share.
std::int64_t overlap(const Drawn& a, const Drawn& b) {
  const std::int64_t w = std::min(a.x1, b.x1) - std::max(a.x0, b.x0), h = std::min(a.y1, b.y1) - std::max(a.y0, b.y0);
  return std::max<std::int64_t>(w, 0) * std::max<std::int64_t>(h, 0);
}

/// Whether two boxes share more than a fifth of the smaller one.
bool crowds_out(const Drawn& a, const Drawn& b) {
  return 5 * overlap(a, b) > std::min((a.x1 - a.x0) * (a.y1 - a.y0), (b.x1 - b.x0) * (b.y1 - b.y0));
}

/// The box around a centre, in whole pixels.
Drawn bounds(double cx, double cy, double half_w, double half_h) {
  const auto low = [](double value) { return static_cast<std::int64_t>(std::floor(value)); };
  const auto high = [](double value) { return static_cast<std::int64_t>(std::ceil(value)); };
  return {low(cx - half_w), low(cy - half_h), high(cx + half_w), high(cy + half_h), 0};
}

/// Fills one picture with shapes.
class Scene {
 public:
  Scene(RandomKey key, Image& image, const synth::Colour& ground)
      : random_(key), image_(image), ground_(ground), side_(static_cast<double>(std::min(image.width, image.height))) {}

  std::vector<Box> take() { return std::move(boxes_); }

  /// A region of 0.4 to 0.5 of the shorter side, full of small shapes of one class, where it hides least of the rest.
  void add_crowd(std::int64_t classes) {
    const std::int64_t label = random_.uniform_int(classes);
    const double half = side_ * random_.uniform(0.2, 0.25), unit = half / 4;
    double cx = 0, cy = 0;
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    for (int i = 0; i < kTries && least > 0; ++i) {
      const double x = place(half, image_.width), y = place(half, image_.height);
      std::int64_t hidden = 0;
      for (const Box& box : boxes_) hidden += overlap(box.drawn, bounds(x, y, half, half));
      if (hidden >= least) continue;
      least = hidden;
      cx = x;
      cy = y;
    }
    Drawn all{image_.width, image_.height, 0, 0, 0};
    constexpr int kMembers = 14;
    for (int i = 0; i < kMembers; ++i) {
      synth::Shape shape = make_shape(label, unit, unit);
      shape.cx = cx + random_.uniform(unit - half, half - unit);
      shape.cy = cy + random_.uniform(unit - half, half - unit);
      const Drawn one = synth::draw(image_, shape);
      all = {std::min(all.x0, one.x0), std::min(all.y0, one.y0), std::max(all.x1, one.x1), std::max(all.y1, one.y1), all.count + one.count};
    }
    all.count = std::min(all.count, (all.x1 - all.x0) * (all.y1 - all.y0));   // members may cover one another
    boxes_.push_back({label, all, true});
  }

  /// One shape of 1/8 to 2/5 of the shorter side, smaller where `expected` shapes want room; none where no free
  /// place is found, which never happens to the first one.
  void add_shape(std::int64_t label, std::int64_t expected) {
    constexpr double kRoomy = 6;   // as many shapes of full size fit without much search
    const double shrink = std::min(1.0, std::sqrt(kRoomy / static_cast<double>(expected)));
    for (int i = 0; i < kTries; ++i) {
      const double size = std::max(kMinHalf, side_ * random_.uniform(0.0625, 0.2) * shrink), aspect = random_.uniform(0.8, 1.25);
      synth::Shape shape = make_shape(label, size * std::sqrt(aspect), size / std::sqrt(aspect));
      const double reach = std::hypot(shape.half_w, shape.half_h);
      shape.cx = place(reach, image_.width);
      shape.cy = place(reach, image_.height);
      const Drawn box = bounds(shape.cx, shape.cy, shape.half_w, shape.half_h);
      if (std::any_of(boxes_.begin(), boxes_.end(), [&](const Box& other) { return crowds_out(other.drawn, box); })) continue;
      boxes_.push_back({label, synth::draw(image_, shape), false});
      return;
    }
  }

 private:
  static constexpr int kTries = 40;        // places looked at before giving up
  static constexpr double kMinHalf = 4;    // pixels; smaller shapes all look the same
  static constexpr double kMaxTurn = 0.2;  // radians; a square never looks like a diamond

  double place(double reach, std::int64_t side) { return random_.uniform(reach, static_cast<double>(side) - reach); }

  synth::Shape make_shape(std::int64_t label, double half_w, double half_h) {
    synth::Shape shape{label, 0, 0, half_w, half_h, random_.uniform(-kMaxTurn, kMaxTurn), synth::contrasting(random_, ground_), {}};
    shape.second = synth::second_of(shape.ink);
    return shape;
  }

  RandomSequence random_;
  Image& image_;
  const synth::Colour& ground_;
  double side_;
  std::vector<Box> boxes_;
};

std::string file_name_of(std::int64_t index) {
  const std::string digits = std::to_string(index);
  return std::string(digits.size() < 6 ? 6 - digits.size() : 0, '0') + digits + (index % 4 == 1 ? ".png" : ".jpg");
}

Made make_picture(const SynthOptions& o, const Plan& plan, const fs::path& folder) {
  const RandomKey key = RandomKey(o.seed).fold(static_cast<std::uint64_t>(plan.index));
  RandomSequence sizes(key.fold(kSize));
  const auto side = [&](std::int64_t wanted) {
    const double factor = o.vary_size ? sizes.uniform(0.75, 1.25) : 1;
    return std::max<std::int64_t>(kMinSide, std::llround(static_cast<double>(wanted) * factor));
  };
  Made made{file_name_of(plan.index), side(o.width), side(o.height), {}};

  RandomSequence random(key.fold(kGround));
  synth::Colour mean{};
  for (double& channel : mean) channel = random.uniform(80, 175);
  Image image = synth::ground(key.fold(kGround).fold(1), made.width, made.height, mean);
  if (plan.with_boxes >= 0) {
    Scene scene(key.fold(kScene), image, mean);
    const std::int64_t wanted = 1 + random.uniform_int(o.max_boxes);
    scene.add_shape(plan.with_boxes % o.classes, wanted);   // in turn, so that every class occurs
    if (plan.crowd) scene.add_crowd(o.classes);
    for (std::int64_t i = 1; i < wanted; ++i) scene.add_shape(random.uniform_int(o.classes), wanted);
    made.boxes = scene.take();
  }
  constexpr int kNoiseLevels = 10;
  synth::add_noise(key.fold(kNoise), image, kNoiseLevels);
  write_image(folder / made.file_name, image);
  return made;
}

Json to_json(const SynthOptions& o, const std::vector<Plan>& plans, const std::vector<Made>& pictures, bool val) {
  Json coco = {{"info", {{"description", concat("detrtrain synth, seed ", o.seed)}}},
               {"images", Json::array()}, {"annotations", Json::array()}, {"categories", Json::array()}};
  std::int64_t next_id = 0;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    ++next_id;   // leaves a gap after each picture
    const Made& made = pictures[i];
    if (plans[i].val == val)
      coco["images"].push_back({{"id", image_id(plans[i].index)}, {"file_name", made.file_name}, {"width", made.width}, {"height", made.height}});
    for (const Box& box : made.boxes) {
      ++next_id;
      if (plans[i].val != val) continue;
      const Drawn& d = box.drawn;
      coco["annotations"].push_back({{"id", next_id}, {"image_id", image_id(plans[i].index)}, {"category_id", category_id(box.label)},
                                     {"bbox", {d.x0, d.y0, d.x1 - d.x0, d.y1 - d.y0}}, {"area", d.count}, {"iscrowd", box.crowd ? 1 : 0}});
    }
  }
  for (std::int64_t label = o.classes - 1; label >= 0; --label)
    coco["categories"].push_back({{"id", category_id(label)}, {"name", synth::shape_name(label)}, {"supercategory", "shape"}});
  return coco;
}

/// The options are what a user typed, so faults are ConfigError.
void check(const SynthOptions& o) {
  const auto require = [](bool condition, const auto&... parts) {
    if (!condition) throw ConfigError("", parts...);
  };
  require(o.images >= 2, "images must be at least 2 (one for train, one for val), got ", o.images);
  require(o.val_share > 0 && o.val_share < 1, "the val share must be between 0 and 1, got ", o.val_share);
  require(o.classes >= 1 && o.classes <= synth_max_classes(), "classes must be 1 to ", synth_max_classes(), ", got ", o.classes);
  require(std::min(o.width, o.height) >= kMinSide && std::max(o.width, o.height) <= kMaxSide, "size must be ", kMinSide, " to ",
             kMaxSide, " pixels a side, got ", o.height, " x ", o.width);
  require(o.max_boxes >= 1 && o.max_boxes <= kMaxBoxes, "max-boxes must be 1 to ", kMaxBoxes, ", got ", o.max_boxes);
  require(o.empty_share >= 0 && o.empty_share < 1, "the empty share must be in [0, 1), got ", o.empty_share);
  require(o.crowd_share >= 0 && o.crowd_share <= 1, "the crowd share must be in [0, 1], got ", o.crowd_share);
  require(o.threads >= 1, "threads must be at least 1, got ", o.threads);
  if (!o.fault.empty()) synth::check_fault(o.fault);
  std::error_code error;
  if (fs::exists(o.out, error) && !fs::is_empty(o.out, error))
    throw ConfigError(printable(o.out), " is not an empty folder; choose another one");
}

}  // namespace

std::int64_t synth_max_classes() { return synth::kKinds * synth::kPatterns; }

SynthCounts make_synthetic(const SynthOptions& options) {
  check(options);
  const std::vector<Plan> plans = plan_pictures(options);
  const auto image_folder = [&](bool val) { return options.out / "images" / (val ? "val" : "train"); };
  make_folder(options.out / "annotations");
  make_folder(image_folder(false));
  make_folder(image_folder(true));

  std::vector<Made> pictures(plans.size());
  ThreadPool(options.threads).parallel_for(std::ssize(plans), [&](std::int64_t i) {
    const Plan& plan = plans[static_cast<std::size_t>(i)];
    pictures[static_cast<std::size_t>(i)] = make_picture(options, plan, image_folder(plan.val));
  });
  const fs::path annotations = options.out / "annotations";
  replace_file(annotations / "instances_train.json", synth::faulty_text(to_json(options, plans, pictures, false), options.fault));
  replace_file(annotations / "instances_val.json", synth::faulty_text(to_json(options, plans, pictures, true), ""));

  SynthCounts counts;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    ++(plans[i].val ? counts.val : counts.train);
    counts.empty += pictures[i].boxes.empty();
    for (const Box& box : pictures[i].boxes) ++(box.crowd ? counts.crowds : counts.boxes);
  }
  return counts;
}

}  // namespace detr::data

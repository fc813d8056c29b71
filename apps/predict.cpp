#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iostream>
#include <map>
#include <set>

#include "apps/cli.h"
#include "apps/launch.h"
#include "apps/model_files.h"
#include "data/coco_results.h"
#include "data/draw.h"
#include "data/image.h"
#include "models/detr/postprocess.h"
#include "runtime/error.h"
#include "runtime/files.h"
#include "train/inputs.h"

namespace detr::apps {
namespace {

namespace fs = std::filesystem;

struct PredictFlags {
  std::string weights_file, weights = "auto", save_json, vis, save_txt, exif, bad_images = "auto", imgsz;
  std::vector<std::string> input;
  double conf = 0.5;
  std::int64_t batch_size = 8;
};

struct Picture {
  fs::path file;
  fs::path name;   ///< relative to the input it was found under; never leads out of an output folder
  fs::path txt;    ///< the same of its text file
};

bool looks_like_picture(const fs::path& file) {
  std::string ending = file.extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(), [](unsigned char c) { return std::tolower(c); });
  return ending == ".jpg" || ending == ".jpeg" || ending == ".png" || ending == ".bmp" || ending == ".gif";
}

/// Two pictures of one name stay two: the later ones become a-1.jpg, a-2.jpg, ..., the first number that no picture has.
void make_unique(std::vector<Picture>& pictures, fs::path Picture::* member) {
  std::set<fs::path> given, taken;
  for (const Picture& picture : pictures) given.insert((picture.*member).lexically_normal());
  for (Picture& picture : pictures) {
    const fs::path own = (picture.*member).lexically_normal();
    if (taken.insert(own).second) continue;
    fs::path name = own;
    for (int n = 1; given.contains(name) || !taken.insert(name).second; ++n) name.replace_filename(concat(own.stem().string(), "-", n, own.extension().string()));
    picture.*member = name;
  }
}

/// Files as given, the pictures below folders, and the lines of .txt lists; sorted within each input.
std::vector<Picture> find_pictures(const std::vector<std::string>& inputs) {
  std::vector<Picture> pictures;
  for (const std::string& input : inputs) {
    if (fs::is_directory(input)) {
      std::vector<fs::path> files;
      for (const auto& entry : fs::recursive_directory_iterator(input)) {
        if (entry.is_regular_file() && looks_like_picture(entry.path())) files.push_back(entry.path());
      }
      std::sort(files.begin(), files.end());
      for (const fs::path& file : files) pictures.push_back({file, file.lexically_relative(input), {}});
    } else if (fs::path(input).extension() == ".txt") {
      std::ifstream list(input);
      if (!list) throw DataError(input, ": cannot be read");
      for (std::string line; std::getline(list, line);) {
        if (!line.empty() && line.back() == '\r') line.pop_back();
        if (!line.empty()) pictures.push_back({line, fs::path(line).filename(), {}});
      }
    } else if (fs::exists(input)) {
      pictures.push_back({input, fs::path(input).filename(), {}});
    } else {
      throw DataError(input, ": no such file or folder");
    }
  }
  if (pictures.empty()) throw DataError("--input: no pictures found");
  for (Picture& picture : pictures) picture.txt = fs::path(picture.name).replace_extension(".txt");
  make_unique(pictures, &Picture::name);
  make_unique(pictures, &Picture::txt);
  return pictures;
}

struct Read {
  Picture picture;
  data::Image image;
};

class Predictor {
 public:
  Predictor(const PredictFlags& flags, const CommonOptions& common)
      : flags_(flags), common_(common), stream_(open_stream(common)), loaded_(load_model(flags.weights_file, flags.weights, common, stream_)) {
    if (!flags.imgsz.empty()) {
      const PictureSize size = parse_size("--imgsz", flags.imgsz);
      loaded_.config_tree.set_image_size(size.height, size.width, "--imgsz");
    }
    if (!flags.exif.empty()) loaded_.config_tree.set("data.exif", nlohmann::json(flags.exif).dump(), "--exif");
    loaded_.config = loaded_.config_tree.resolve();
    const auto size = data::output_size(loaded_.config.val.transforms);
    height_ = size[0];
    width_ = size[1];
  }

  Outcome run() {
    const std::vector<Picture> pictures = find_pictures(flags_.input);
    std::vector<Read> batch;
    for (std::size_t i = 0; i < pictures.size(); ++i) {
      try {
        batch.push_back({pictures[i], data::decode_image(pictures[i].file, loaded_.config.exif, 0, 0, loaded_.config.limits).image});   // no json states a size: auto turns
      } catch (const DataError& error) {
        if (flags_.bad_images == "stop") throw;
        std::cerr << escaped(concat("warning: left out: ", error.what())) << '\n';
        ++unreadable_;
      }
      if (static_cast<std::int64_t>(batch.size()) >= flags_.batch_size || i + 1 == pictures.size()) {
        if (!batch.empty()) predict(batch);
        batch.clear();
      }
    }
    if (!flags_.save_json.empty()) data::write_detections(flags_.save_json, detections_, &names_);
    if (unreadable_ == static_cast<std::int64_t>(pictures.size())) throw DataError("none of ", pictures.size(), " pictures could be read");
    if (unreadable_ > 0 && !common_.quiet) std::cerr << unreadable_ << " of " << pictures.size() << " pictures could not be read\n";
    Outcome outcome;
    outcome.json["images"] = images_;
    return outcome;
  }

 private:
  void predict(const std::vector<Read>& batch) {
    const auto n = static_cast<std::int64_t>(batch.size());
    data::Batch pixels;
    pixels.images = host_zeros({n, height_, width_, 3}, DType::u8);
    pixels.size_h = height_;
    pixels.size_w = width_;
    std::vector<std::int64_t> widths, heights;
    for (std::int64_t i = 0; i < n; ++i) {
      const data::Image& image = batch[static_cast<std::size_t>(i)].image;
      const data::Image resized = data::resize_bilinear(image, width_, height_);
      std::copy(resized.rgb.begin(), resized.rgb.end(), pixels.images.data<std::uint8_t>() + i * height_ * width_ * 3);
      widths.push_back(image.width);
      heights.push_back(image.height);
    }
    Context ctx(stream_, nullptr, false);
    const models::DecoderOutput output = loaded_.model->forward(ctx, Variable(train::pictures_to_device(stream_, pixels, loaded_.store->compute_dtype())));
    const auto boxes = models::postprocess(stream_, output.logits.back().value(), output.boxes.back().value(), widths, heights, loaded_.config.num_top_queries);
    for (std::size_t i = 0; i < batch.size(); ++i) take(batch[i], boxes[i]);
  }

  void take(const Read& read, const std::vector<models::ScoredBox>& boxes) {
    const std::int64_t id = next_id_++;
    names_[id] = read.picture.name.generic_string();
    nlohmann::json list = nlohmann::json::array();
    std::vector<data::DrawnBox> drawn;
    std::string txt;
    for (const models::ScoredBox& box : boxes) {
      if (box.score < flags_.conf) continue;
      const data::Category& category = loaded_.classes[static_cast<std::size_t>(box.label)];
      const auto& [x0, y0, x1, y1] = box.xyxy_px;
      const std::array<double, 4> xywh = {x0, y0, x1 - x0, y1 - y0};
      detections_.push_back({id, category.id, xywh, box.score});
      list.push_back({{"category_id", category.id}, {"name", category.name}, {"bbox", xywh}, {"score", box.score}});
      drawn.insert(drawn.begin(), {box.xyxy_px, box.label, fmt::format("{} {:.2f}", category.name, box.score), false});   // rising score
      const auto w = static_cast<double>(read.image.width), h = static_cast<double>(read.image.height);
      txt += fmt::format("{} {:.6f} {:.6f} {:.6f} {:.6f} {:.6f}\n", box.label, (x0 + x1) / 2 / w, (y0 + y1) / 2 / h, (x1 - x0) / w, (y1 - y0) / h, box.score);
    }
    if (!common_.json) print_line(escaped(fmt::format("{}: {} detections", read.picture.name.generic_string(), list.size())));
    images_.push_back({{"file", read.picture.name.generic_string()}, {"width", read.image.width}, {"height", read.image.height}, {"dets", std::move(list)}});
    if (!flags_.vis.empty()) {
      data::Image picture = read.image;
      data::draw_boxes(picture, drawn);
      data::write_image(output_path(flags_.vis, read.picture.name), picture);
    }
    if (!flags_.save_txt.empty()) replace_file(output_path(flags_.save_txt, read.picture.txt), txt);
  }

  static fs::path output_path(const fs::path& folder, const fs::path& name) {
    const fs::path path = folder / name.lexically_normal();
    make_folder(path.parent_path());
    return path;
  }

  const PredictFlags& flags_;
  const CommonOptions& common_;
  Stream stream_;
  LoadedModel loaded_;
  std::int64_t height_ = 0, width_ = 0, next_id_ = 0, unreadable_ = 0;
  std::vector<data::Detection> detections_;
  std::map<std::int64_t, std::string> names_;
  nlohmann::json images_ = nlohmann::json::array();
};

}  // namespace

Verb add_predict(CLI::App& app, const CommonOptions& common) {
  const auto flags = std::make_shared<PredictFlags>();
  app.add_option("-r,--resume", flags->weights_file, "weights")->required();
  app.add_option("--weights", flags->weights, "auto (those that scored best), ema or model")->check(CLI::IsMember({"auto", "ema", "model"}));
  app.add_option("--input", flags->input, "pictures, folders of pictures, or .txt lists of pictures")->required();
  app.add_option("--conf", flags->conf, "lowest score of a detection")->check(real_number(0, 1));
  app.add_option("--batch-size", flags->batch_size, "pictures at a time")->check(whole_number(1));
  app.add_option("--imgsz", flags->imgsz, "picture size, N or HxW, multiples of 32");
  app.add_option("--save-json", flags->save_json, "write the detections as a COCO results file");
  app.add_option("--vis", flags->vis, "folder for pictures with boxes");
  app.add_option("--save-txt", flags->save_txt, "folder for YOLO text files");
  app.add_option("--exif", flags->exif, "auto, apply or ignore")->check(CLI::IsMember({"auto", "apply", "ignore"}));
  app.add_option("--bad-images", flags->bad_images, "auto or skip: left out and counted; stop")->check(CLI::IsMember({"auto", "skip", "stop"}));
  return [flags, &common] {
    expect_alone("predict");
    return Predictor(*flags, common).run();
  };
}

}  // namespace detr::apps

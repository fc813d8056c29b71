#pragma once
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "data/synth.h"
#include "tests/support.h"
#include "tests/tiny_model.h"
#include "train/metric_log.h"
#include "train/trainer.h"

namespace detr::test {

/// Writes log.txt and keeps the rest; may set the stop flag. Notices calls on more than one thread.
class Recorder final : public train::Reporter {
 public:
  explicit Recorder(const std::filesystem::path& folder) : log_(folder) {}
  void note(const std::string& line) override {
    look_at_thread();
    notes.push_back(line);
  }
  void warning(const std::string& line) override {
    look_at_thread();
    warnings.push_back(line);
  }
  void step(const train::StepRecord& record) override {
    look_at_thread();
    steps.push_back(record);
    log_.step(record, true);
    if (record.step == stop_at_step) stop = true;
    if (on_step) on_step(record);
  }
  void evaluating(std::int64_t, std::int64_t) override {
    look_at_thread();
    if (stop_in_evaluation) stop = true;
  }
  void epoch(const train::EpochRecord& record) override {
    look_at_thread();
    epochs.push_back(record);
    log_.epoch(record);
  }
  void saved(const std::string& file, std::int64_t) override {
    look_at_thread();
    files.push_back(file);
  }

  std::vector<std::string> notes, warnings, files;
  std::vector<train::StepRecord> steps;
  std::vector<train::EpochRecord> epochs;
  std::atomic<bool> stop{false};
  std::int64_t stop_at_step = -1;
  bool stop_in_evaluation = false;
  std::function<void(const train::StepRecord&)> on_step;
  std::atomic<bool> several_threads{false};

 private:
  void look_at_thread() {
    std::thread::id none;
    if (!thread_.compare_exchange_strong(none, std::this_thread::get_id()) && thread_ != std::this_thread::get_id()) several_threads = true;
  }

  std::atomic<std::thread::id> thread_{};
  train::MetricLog log_;
};

/// Nine training and three validation pictures of 64 pixels; two epochs of three steps.
struct Project {
  TempDir dir;
  train::SplitData train, val;
  train::RunConfig config;

  Project() {
    data::SynthOptions synth;
    synth.out = dir / "data";
    synth.images = 12;
    synth.val_share = 0.25;
    synth.classes = 2;
    synth.height = synth.width = 64;
    synth.max_boxes = 3;
    synth.empty_share = 0.2;
    data::make_synthetic(synth);
    train = read("train");
    val = read("val");
    config.model = tiny_config();
    config.epochs = 2;
    config.seed = 4;
    config.train.transforms = data::training_transforms(64, 64);
    config.train.policy = {1, {"RandomZoomOut"}};
    config.train.batch_size = 3;
    config.train.num_workers = 1;
    config.train.scales = {64, 96};
    config.train.scales_stop_epoch = 1;
    config.val.transforms = data::evaluation_transforms(64, 64);
    config.val.batch_size = 2;
    config.val.num_workers = 1;
    config.num_top_queries = 12;
    config.optimizer.lr = 1e-3;
  }

  train::SplitData read(const std::string& split) const {
    data::Findings findings;
    const auto coco = std::make_shared<data::CocoData>(data::read_coco(dir / "data" / "annotations" / ("instances_" + split + ".json"), findings));
    return {coco, dir / "data" / "images" / split};
  }

  /// Options of a run in the folder `name`.
  train::RunOptions options(const std::string& name, const std::filesystem::path& resume = {}) const {
    train::RunOptions options;
    options.train = train;
    options.val = val;
    options.output_dir = dir / name;
    std::filesystem::create_directories(options.output_dir);
    options.resume = resume;
    options.config_json = "{}";
    options.version = "test";
    return options;
  }
  std::filesystem::path last(const std::string& name) const { return dir / name / "last.safetensors"; }
};

}  // namespace detr::test

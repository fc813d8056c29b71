#include "train/trainer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/train/project.h"

using namespace detr;
using namespace detr::test;
using namespace detr::train;
namespace fs = std::filesystem;

namespace {

RunSummary run(const RunConfig& config, const RunOptions& options, Recorder& recorder, int threads = 1) {
  Trainer trainer(config, options, Stream::cpu(threads), recorder);
  return trainer.run(recorder.stop);
}

/// What log.txt holds of each epoch but times and the last epoch's raw AP.
std::string losses_of(const fs::path& folder) {
  std::istringstream lines(read_text(folder / "log.txt"));
  std::string text, line;
  while (std::getline(lines, line)) {
    const auto object = nlohmann::ordered_json::parse(line);
    for (const auto& [key, value] : object.items()) {
      if (key.starts_with("train_l") || key == "epoch" || key == "step" || key == "test_coco_eval_bbox") text += key + " " + value.dump() + "\n";
    }
  }
  return text;
}

bool contains(const std::vector<std::string>& lines, const std::string& text) {
  for (const std::string& line : lines) {
    if (line.find(text) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("trainer: stopping and going on equals not stopping", "[cpu]") {
  const Project project;
  Recorder straight(project.dir / "straight");
  const RunSummary wanted = run(project.config, project.options("straight"), straight);
  REQUIRE(wanted.end == RunEnd::finished);
  CHECK(wanted.state.step == 6);
  CHECK(wanted.state.epoch == 2);
  CHECK(wanted.state.skipped == 0);
  REQUIRE(straight.epochs.size() == 2);
  CHECK(straight.epochs[0].evaluation.has_value());
  CHECK_FALSE(straight.epochs[0].raw_evaluation.has_value());
  CHECK(straight.epochs[1].raw_evaluation.has_value());
  CHECK(fs::exists(project.dir / "straight" / "best.safetensors"));
  CHECK(wanted.state.best_ap >= 0);
  CHECK(read_checkpoint_info(project.last("straight")).state_hash == wanted.hash);
  CHECK(read_checkpoint_info(project.dir / "straight" / "best.safetensors").state_hash.size() == 16);
  const std::string log = losses_of(project.dir / "straight");
  CHECK_FALSE(log.empty());

  SECTION("a finished run has nothing to do") {
    Recorder again(project.dir / "straight");
    const RunSummary summary = run(project.config, project.options("straight", project.last("straight")), again);
    CHECK(summary.end == RunEnd::already_finished);
    CHECK(summary.hash == wanted.hash);
    CHECK(again.steps.empty());
  }
  SECTION("threads") {
    Recorder recorder(project.dir / "threads");
    CHECK(run(project.config, project.options("threads"), recorder, 2).hash == wanted.hash);
    CHECK(losses_of(project.dir / "threads") == log);
  }
  SECTION("stopped after a step; 3 is an epoch's end") {
    for (const std::int64_t step : {1, 3, 5}) {
      CAPTURE(step);
      const std::string name = concat("stop", step);
      Recorder first(project.dir / name);
      first.stop_at_step = step;
      const RunSummary stopped = run(project.config, project.options(name), first);
      CHECK(stopped.end == RunEnd::stopped);
      CHECK(stopped.state.step == step);
      CHECK(first.epochs.size() == (step > 3 ? 1 : 0));
      Recorder second(project.dir / name);
      const RunSummary summary = run(project.config, project.options(name, project.last(name)), second);
      CHECK(summary.end == RunEnd::finished);
      CHECK(summary.hash == wanted.hash);
      CHECK(losses_of(project.dir / name) == log);
      CHECK(summary.state.best_ap == wanted.state.best_ap);
      CHECK(second.steps.front().step == step + 1);
      CHECK(contains(second.notes, concat("resumed   ", project.last(name).string(), " at step ", step)));
    }
  }
  SECTION("stopped within an evaluation") {
    Recorder first(project.dir / "eval");
    first.stop_in_evaluation = true;
    CHECK(run(project.config, project.options("eval"), first).end == RunEnd::stopped);
    CHECK(first.epochs.empty());
    Recorder second(project.dir / "eval");
    CHECK(run(project.config, project.options("eval", project.last("eval")), second).hash == wanted.hash);
    REQUIRE(second.epochs.size() == 2);
    CHECK(second.epochs[0].evaluation.has_value());
    CHECK(losses_of(project.dir / "eval") == log);
  }
  SECTION("a limit of steps") {
    RunOptions options = project.options("limit");
    options.max_steps = 4;
    Recorder first(project.dir / "limit");
    const RunSummary part = run(project.config, options, first);
    CHECK(part.end == RunEnd::finished);
    CHECK(part.state.step == 4);
    CHECK(contains(first.notes, "stopped at step 4 by the step limit, within epoch 1: not evaluated"));
    Recorder second(project.dir / "limit");
    CHECK(run(project.config, project.options("limit", project.last("limit")), second).hash == wanted.hash);
    CHECK(losses_of(project.dir / "limit") == log);
  }
}

TEST_CASE("trainer: a run that goes on with another batch takes up where the pictures were, and says what has changed", "[cpu]") {
  struct Case {
    std::int64_t batch, steps;   // of the run in all: two of three pictures each, then the rest of two epochs
    std::string note;
  };
  for (const auto& [batch, steps, note] : {Case{2, 7, ""}, Case{4, 5, "resumed   with other batches: 2 of the 6 pictures that epoch 0 has seen come again"}}) {
    Project project;
    CAPTURE(batch);
    RunOptions options = project.options("out");
    options.config_json = R"({"optimizer": {"lr": 0.1}, "print_every": 50, "seed": 4})";
    Recorder first(project.dir / "out");
    first.stop_at_step = 2;
    REQUIRE(run(project.config, options, first).end == RunEnd::stopped);
    const CheckpointInfo info = read_checkpoint_info(project.last("out"));
    CHECK(info.epoch_samples == 6);
    CHECK(info.ranks == 1);
    CHECK(info.manifest.size() == 16);

    project.config.train.batch_size = batch;
    options.resume = project.last("out");
    options.config_json = R"({"optimizer": {"lr": 0.2}, "print_every": 7, "accum": 1})";
    Recorder second(project.dir / "out");
    const RunSummary summary = run(project.config, options, second);
    CHECK(summary.end == RunEnd::finished);
    CHECK(summary.state.step == steps);
    CHECK(summary.state.epoch == 2);
    CHECK(second.steps.front().epoch_step == 6 / batch + 1);
    CHECK(contains(second.notes, "resumed   with other settings: accum: none -> 1; optimizer.lr: 0.1 -> 0.2; seed: 4 -> none"));
    CHECK(contains(second.notes, "resumed   with other batches") == !note.empty());
    CHECK(contains(second.notes, note));
    Recorder again(project.dir / "out");
    CHECK(run(project.config, options, again).end == RunEnd::already_finished);
    CHECK_FALSE(contains(again.notes, "with other settings"));
  }
}

TEST_CASE("trainer: a set without any box trains", "[cpu]") {
  Project project;
  const auto empty = std::make_shared<data::CocoData>(*project.train.coco);
  empty->annotations.clear();
  for (data::ImageRecord& image : empty->images) image.first = image.count = 0;
  project.train.coco = empty;
  project.val = {};
  project.config.epochs = 1;
  Recorder recorder(project.dir / "out");
  const RunSummary summary = run(project.config, project.options("out"), recorder);
  CHECK(summary.end == RunEnd::finished);
  CHECK(summary.state.skipped == 0);
  CHECK(recorder.warnings.empty());
  REQUIRE(recorder.epochs.size() == 1);
  CHECK(recorder.epochs[0].loss > 0);
  CHECK_FALSE(recorder.epochs[0].evaluation.has_value());

  project.config.drop_empty = true;
  expect_throws<DataError>([&] { run(project.config, project.options("none"), recorder); }, "there is nothing to train on: no images with boxes");
}

TEST_CASE("trainer: too many steps that are not finite end the run", "[cpu]") {
  Project project;
  project.config.optimizer.lr = 1e30;
  project.config.optimizer.clip_max_norm = 0;
  project.config.warmup_steps = 0;
  project.config.max_skips = 2;
  project.config.train.batch_size = 1;
  Recorder recorder(project.dir / "out");
  expect_throws<Diverged>([&] { run(project.config, project.options("out"), recorder); }, "3 such steps in a row");
  CHECK(contains(recorder.warnings, " is not finite (loss "));
  CHECK(contains(recorder.warnings, "; images "));
  CHECK(contains(recorder.warnings, "; skipped"));

  // An evaluation before that: also a matter of the weights, not of the data.
  project.config.train.batch_size = 3;
  Recorder evaluated(project.dir / "evaluated");
  expect_throws<Diverged>([&] { run(project.config, project.options("evaluated"), evaluated); }, ": the model's boxes or scores are not finite");
}

TEST_CASE("trainer: other classes, frozen parts, weights to start from", "[cpu]") {
  Project project;
  project.config.epochs = 1;
  Recorder recorder(project.dir / "a");
  run(project.config, project.options("a"), recorder);
  CHECK(contains(recorder.notes, "weights   random; backbone: random"));

  Project renamed;
  const auto other = std::make_shared<data::CocoData>(*renamed.train.coco);
  other->categories[0].name = "something else";
  renamed.train.coco = other;
  expect_throws<DataError>([&] { run(renamed.config, renamed.options("b", project.last("a")), recorder); }, "was trained on other classes");

  RunOptions options = project.options("c");
  options.tuning = project.dir / "a" / "best.safetensors";
  options.freeze = {"^backbone\\."};
  Recorder frozen(project.dir / "c");
  Trainer trainer(project.config, options, Stream::cpu(1), frozen);
  CHECK(contains(frozen.notes, "100 % of the weights"));
  const Parameter& stem = trainer.model().parameters().find("backbone.conv1.conv1_1.conv.weight");
  const Parameter& head = trainer.model().parameters().find("decoder.enc_score_head.weight");
  CHECK_FALSE(stem.trainable());
  const std::vector<double> stem_before = values_of(stem.value()), head_before = values_of(head.value());
  trainer.run(frozen.stop);
  CHECK(values_of(stem.value()) == stem_before);
  CHECK(values_of(head.value()) != head_before);
}

TEST_CASE("trainer: overfitting trains and evaluates on the first pictures as they are", "[cpu]") {
  Project project;
  RunOptions options = project.options("out");
  options.overfit = 2;
  project.config.train.batch_size = 2;
  Recorder recorder(project.dir / "out");
  Trainer trainer(project.config, options, Stream::cpu(1), recorder);
  CHECK(trainer.steps_per_epoch() == 1);
  CHECK(trainer.validation().coco == project.train.coco);
  CHECK(contains(recorder.notes, "augment   none (--overfit)"));
  const RunSummary summary = trainer.run(recorder.stop);
  CHECK(summary.state.step == 2);
  CHECK(trainer.detections().size() == 2 * 12);
}

TEST_CASE("trainer: the schedule says what an epoch does with pictures that fill no batch", "[cpu]") {
  Project project;   // nine pictures
  const auto line = [&](std::int64_t batch, bool drop_last, std::int64_t accum) {
    project.config.train.batch_size = batch;
    project.config.train.drop_last = drop_last;
    project.config.accum = accum;
    Recorder recorder(project.dir / "out");
    const Trainer trainer(project.config, project.options("out"), Stream::cpu(1), recorder);
    const auto found = std::ranges::find_if(recorder.notes, [](const std::string& note) { return note.starts_with("schedule"); });
    return found == recorder.notes.end() ? std::string() : *found;
  };
  CHECK(line(3, true, 1).starts_with("schedule  2 epochs x 3 steps; batch 3; lr "));
  CHECK(line(4, true, 2).starts_with("schedule  2 epochs x 2 steps (each epoch leaves out 1 of 9 pictures); batch 4 = 2 x accum 2; lr "));
  CHECK(line(4, false, 1).starts_with("schedule  2 epochs x 3 steps (each epoch has 9 pictures, and takes 3 again to fill its last step); batch 4; lr "));
  CHECK(line(12, true, 1).starts_with("schedule  2 epochs x 1 steps (each epoch has 9 pictures, and takes 3 again to fill its last step); batch 12; lr "));
}

TEST_CASE("trainer: no better AP for a while ends the run", "[cpu]") {
  Project project;
  project.config.epochs = 6;
  project.config.patience = 1;
  project.config.optimizer.lr = 0;
  Recorder recorder(project.dir / "out");
  const RunSummary summary = run(project.config, project.options("out"), recorder);
  CHECK(summary.end == RunEnd::finished);
  CHECK(summary.state.epoch == 2);   // the first evaluation is the best, the second brings the same
  CHECK(contains(recorder.notes, "no better AP in 1 evaluations: done"));

  // It stays finished until there is more patience.
  Recorder again(project.dir / "out");
  const RunSummary second = run(project.config, project.options("out", project.last("out")), again);
  CHECK(second.end == RunEnd::already_finished);
  CHECK(second.state.step == summary.state.step);
  CHECK(second.hash == summary.hash);
  CHECK(again.steps.empty());
  project.config.patience = 2;
  Recorder more(project.dir / "out");
  const RunSummary third = run(project.config, project.options("out", project.last("out")), more);
  CHECK(third.end == RunEnd::finished);
  CHECK(third.state.epoch == 3);
}

TEST_CASE("trainer: pictures that cannot be read are reported on the thread that trains", "[cpu]") {
  Project project;
  project.config.bad_images = data::BadImages::skip;
  std::vector<std::int64_t> ids;
  for (const SplitData* split : {&project.train, &project.val}) {
    const data::ImageRecord& image = split->coco->images.at(1);
    write_text(split->images / image.file_name, "<html>");
    ids.push_back(image.id);
  }
  Recorder recorder(project.dir / "out");
  CHECK(run(project.config, project.options("out"), recorder).end == RunEnd::finished);
  CHECK_FALSE(recorder.several_threads);
  REQUIRE(recorder.warnings.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) CHECK(recorder.warnings[i].starts_with(concat("image ", ids[i], " left out: ")));

  // One that ends the run has been told by then.
  project.config.bad_images = data::BadImages::stop;
  Recorder stopped(project.dir / "stopped");
  expect_throws<DataError>([&] { run(project.config, project.options("stopped"), stopped); }, project.train.coco->images.at(1).file_name);
  CHECK(contains(stopped.warnings, concat("image ", ids[0], " left out: ")));
  CHECK_FALSE(stopped.several_threads);
}

TEST_CASE("trainer: the best weights that cannot be written are a warning, and the third failure the end", "[cpu]") {
  Project project;
  write_text(project.dir / "out" / "best.safetensors" / "x", "where the file should be");
  Recorder recorder(project.dir / "out");
  const RunSummary summary = run(project.config, project.options("out"), recorder);
  CHECK(summary.end == RunEnd::finished);
  CHECK(summary.state.best_epoch == -1);   // what best.safetensors would hold
  CHECK(contains(recorder.warnings, "best.safetensors: cannot be renamed into place: "));
  CHECK(contains(recorder.warnings, "; the run goes on, and tries again"));
  CHECK(fs::exists(project.last("out")));

  project.config.epochs = 4;
  project.config.save_every = 0;   // so that no other save is between
  Recorder third(project.dir / "out");
  expect_throws<StorageError>([&] { run(project.config, project.options("out"), third); }, "(three times in a row)");
  CHECK(third.epochs.size() == 2);
}

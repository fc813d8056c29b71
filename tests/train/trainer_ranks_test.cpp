// Whole runs on several ranks.
#include "dist/build.h"
#include "dist/gloo/communicator.h"
#include "tests/dist/ranks.h"
#include "tests/train/project.h"

using namespace detr;
using namespace detr::test;
using namespace detr::train;

namespace {

const dist::Milliseconds kPatience(60000);

/// What a run has left on each rank.
struct Runs {
  std::vector<RunSummary> summaries;
  std::vector<std::unique_ptr<Recorder>> recorders;
  std::vector<std::string> thrown;
};

/// `change` may change a rank's options and configuration.
Runs run_on(const Project& project, int ranks, const std::string& name, const std::filesystem::path& resume = {},
            const std::function<void(int rank, RunConfig& config, RunOptions& options, Recorder& recorder)>& change = {}) {
  Runs runs;
  runs.summaries.resize(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    std::filesystem::create_directories(project.dir / concat(name, "-rank", r));
    runs.recorders.push_back(std::make_unique<Recorder>(project.dir / concat(name, "-rank", r)));
  }
  RunOptions shared = project.options(name, resume);
  runs.thrown = dist::test::run_ranks(ranks, [&](const dist::Meeting& meeting) {
    RunOptions options = shared;
    RunConfig config = project.config;
    Recorder& recorder = *runs.recorders[static_cast<std::size_t>(meeting.rank)];
    const auto control = ranks > 1 ? dist::test::meet(meeting) : nullptr;
    options.ranks.control = control;
    options.ranks.connect = [control](const Stream&) { return dist::gloo_communicator(control, kPatience, {"127.0.0.1", kPatience}); };
    options.ranks.settings = {{"engine", "gloo"}};
    options.config_json = R"({"optimizer": {"lr": 0.1}})";
    if (change) change(meeting.rank, config, options, recorder);
    Trainer trainer(config, options, Stream::cpu(1), recorder);
    runs.summaries[static_cast<std::size_t>(meeting.rank)] = trainer.run(recorder.stop);
  }, kPatience);
  return runs;
}

}  // namespace

TEST_CASE("trainer on ranks: equal replicas, one reporter, and the same bits when stopped and resumed", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  const Project project;
  const Runs straight = run_on(project, 3, "straight");
  for (std::size_t r = 0; r < 3; ++r) {
    REQUIRE(straight.thrown[r] == "");
    CHECK(straight.summaries[r].hash == straight.summaries[0].hash);
    CHECK(straight.summaries[r].state.step == 6);
    CHECK(straight.summaries[r].state.best_ap == straight.summaries[0].state.best_ap);
    const Recorder& recorder = *straight.recorders[r];
    CHECK(recorder.epochs.size() == (r == 0 ? 2 : 0));
    CHECK(recorder.steps.size() == (r == 0 ? 6 : 0));
    CHECK(recorder.notes.empty() == (r != 0));
  }
  CHECK(straight.recorders[0]->epochs[1].evaluation->images == 3);
  CHECK(std::ranges::any_of(straight.recorders[0]->notes, [](const std::string& note) { return note.find("batch 3 = 3 ranks x 1 x accum 1; ") != std::string::npos; }));

  const Runs stopped = run_on(project, 3, "stopped", {}, [](int rank, RunConfig&, RunOptions&, Recorder& recorder) {
    if (rank == 0) recorder.stop_at_step = 2;   // one rank is asked; its loader tells the others
  });
  for (std::size_t r = 0; r < 3; ++r) {
    REQUIRE(stopped.thrown[r] == "");
    CHECK(stopped.summaries[r].end == RunEnd::stopped);
    CHECK(stopped.summaries[r].state.step == stopped.summaries[0].state.step);
    CHECK(stopped.summaries[r].hash == stopped.summaries[0].hash);
  }
  CHECK(stopped.summaries[0].state.step >= 2);
  const Runs resumed = run_on(project, 3, "stopped", project.last("stopped"));
  for (std::size_t r = 0; r < 3; ++r) {
    REQUIRE(resumed.thrown[r] == "");
    CHECK(resumed.summaries[r].hash == straight.summaries[0].hash);
  }
}

TEST_CASE("trainer on ranks: one that fails does not wait for what its loader waits for", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  const Project project;
  const dist::Clock::time_point begin = dist::Clock::now();
  const Runs runs = run_on(project, 2, "fails", {}, [](int rank, RunConfig& config, RunOptions&, Recorder& recorder) {
    config.train.batch_size = 2;
    config.train.drop_last = false;
    if (rank != 0) return;
    config.train.num_workers = 8;   // its loader runs ahead, to where it waits for the other's
    recorder.on_step = [](const StepRecord&) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      throw StorageError("nothing can be told");
    };
  });
  CHECK(runs.thrown[0] == "nothing can be told");
  CHECK_FALSE(runs.thrown[1].empty());
  CHECK(dist::Clock::now() - begin < kPatience);
}

TEST_CASE("trainer on ranks: a stop wish in an evaluation holds for all", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  const Project project;
  const Runs runs = run_on(project, 2, "eval", {}, [](int, RunConfig& config, RunOptions&, Recorder& recorder) {
    config.train.batch_size = 4;
    recorder.stop_in_evaluation = true;
  });
  for (std::size_t r = 0; r < 2; ++r) {
    REQUIRE(runs.thrown[r] == "");
    CHECK(runs.summaries[r].end == RunEnd::stopped);
    CHECK(runs.summaries[r].state.epoch == 0);
    CHECK(runs.summaries[r].state.epoch_step == 2);
  }
}

TEST_CASE("trainer on ranks: the twelve numbers do not depend on how many score", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  // Weights that have learnt something, scored by 1 to 4 ranks: three pictures are no multiple of any but one and three.
  const Project project;
  const Runs trained = run_on(project, 1, "trained");
  std::vector<data::EvalResult> results;
  for (const int ranks : {1, 2, 3, 4}) {
    const Runs runs = run_on(project, ranks, concat("scored", ranks), {}, [&](int, RunConfig& config, RunOptions& options, Recorder&) {
      options.tuning = project.last("trained");
      options.max_steps = 0;
      config.epochs = 1;
      config.train.batch_size = 12;
      config.train.drop_last = false;
      config.optimizer.lr = 1e-30;           // the step changes no weight
      config.optimizer.use_ema = true;
      config.optimizer.ema_decay = 1 - 1e-12;   // and the average keeps the statistics that were loaded
    });
    for (const std::string& text : runs.thrown) REQUIRE(text == "");
    results.push_back(*runs.recorders[0]->epochs.at(0).evaluation);
  }
  for (const data::EvalResult& result : results) {
    for (std::size_t i = 0; i < 12; ++i) CHECK(result.stats()[i].second == results[0].stats()[i].second);
    CHECK(result.images == 3);
    CHECK(result.dets == results[0].dets);
  }
  CHECK(results[0].dets == 3 * 12);
}

TEST_CASE("trainer on ranks: ranks that are not of one run stop before the first step", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  const Project project;
  const auto expect = [&](const std::string& text, const std::function<void(RunConfig& config, RunOptions& options)>& change) {
    const Runs runs = run_on(project, 2, "differs", {}, [&](int rank, RunConfig& config, RunOptions& options, Recorder&) {
      config.train.batch_size = 4;
      if (rank == 1) change(config, options);
    });
    for (const std::string& thrown : runs.thrown) {
      CAPTURE(thrown);
      CHECK(thrown.find(text) != std::string::npos);
    }
    CHECK(runs.recorders[0]->steps.empty());
  };
  expect("rank 1: /optimizer/lr is 0.5, rank 0 has 0.1", [](RunConfig&, RunOptions& options) { options.config_json = R"({"optimizer": {"lr": 0.5}})"; });
  expect("rank 1: version is other, rank 0 has test", [](RunConfig&, RunOptions& options) { options.version = "other"; });
  expect("rank 1: training data is ", [](RunConfig&, RunOptions& options) {
    auto other = std::make_shared<data::CocoData>(*options.train.coco);
    other->annotations.at(0).label = 1 - other->annotations.at(0).label;
    options.train.coco = other;
  });
  expect("rank 1: parameter ", [](RunConfig& config, RunOptions&) { config.model.encoder.dim_feedforward += 8; });
  const Runs local = run_on(project, 2, "local", {}, [&](int rank, RunConfig& config, RunOptions& options, Recorder&) {
    config.train.batch_size = 4;
    if (rank == 1) config.train.num_workers = 2;
    options.ranks.settings = {{"engine", "gloo"}, {"speed", "any"}};
    options.config_json = rank == 0 ? R"({"print_every": 50, "train_dataloader": {"num_workers": 1, "dataset": {"img_folder": "a"}}})"
                                    : R"({"print_every": 7, "train_dataloader": {"num_workers": 2, "dataset": {"img_folder": "b"}}})";
  });
  for (const std::string& thrown : local.thrown) CHECK(thrown == "");
  CHECK(std::ranges::count(local.recorders[0]->notes, "comm      engine gloo; speed any") == 1);
  expect("rank 1: engine is x, rank 0 has gloo", [](RunConfig&, RunOptions& options) { options.ranks.settings = {{"engine", "x"}}; });
}

TEST_CASE("trainer on ranks: the reference's rules change nothing for one rank, and all ranks' weights in the same way", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  const Project project;
  const auto hash = [&](int ranks, bool rules) {
    const Runs runs = run_on(project, ranks, concat(ranks, rules), {}, [&](int, RunConfig& config, RunOptions&, Recorder&) {
      config.train.batch_size = 4;
      config.rank_rules = rules;
    });
    for (const std::string& text : runs.thrown) REQUIRE(text == "");
    for (const RunSummary& summary : runs.summaries) CHECK(summary.hash == runs.summaries[0].hash);
    return runs.summaries[0].hash;
  };
  CHECK(hash(1, true) == hash(1, false));
  CHECK(hash(2, true) != hash(2, false));
}

TEST_CASE("trainer on ranks: a parameter that no rank's loss reaches is told once, or ends the run", "[cpu]") {
  if constexpr (!dist::kHasGloo) SKIP("this build has no Gloo");
  const Project project;
  const auto run = [&](const std::string& faults, bool required) {
    return run_on(project, 2, "unused", {}, [&](int rank, RunConfig& config, RunOptions& options, Recorder&) {
      config.train.batch_size = 4;
      options.faults = Faults(faults, rank, 2);
      options.ranks.require_all_used = required;
    });
  };
  const std::string drop = "drop:param=^decoder.query_pos_head,step=1-";
  const std::vector<std::string> names = {"decoder.query_pos_head.layers.1.bias", "decoder.query_pos_head.layers.1.weight", "decoder.query_pos_head.layers.0.bias",
                                          "decoder.query_pos_head.layers.0.weight"};
  {
    const Runs runs = run(drop, false);
    for (const std::string& text : runs.thrown) REQUIRE(text == "");
    std::vector<std::string> wanted;
    for (const std::string& name : names) wanted.push_back("step 2: no loss reaches " + name);
    CHECK(runs.recorders[0]->steps.size() > 2);
    CHECK(runs.recorders[0]->warnings == wanted);
    CHECK(runs.recorders[1]->warnings.empty());
  }
  {
    const Runs runs = run(drop, true);
    for (const std::string& text : runs.thrown) CHECK(text == concat("step 2: no loss reaches ", names[0], ", ", names[1], ", ", names[2], ", ", names[3], " (--require-all-used)"));
  }
  // One rank that reaches it is enough.
  const Runs runs = run(drop + ",rank=1", true);
  for (const std::string& text : runs.thrown) CHECK(text == "");
  CHECK(runs.recorders[0]->warnings.empty());
}

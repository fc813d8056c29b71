#include <algorithm>
#include <atomic>
#include <csignal>
#include <iostream>
#include <regex>

#include "apps/cli.h"
#include "apps/data_sets.h"
#include "apps/engine.h"
#include "apps/eval.h"
#include "apps/launch.h"
#include "apps/output_folder.h"
#include "apps/progress.h"
#include "apps/rank.h"
#include "apps/report.h"
#include "runtime/error.h"
#include "runtime/faults.h"
#include "runtime/files.h"
#include "runtime/text.h"
#include "train/trainer.h"

namespace detr::apps {
namespace {

namespace fs = std::filesystem;

struct TrainFlags {
  DataFlags data;
  std::string resume, tuning, backbone, output_dir, time_limit, save_every, imgsz;
  bool overwrite = false, allow_partial = false, drop_empty = false;
  std::int64_t epochs = 0, max_steps = 0, eval_every = -1, batch_size = 0, overfit = 0, max_skips = -1, num_workers = 0, patience = -1;
  std::string amp;
  bool use_amp = false, no_graph = false;
  double lr = 0;
  std::vector<std::string> freeze;
  RankFlags ranks;
  std::int64_t accum = 0, check_replicas = 1000;
  bool require_all_used = false, test_only = false;
};

std::atomic<bool> stop_wish{false};
volatile std::sig_atomic_t stop_signal = 0;

/// The first signal asks for a stop after the step in hand; a second one ends the process at once.
extern "C" void on_signal(int signal) {
  if (stop_wish.exchange(true)) std::_Exit(128 + signal);
  stop_signal = signal;
}

/// From its construction to the end of the process SIGINT, SIGTERM, SIGUSR1 and SIGHUP are stop wishes (a signal that was ignored at
/// the start stays ignored).
class SignalScope {
 public:
  SignalScope() {
    struct sigaction action {};
    action.sa_handler = on_signal;
    for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) {
      struct sigaction old {};
      ::sigaction(signal, nullptr, &old);
      if (old.sa_handler != SIG_IGN) ::sigaction(signal, &action, nullptr);
    }
  }
};

/// What ranks other than the first have to say: what went wrong on them alone.
class RankReporter final : public train::Reporter {
 public:
  void note(const std::string&) override {}
  void warning(const std::string& line) override { std::cerr << concat("warning: ", escaped(line), "\n") << std::flush; }
  void step(const train::StepRecord&) override {}
  void evaluating(std::int64_t, std::int64_t) override {}
  void epoch(const train::EpochRecord&) override {}
  void saved(const std::string&, std::int64_t) override {}
};

/// `tells`: warns of checkpoints that cannot be used.
fs::path resume_file(const TrainFlags& flags, bool tells, const Moved& moved = {}) {
  if (flags.resume.empty()) return {};
  if (flags.resume != "auto") {
    if (fs::path(flags.resume).extension() == ".pth") throw StorageError(flags.resume, ": a .pth is not read; -r takes a checkpoint that train has written");
    if (!fs::exists(flags.resume)) throw StorageError(flags.resume, ": no such checkpoint");
    return flags.resume;
  }
  if (flags.output_dir.empty()) throw ConfigError("-r auto needs --output-dir");
  std::vector<std::string> skipped;
  const fs::path found = train::newest_checkpoint(flags.output_dir, skipped, moved);
  for (const std::string& line : skipped) {
    if (tells) std::cerr << "warning: skipped " << escaped(line) << '\n';
  }
  if (found.empty() && !skipped.empty()) throw StorageError(flags.output_dir, ": no checkpoint can be used");
  return found;   // none at all: the run starts anew
}

void apply_flags(const TrainFlags& flags, train::Config& config) {
  const auto set = [&](const char* key, auto value, const char* flag) { config.set(key, nlohmann::json(value).dump(), flag); };
  if (flags.epochs > 0) config.set_epochs(flags.epochs, "--epochs");
  if (flags.batch_size > 0) set("train_dataloader.total_batch_size", flags.batch_size, "--batch-size");
  if (flags.lr > 0) set("optimizer.lr", flags.lr, "--lr");
  if (flags.eval_every >= 0) set("eval_every", flags.eval_every, "--eval-every");
  if (flags.max_skips >= 0) set("max_skips", flags.max_skips, "--max-skips");
  if (flags.patience >= 0) set("patience", flags.patience, "--patience");
  if (flags.accum > 0) set("accum", flags.accum, "--accum");
  if (!flags.amp.empty()) set("amp", flags.amp, "--amp");
  if (flags.use_amp) set("amp", "auto", "--use-amp");
  if (flags.no_graph) set("graph", false, "--no-graph");
  if (flags.drop_empty) set("data.drop_empty", true, "--drop-empty");
  if (flags.num_workers > 0) {
    set("train_dataloader.num_workers", flags.num_workers, "--num-workers");
    set("val_dataloader.num_workers", flags.num_workers, "--num-workers");
  }
  if (!flags.imgsz.empty()) {
    const PictureSize size = parse_size("--imgsz", flags.imgsz);
    config.set_image_size(size.height, size.width, "--imgsz");
  }
  if (!flags.save_every.empty() && flags.save_every.back() != 's') config.set("save_every", flags.save_every, "--save-every");
  if (!flags.backbone.empty()) set("PResNet.pretrained", flags.backbone, "--backbone");
  apply_data_flags(flags.data, config);
  apply_rank_flags(flags.ranks, config);
}

std::int64_t steps_of(const std::string& save_every) {
  if (save_every.empty()) return 0;
  const std::string digits = save_every.back() == 's' ? save_every.substr(0, save_every.size() - 1) : save_every;
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos || digits.size() > 9) throw ConfigError("--save-every ", save_every, ": wanted epochs (2) or steps (500s)");
  return save_every.back() == 's' ? std::stoll(digits) : 0;
}

nlohmann::json summary_json(const train::RunSummary& summary, const fs::path& folder) {
  const auto result = [](const std::optional<data::EvalResult>& evaluation) {
    nlohmann::json object = nlohmann::json::object();
    if (evaluation) {
      for (const auto& [name, value] : evaluation->stats()) object[std::string(name)] = number(value);
    }
    return object;
  };
  nlohmann::json best = result(summary.best);
  best["epoch"] = summary.state.best_epoch;
  best["AP"] = summary.state.best_epoch < 0 ? nlohmann::json(nullptr) : number(summary.state.best_ap);
  return {{"output_dir", folder.string()}, {"steps", summary.state.step}, {"epochs", summary.state.epoch}, {"best", best}, {"last", result(summary.last)},
          {"img_per_s", number(summary.images_per_s)}, {"skipped", summary.state.skipped}, {"hash", summary.hash}};
}

void check_flags(const TrainFlags& flags) {
  if (!flags.resume.empty() && !flags.tuning.empty()) throw ConfigError("-r and -t exclude each other: -r goes on with a run, -t starts a new one from weights");
  static_cast<void>(steps_of(flags.save_every));
  if (!flags.time_limit.empty()) static_cast<void>(parse_duration(flags.time_limit));
  for (const std::string& expression : flags.freeze) {
    try {
      static_cast<void>(std::regex(expression));
    } catch (const std::regex_error& error) {
      throw ConfigError("--freeze '", expression, "' is no regular expression: ", error.what());
    }
  }
}

/// This process's place among the ranks of its run.
struct Place {
  World world;
  CommonOptions common;
  Faults faults;
  std::shared_ptr<dist::Control> control;   ///< null where there is one rank
};

/// What a run begins with, from flags and files.
struct Start {
  FileHandle lock;   ///< of the output folder, where it was locked for this
  fs::path resume;
  train::Config config;
  train::RunConfig run;
};

/// The configuration of -c, or of the checkpoint or weights that the run begins with, with the flags.
train::Config read_config(const TrainFlags& flags, const CommonOptions& common, const fs::path& resume) {
  const std::string stored = !resume.empty() ? train::read_checkpoint_info(resume).config : !flags.tuning.empty() && common.config.empty() ? train::read_checkpoint_info(flags.tuning).config : "";
  train::Config config = load_config(common, stored);
  apply_flags(flags, config);
  if (!flags.resume.empty()) config.set("resume", "null", "-r");   // the flag wins over a path in the file
  if (!flags.tuning.empty()) config.set("tuning", "null", "-t");
  return config;
}

/// What the run is told, as far as each process of the job can know it before it knows more than its flags.
train::RunConfig read_early(const TrainFlags& flags, const CommonOptions& common) {
  return read_config(flags, common, common.config.empty() ? resume_file(flags, false) : fs::path()).resolve();
}

/// How a rank talks to the others, whom it meets first: they hear then what is wrong with its configuration.
train::CommConfig read_comm_of_rank(const TrainFlags& flags, const CommonOptions& common) {
  try {
    return read_early(flags, common).comm;
  } catch (const std::exception&) {
    train::Config config;
    apply_rank_flags(flags.ranks, config);
    return config.resolve().comm;
  }
}

Start read_start(const TrainFlags& flags, const Place& place, bool root) {
  for (const std::string& weights : {flags.tuning, flags.backbone}) {
    if (!weights.empty() && !fs::exists(weights)) throw StorageError(weights, ": no such file");
  }
  Start start;
  // Locked before it is looked at: another run may be replacing the files in it.
  if (root && flags.resume == "auto" && fs::is_directory(flags.output_dir)) start.lock = lock_folder(flags.output_dir);
  start.resume = resume_file(flags, root, train::progress_of(place.control));
  start.config = read_config(flags, place.common, start.resume);
  start.run = start.config.resolve();
  if (!start.run.backbone_weights.empty() && !fs::exists(start.run.backbone_weights)) throw StorageError("PResNet.pretrained: ", start.run.backbone_weights, ": no such file");
  return start;
}

train::RunOptions run_options(const TrainFlags& flags, const Start& start, const Stream& stream, const Tell& tell) {
  train::RunOptions options;
  options.train = open_split(flags.data, start.run, "train", true, stream, tell);
  const bool evaluates = start.run.eval_every > 0 && flags.overfit == 0;
  if (evaluates && !has_split(flags.data, start.run, "val")) throw DataError("there is no val split; --eval-every 0 trains without evaluation");
  if (evaluates) {
    options.val = open_split(flags.data, start.run, "val", false, stream, tell);
    expect_same_classes(options.val.coco->file.string(), options.val.coco->categories, options.train.coco->file.string(), options.train.coco->categories);
  }
  options.resume = start.resume;
  options.tuning = flags.tuning;
  options.backbone = start.run.backbone_weights;
  options.config_json = start.config.to_json(-1);
  options.version = version_text();
  options.allow_partial = flags.allow_partial;
  options.max_steps = flags.max_steps;
  options.time_limit_s = flags.time_limit.empty() ? 0 : parse_duration(flags.time_limit);
  options.overfit = flags.overfit;
  options.save_every_steps = steps_of(flags.save_every);
  options.freeze = flags.freeze;
  options.cache_bytes = std::size_t{1} << 29;
  return options;
}

/// `described`: out, engine and addresses of several ranks.
train::RunRanks ranks_of(const TrainFlags& flags, const Place& place, const train::CommConfig& comm, const Stream& stream, std::string& described) {
  train::RunRanks ranks;
  if (place.control) {
    ranks = run_ranks(place.world, comm, place.control, stream, described);
    ranks.failed = [](const std::exception& error) { fail_rank(code_of(error), text_of(error)); };
  }
  ranks.check_every = flags.check_replicas;
  ranks.require_all_used = flags.require_all_used;
  return ranks;
}

/// Where rank 0 writes, on every rank.
fs::path share_folder(const train::RunRanks& ranks, const fs::path& folder) {
  return train::Replicas(ranks).from_root(folder.empty() ? "" : fs::absolute(folder).string(), "output folder");
}

/// From now on a job that fails leaves in the folder what this rank's engine did last. Not before the start is made: until then a
/// failure leaves nothing there.
void record_failures(const train::RunRanks& ranks, const fs::path& folder) {
  write_record_to(folder / "fault", ranks.rank());
  at_failure(write_record);
}

int code_of_end(const train::RunSummary& summary) {
  if (summary.end != train::RunEnd::stopped) return kDone;
  return summary.state.step > 0 ? kStoppedAndSaved : 128 + (stop_signal ? stop_signal : SIGTERM);
}

/// A rank that neither writes nor reports: rank 0 does.
Outcome run_silently(const TrainFlags& flags, const Place& place) {
  const Start start = read_start(flags, place, false);
  const Stream stream = open_stream(place.common, place.faults.failing_allocation());
  train::RunOptions options = run_options(flags, start, stream, [](const std::string&) {});
  std::string described;
  options.ranks = ranks_of(flags, place, start.run.comm, stream, described);
  options.faults = place.faults;
  options.output_dir = share_folder(options.ranks, {});
  RankReporter reporter;
  train::Trainer trainer(start.run, options, stream, reporter);
  record_failures(options.ranks, options.output_dir);
  Outcome outcome;
  outcome.code = code_of_end(trainer.run(stop_wish));
  return outcome;
}

/// The run, or rank 0 of it.
Outcome run_train(const TrainFlags& flags, const Place& place) {
  const CommonOptions& common = place.common;
  const Stream stream = open_stream(common, place.faults.failing_allocation());
  Start start = read_start(flags, place, true);
  const train::RunConfig& run = start.run;
  std::vector<std::string> data_lines;
  const Tell tell = [&, on_stderr = tell_stderr(common.quiet)](const std::string& line) {
    on_stderr(line);
    data_lines.push_back(line);
  };
  train::RunOptions options = run_options(flags, start, stream, tell);
  const FolderRequest request{flags.output_dir, start.resume, start.config.name(), flags.resume == "auto", flags.overwrite};
  const auto output = std::make_shared<OutputFolder>(request, run, std::move(start.lock));
  OutputFolder& folder = *output;
  if (place.control) at_failure([output] { output->discard(); });
  options.output_dir = folder.path();
  options.faults = place.faults;
  std::string described;
  options.ranks = ranks_of(flags, place, run.comm, stream, described);
  share_folder(options.ranks, folder.path());

  Progress progress(folder.path(), common, run.print_every);
  const std::string ranks = described.empty() ? "" : described + ", ";
  progress.note(concat(version_text(), "  ", ranks, stream.device(), ", ", stream.pool().threads(), " threads, ", train::compute_dtype(run.amp, stream), ", deterministic"));
  if (!place.faults.text().empty()) {
    const bool would_capture = run.graph && !stream.device().is_cpu();
    progress.warning(concat("DETRTRAIN_FAULT rehearses failures", would_capture ? ", so steps are not captured as graphs: " : ": ", place.faults.text()));
  }
  progress.note(concat("config    ", start.config.name(), "; output ", folder.path().string()));
  for (const std::string& line : data_lines) progress.log_only(line);
  progress.note("classes   " + data::class_list(options.train.coco->categories));
  for (const std::string& note : start.config.notes()) progress.note("note      " + note);
  if (common.verbose) {
    for (const train::ConfigOrigin& origin : start.config.origins()) {
      if (origin.origin != "default") progress.note(concat("key       ", origin.key, " (", origin.origin, ")"));
    }
  }
  replace_file(folder.path() / "config.json", start.config.to_json());

  // Before the model is built: a stop wish is obeyed inside start-up too. A rank's are the job's.
  std::optional<SignalScope> signals;
  if (!place.control) signals.emplace();
  train::Trainer trainer(run, options, stream, progress);
  folder.start();
  record_failures(options.ranks, fs::absolute(folder.path()));
  RunReport report(folder.path(), start.config, trainer);
  std::string report_error;
  progress.after_epoch = [&](const train::EpochRecord& record) {
    report.write(record);
    if (!report.last_error().empty() && report_error.empty()) progress.warning(report_error = report.last_error());   // once: the cause rarely goes away
  };
  const train::RunSummary summary = trainer.run(stop_wish);
  progress.finish();

  Outcome outcome;
  outcome.json = summary_json(summary, folder.path());
  outcome.code = code_of_end(summary);
  if (summary.end == train::RunEnd::already_finished) progress.note("this run is finished; more --epochs, --max-steps or --patience go on with it");
  if (summary.end == train::RunEnd::stopped)
    progress.note(summary.state.step > 0 ? concat("stopped after step ", summary.state.step, ", saved; -r auto --output-dir ", folder.path().string(), " goes on") : std::string("stopped before the first step"));
  if (!common.json && summary.last) {
    for (const std::string& line : data::summary_lines(*summary.last)) std::cout << line << '\n';   // the run is saved, whether anybody reads this or not
    std::cout.flush();
  }
  progress.note(concat("state hash ", summary.hash, " at step ", summary.state.step));
  return outcome;
}

/// This process's part of the job: all of it, the launcher's, or a rank's.
Outcome take_part(const TrainFlags& flags, const CommonOptions& common) {
  check_flags(flags);
  Place place;
  place.world = world_of_process(flags.ranks, common);
  if (place.world.role == World::Role::launcher) {
    const train::RunConfig run = read_early(flags, common);   // what does not fit is told before anything starts
    static_cast<void>(engine_name(run.comm, place.world.devices[0] == "cpu"));
    expect_equal_parts(run, place.world.size);
    return launch(place.world, run.comm, common);
  }
  place.common = rank_options(place.world, common);
  place.faults = Faults::from_environment(place.world.rank, place.world.size);
  if (place.world.role == World::Role::alone) return run_train(flags, place);

  place.control = join_job(place.world, read_comm_of_rank(flags, common), common, "train");
  place.faults.at("rendezvous", -1);
  return place.world.rank == 0 ? run_train(flags, place) : run_silently(flags, place);
}

/// `eval` with the flags that it shares with train; another one would be ignored.
Outcome test_only(const TrainFlags& flags, const CommonOptions& common, const CLI::App& app) {
  std::vector<std::string> shared = {"test-only", "resume", "data", "ann", "images", "exif", "bad-images", "batch-size", "imgsz", "config", "update", "device", "seed", "threads",
                                           "json", "quiet", "verbose", "log-style"};
  if (flags.resume == "auto") shared.emplace_back("output-dir");
  for (const CLI::Option* option : app.get_options()) {
    const std::vector<std::string>& names = option->get_lnames();
    if (option->count() == 0 || names.empty() || std::find(shared.begin(), shared.end(), names.front()) != shared.end()) continue;
    throw ConfigError("--test-only is eval -r WEIGHTS, which has no --", names.front(), "; leave it out (detrtrain eval --help)");
  }
  expect_alone("--test-only (eval)");
  if (flags.resume.empty()) throw ConfigError("--test-only needs -r WEIGHTS; it is detrtrain eval -r WEIGHTS");
  const fs::path weights = flags.resume == "auto" ? resume_file(flags, true) : fs::path(flags.resume);
  return evaluate_weights({flags.data, weights.string(), flags.imgsz, flags.batch_size}, common);
}

}  // namespace

Verb add_train(CLI::App& app, const CommonOptions& common) {
  const auto flags = std::make_shared<TrainFlags>();
  add_data_flags(app, flags->data);
  app.add_option("--bad-images", flags->data.bad_images, "auto, skip or stop")->check(CLI::IsMember({"auto", "skip", "stop"}));
  app.add_option("-r,--resume", flags->resume, "checkpoint to go on from, or auto: the newest good one in --output-dir");
  app.add_option("-t,--tuning", flags->tuning, "weights to start from, in safetensors; what does not fit starts anew");
  app.add_option("--backbone", flags->backbone, "weights of the backbone to start from");
  app.add_flag("--allow-partial", flags->allow_partial, "take weights that cover under 95 % of the model");
  app.add_option("--epochs", flags->epochs, "epochs; moves the recipe's stop epochs in proportion")->check(whole_number(1));
  app.add_option("--max-steps", flags->max_steps, "stop after this many steps in all")->check(whole_number(1));
  app.add_option("--time-limit", flags->time_limit, "stop and save after this time, such as 3h50m");
  app.add_option("--amp", flags->amp, "activations in bf16, or off: all in f32; auto: bf16 where the GPU has it")->check(CLI::IsMember({"auto", "bf16", "off"}));
  app.add_flag("--use-amp", flags->use_amp, "the same as --amp auto");
  app.add_flag("--no-graph", flags->no_graph, "on a GPU: every step is enqueued kernel by kernel");
  app.add_option("--patience", flags->patience, "stop after this many evaluations without a better AP; 0: never")->check(whole_number(0));
  app.add_option("--eval-every", flags->eval_every, "epochs between evaluations; 0: never")->check(whole_number(0));
  app.add_option("--save-every", flags->save_every, "epochs (2) or steps (500s) between saves");
  app.add_option("--batch-size", flags->batch_size, "images of a step")->check(whole_number(1));
  app.add_option("--lr", flags->lr, "learning rate (optimizer.lr)")->check(positive_number());
  app.add_option("--imgsz", flags->imgsz, "picture size, N or HxW, multiples of 32");
  app.add_flag("--drop-empty", flags->drop_empty, "leave out training pictures without boxes");
  app.add_option("--num-workers", flags->num_workers, "decode threads")->check(whole_number(1));
  app.add_option("--output-dir", flags->output_dir, "folder of the run; default runs/<config>-NNN");
  app.add_flag("--overwrite", flags->overwrite, "start anew in a folder that is not empty");
  app.add_option("--overfit", flags->overfit, "train and evaluate on the first N pictures without augmentation")->check(whole_number(1));
  app.add_option("--freeze", flags->freeze, "regular expression of parameter names to leave untrained; repeatable")->take_all()->allow_extra_args(false);
  app.add_option("--max-skips", flags->max_skips, "steps in a row that may fail to be finite")->check(whole_number(0));
  app.add_option("--accum", flags->accum, "micro-batches of a step on each rank, whose gradients are added")->check(whole_number(1, 4096));
  app.add_option("--check-replicas", flags->check_replicas, "steps between comparisons of the ranks' states; 0: before saves and at the end only")->check(whole_number(0));
  app.add_flag("--require-all-used", flags->require_all_used, "a parameter that no rank's loss reaches is an error");
  app.add_flag("--test-only", flags->test_only, "evaluate the weights of -r instead, as eval does");
  add_rank_flags(app, flags->ranks);
  return [flags, &common, &app] { return flags->test_only ? test_only(*flags, common, app) : take_part(*flags, common); };
}

}  // namespace detr::apps

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <regex>
#include <set>

#include "apps/cli.h"
#include "data/denoising.h"
#include "models/detr/rtdetr.h"
#include "runtime/error.h"
#include "runtime/gpus.h"
#include "runtime/timing.h"
#include "train/checkpoint.h"
#include "train/step.h"

namespace detr::apps {
namespace {

struct BenchFlags {
  std::string what, imgsz = "640", amp, filter, save_json;
  std::int64_t batch_size = 16, warmup = 5, iterations = 20, classes = 80;
  double boxes = 7.3;
  bool no_graph = false, parts = false;
};


/// Random pictures and boxes; `mean` boxes a picture, each picture between none and twice as many.
data::Batch random_batch(const models::DecoderConfig& config, std::int64_t n, const PictureSize& size, double mean, std::uint64_t seed) {
  data::Batch batch;
  batch.images = host_zeros({n, size.height, size.width, 3}, DType::u8);
  batch.size_h = size.height;
  batch.size_w = size.width;
  const auto pixels = batch.images.span<std::uint8_t>();
  for (std::size_t i = 0; i < pixels.size(); i += 8) {
    const std::uint64_t bits = random_bits(RandomKey(seed), i);
    for (std::size_t k = 0; k < 8 && i + k < pixels.size(); ++k) pixels[i + k] = static_cast<std::uint8_t>(bits >> (8 * k));
  }
  std::vector<data::ImageTargets> targets(static_cast<std::size_t>(n));
  std::vector<RandomKey> keys;
  RandomSequence draw{RandomKey(seed).fold(1)};
  double due = 0;   // the fraction of a box that rounding has left over so far
  for (std::int64_t i = 0; i < n; ++i) {
    due += mean * 2 * (i % 2 == 0 ? draw.uniform() : 0.5);
    const auto count = static_cast<std::int64_t>(due);
    due -= static_cast<double>(count);
    for (std::int64_t g = 0; g < count; ++g) {
      const double w = draw.uniform(0.05, 0.5), h = draw.uniform(0.05, 0.5);
      targets[static_cast<std::size_t>(i)].labels.push_back(draw.uniform_int(config.num_classes));
      targets[static_cast<std::size_t>(i)].boxes.push_back({draw.uniform(w / 2, 1 - w / 2), draw.uniform(h / 2, 1 - h / 2), w, h});
    }
    keys.push_back(RandomKey(seed).fold(static_cast<std::uint64_t>(2 + i)));
    batch.image_ids.push_back(i);
    batch.orig_width.push_back(size.width);
    batch.orig_height.push_back(size.height);
  }
  std::size_t largest = 0;
  for (const data::ImageTargets& image : targets) largest = std::max(largest, image.labels.size());
  batch.targets = data::make_targets(targets, data::box_capacity(static_cast<std::int64_t>(largest)), DType::f32);
  const data::DenoisingOptions options{config.num_denoising, config.label_noise_ratio, config.box_noise_scale, config.num_classes};
  batch.denoising = data::make_denoising(batch.targets, options, data::keyed_draws(keys, config.num_classes),
                                         data::denoising_capacity(config.num_denoising, static_cast<std::int64_t>(largest)));
  return batch;
}

/// What a step is made of: model, state and the step itself.
struct Workload {
  models::RtDetr model;
  train::ParameterStore store;
  train::Optimizer optimizer;
  train::Step step;

  Workload(const train::RunConfig& config, const Stream& stream, bool graphs)
      : model(config.model), store(model.parameters(), stream, DType::f32, train::compute_dtype(config.amp, stream)),
        optimizer(store, stream, config.optimizer), step(model, store, optimizer, stream, {.graphs = graphs}) {
    store.initialise(config.seed);
  }
};

/// Milliseconds between the ends of successive steps. A step is started before the one before it has ended, as in training.
std::vector<double> time_steps(train::Step& step, const Stream& stream, const data::Batch& batch, std::int64_t count) {
  std::vector<double> ends;
  std::vector<Event> marks;
  for (std::int64_t i = 0; i <= count; ++i) {
    step.start(batch, 1e-3);
    marks.push_back(stream.record());
    if (i > 0) step.finish();   // of the step before
    ends.push_back(now_s());
  }
  step.finish();
  std::vector<double> times;
  for (std::size_t i = 1; i < marks.size(); ++i) times.push_back(stream.device().is_cpu() ? 1e3 * (ends[i] - ends[i - 1]) : marks[i].milliseconds_since(marks[i - 1]));
  return times;
}

/// Milliseconds of each part of a step, by marks inside its graph (eagerly where there is none), median of `count` runs.
std::vector<std::pair<std::string, double>> time_parts(const train::RunConfig& config, const Stream& stream, const data::Batch& batch, bool graphs, std::int64_t count) {
  Workload work(config, stream, graphs);
  std::vector<std::pair<std::string, Event>> marks;
  work.step.after_part = [&](const std::string& part) { marks.emplace_back(part, stream.record()); };
  std::map<std::string, std::vector<double>> times;
  for (std::int64_t i = 0; i < count + 3; ++i) {
    if (!work.step.graph().defined()) marks.clear();
    work.step.run(batch, 1e-3);
    if (i < 3) continue;
    std::map<std::string, double> sums;
    for (std::size_t m = 1; m < marks.size(); ++m) sums[marks[m].first] += marks[m].second.milliseconds_since(marks[m - 1].second);
    for (const auto& [part, sum] : sums) times[part].push_back(sum);
  }
  std::vector<std::pair<std::string, double>> parts;
  for (const auto& [part, values] : times) parts.emplace_back(part, percentiles(values).median);
  std::sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return parts;
}

Outcome bench_step(const BenchFlags& flags, const CommonOptions& common) {
  const double begin = now_s();
  const Stream stream = open_stream(common);
  train::Config tree = load_config(common);
  if (!flags.amp.empty()) tree.set("amp", nlohmann::json(flags.amp).dump(), "--amp");
  train::RunConfig config = tree.resolve();
  config.model.decoder.num_classes = flags.classes;
  const data::Batch batch = random_batch(config.model.decoder, flags.batch_size, parse_size("--imgsz", flags.imgsz), flags.boxes, config.seed);

  Outcome outcome;
  std::string hash;
  {
    Workload work(config, stream, !flags.no_graph);
    const double built = now_s();
    train::StepResult result = work.step.run(batch, 1e-3);
    const double first = now_s();
    for (std::int64_t i = 1; i < flags.warmup; ++i) result = work.step.run(batch, 1e-3);
    const Percentiles step = percentiles(time_steps(work.step, stream, batch, flags.iterations));
    const double rate = 1e3 * static_cast<double>(flags.batch_size) / step.median;
    result = work.step.run(batch, 1e-3);
    const double peak = static_cast<double>(work.step.peak_bytes() + stream.allocator().peak_bytes()) / (1 << 30);
    const double reserved = static_cast<double>(work.step.stream().allocator().bytes_in_use() + work.step.stream().allocator().bytes_cached() + stream.allocator().bytes_in_use() +
                                                stream.allocator().bytes_cached()) / (1 << 30);
    const Graph graph = work.step.graph();
    outcome.json = {{"config", tree.name()}, {"device", concat(stream.device())}, {"dtype", name_of(work.store.compute_dtype())}, {"batch_size", flags.batch_size}, {"imgsz", flags.imgsz},
                    {"graph", graph.defined()}, {"ms", step.median}, {"p10", step.p10}, {"p90", step.p90}, {"images_per_s", rate}, {"build_s", built - begin}, {"first_step_s", first - built},
                    {"peak_gib", peak}, {"reserved_gib", reserved}, {"kernels", graph.defined() ? graph.kernels() : 0}, {"nodes", graph.defined() ? graph.nodes() : 0}, {"loss", number(result.loss)},
                    {"applied", result.applied}};
    if (!common.json) {
      print_line(fmt::format("step    {:.2f} ms (p10 {:.2f}, p90 {:.2f})  {:.1f} img/s   {} batch {} at {}, {}, {}{}", step.median, step.p10, step.p90, rate, tree.name(),
                             flags.batch_size, flags.imgsz, name_of(work.store.compute_dtype()), concat(stream.device()), graph.defined() ? ", graph" : ""));
      print_line(fmt::format("start   {:.2f} s to model and state, first step {:.2f} s", built - begin, first - built));
      print_line(fmt::format("memory  peak {:.2f} GiB, reserved {:.2f} GiB", peak, reserved));
      if (graph.defined()) print_line(fmt::format("graph   {} kernels, {} nodes", graph.kernels(), graph.nodes()));
      print_line(fmt::format("loss    {:.9g} after {} steps, state {}", result.loss, flags.warmup + flags.iterations + 2, train::state_hash(work.store, work.optimizer)));
    }
  }
  if (!flags.parts) return outcome;
  if (stream.device().is_cpu()) throw ConfigError("--parts needs a GPU: its events measure them");
  double sum = 0;
  outcome.json["parts"] = nlohmann::json::object();
  for (const auto& [part, ms] : time_parts(config, stream, batch, !flags.no_graph, flags.iterations)) {
    sum += ms;
    outcome.json["parts"][part] = ms;
    if (!common.json) print_line(fmt::format("part    {:<36} {:8.3f} ms", part, ms));
  }
  if (!common.json) print_line(fmt::format("part    {:<36} {:8.3f} ms, marks included", "sum", sum));
  return outcome;
}

/// Goes on as detr_bench, the program beside this one, which prints and exits by itself: comes back by throwing alone.
/// `iterations`: measurements of a case; 0: detr_bench's own number.
Outcome bench_kernels(const BenchFlags& flags, const CommonOptions& common, std::int64_t iterations) {
  static const std::regex gpu("auto|cuda(:[0-9]{1,3})?");
  if (!std::regex_match(common.device, gpu)) throw ConfigError("bench kernels measures a GPU, --device ", common.device, " is none; wanted cuda or cuda:0");
  std::error_code ignored;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path() / "detr_bench";
  if (::access(program.c_str(), X_OK) != 0) throw ConfigError("bench kernels needs ", program.string(), ", which a build with CUDA, tests and Google Benchmark makes");
  std::vector<std::string> words = {"detr_bench"};
  const std::size_t colon = common.device.find(':');
  if (colon != std::string::npos) words.insert(words.end(), {"--device", common.device.substr(colon + 1)});
  if (!flags.filter.empty()) words.push_back("--benchmark_filter=" + flags.filter);
  if (!flags.save_json.empty()) words.insert(words.end(), {"--json", flags.save_json});
  if (iterations > 0) words.insert(words.end(), {"--runs", std::to_string(iterations)});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execv(program.c_str(), arguments.data());
  throw ConfigError("bench kernels: ", program.string(), " cannot be started: ", std::strerror(errno));
}

}  // namespace

Verb add_bench(CLI::App& app, const CommonOptions& common) {
  const auto flags = std::make_shared<BenchFlags>();
  app.remove_option(app.get_option("updates"));   // what follows is the thing to measure
  app.add_option("what", flags->what, "step: a training step on random pictures that lie on the device; kernels: each hot kernel on a GPU, by detr_bench")->required();
  app.add_option("--batch-size", flags->batch_size, "pictures of a step")->check(whole_number(1));
  app.add_option("--imgsz", flags->imgsz, "picture size, N or HxW, multiples of 32");
  app.add_option("--classes", flags->classes, "number of classes")->check(whole_number(1, 100000));
  app.add_option("--boxes", flags->boxes, "mean number of boxes in a picture")->check(real_number(0, 1000));
  app.add_option("--amp", flags->amp, "auto, bf16 or off")->check(CLI::IsMember({"auto", "bf16", "off"}));
  app.add_option("--warmup", flags->warmup, "steps before those that are timed")->check(whole_number(2, 10000));
  CLI::Option* const iterations = app.add_option("--iters", flags->iterations, "steps that are timed, or measurements of each kernel (100)")->check(whole_number(1, 100000));
  app.add_flag("--no-graph", flags->no_graph, "enqueue every step kernel by kernel");
  app.add_flag("--parts", flags->parts, "also the time of each op, forward and backward");
  app.add_option("--filter", flags->filter, "kernels: a regular expression, which of them");
  app.add_option("--save-json", flags->save_json, "kernels: write an object a line and case, for bench_compare");
  return [flags, iterations, &app, &common] {
    const bool step = flags->what == "step";
    if (!step && flags->what != "kernels") throw ConfigError("bench knows no '", flags->what, "'; it has: step, kernels");
    // What has no meaning is refused, not passed over.
    static const std::set<std::string> of_kernels = {"what", "--device", "--iters", "--filter", "--save-json"}, not_of_step = {"--filter", "--save-json"};
    for (const CLI::Option* option : app.get_options()) {
      const std::string name = option->get_lnames().empty() ? option->get_name() : "--" + option->get_lnames()[0];
      if (option->count() > 0 && (step ? not_of_step.contains(name) : !of_kernels.contains(name))) throw ConfigError("bench ", flags->what, " has no ", name);
    }
    return step ? bench_step(*flags, common) : bench_kernels(*flags, common, iterations->count() > 0 ? flags->iterations : 0);
  };
}

}  // namespace detr::apps

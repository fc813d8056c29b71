#include "train/golden.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "kernels/pointwise.h"
#include "models/detr/postprocess.h"
#include "models/detr/rtdetr.h"
#include "models/reference_layout.h"
#include "runtime/error.h"
#include "runtime/host_value.h"
#include "train/golden_inputs.h"
#include "train/inputs.h"
#include "train/optimizer.h"

namespace detr::train {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

/// Collects the largest error of each kind.
class Errors {
 public:
  Errors(GoldenReport& report, const Stream& stream) : report_(report), stream_(stream) {}

  void number(const std::string& kind, const std::string& name, double got, double wanted, double scale) {
    add(kind, name, scale > 0 ? std::abs(got - wanted) / scale : std::abs(got - wanted));
  }
  void number(const std::string& kind, const std::string& name, double got, double wanted) { number(kind, name, got, wanted, std::abs(wanted)); }

  /// A tensor against the file's summary of it: `at` counts in the reference's layout. Errors are relative to the tensor's largest
  /// value, or to `floor` if that is larger: where the true value is zero (the gradient of a bias that a batch norm takes away again)
  /// both sides hold rounding noise only. Sum and norm are compared relative to what they would be if every element were that large.
  void summary(const std::string& kind, const std::string& name, const Tensor& tensor, const json& wanted, double floor = 0) {
    const Tensor x = stream_.to_host(tensor);
    const std::int64_t n = x.numel();
    if (n != wanted.at("n").get<std::int64_t>()) return fault(concat(name, " has ", n, " elements, wanted ", wanted.at("n").get<std::int64_t>()));
    std::vector<double> values(static_cast<std::size_t>(n));
    double sum = 0, squares = 0, largest = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const double v = host_value(x, i);
      values[static_cast<std::size_t>(models::reference_index(x.shape(), i))] = v;
      sum += v;
      squares += v * v;
      largest = std::max(largest, std::abs(v));
    }
    const double max = std::max(wanted.at("max").get<double>(), floor), count = static_cast<double>(n);
    number(kind, name + " (max)", largest, wanted.at("max").get<double>(), max);
    number(kind, name + " (sum)", sum, wanted.at("sum").get<double>(), max * count);
    number(kind, name + " (l2)", std::sqrt(squares), wanted.at("l2").get<double>(), max * std::sqrt(count));
    for (std::size_t k = 0; k < wanted.at("at").size(); ++k) {
      const auto at = wanted["at"][k].get<std::int64_t>();
      if (at < 0 || at >= n) return fault(concat(name, ": position ", at, " of ", n));
      number(kind, name, values[static_cast<std::size_t>(at)], wanted.at("v").at(k).get<double>(), max);
    }
  }

  /// Norm of the difference, relative to the norm of `wanted`.
  void tensors(const std::string& kind, const std::string& name, const Tensor& tensor, const Tensor& wanted) {
    const Tensor x = stream_.to_host(tensor);
    double squares = 0, difference = 0;
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      const double w = host_value(wanted, i), d = host_value(x, i) - w;
      squares += w * w;
      difference += d * d;
    }
    number(kind, concat(name, ", ", wanted), std::sqrt(difference), 0, std::sqrt(squares));
  }

  void fault(const std::string& text) { report_.faults.push_back(text); }

 private:
  void add(const std::string& kind, const std::string& name, double error) {
    auto found = std::find_if(report_.errors.begin(), report_.errors.end(), [&](const GoldenError& e) { return e.kind == kind; });
    if (found == report_.errors.end()) found = report_.errors.insert(found, {kind, -1, ""});
    if (!(error <= found->error)) *found = {kind, std::isnan(error) ? std::numeric_limits<double>::infinity() : error, name};
  }

  GoldenReport& report_;
  const Stream& stream_;
};

models::ModelConfig config_of(const json& file) {
  models::ModelConfig config = models::variant_config(file.at("variant").get<std::string>());
  models::DecoderConfig& d = config.decoder;
  d.num_classes = file.at("num_classes").get<std::int64_t>();
  const json options = file.value("options", json::object());
  for (const auto& [key, value] : options.items()) {
    if (key == "nd" || key == "num_denoising") d.num_denoising = value.get<std::int64_t>();
    else if (key == "np" || key == "num_points") d.num_points = value.is_number() ? std::vector<std::int64_t>(3, value.get<std::int64_t>()) : value.get<std::vector<std::int64_t>>();
    else if (key == "method" || key == "cross_attn_method") d.cross_attn_method = value.get<std::string>();
    else if (key == "nq" || key == "num_queries") d.num_queries = value.get<std::int64_t>();
    else if (key == "nl" || key == "num_layers") d.num_layers = value.get<std::int64_t>();
    else if (key == "eval_idx") d.eval_idx = value.get<std::int64_t>();
    else if (key == "label_noise_ratio") d.label_noise_ratio = value.get<double>();
    else if (key == "box_noise_scale") d.box_noise_scale = value.get<double>();
    else throw DataError("unknown option '", key, "'");
  }
  return config;
}

/// Model and state of a case, filled with the generated values.
struct Case {
  models::RtDetr model;
  ParameterStore store;

  Case(const models::ModelConfig& config, const Stream& stream, DType dtype) : model(config), store(model.parameters(), stream, wide_dtype(dtype), dtype) {
    store.initialise(0);
    const Tensor weights = store.on_host(store.weights());
    for (const Parameter& p : model.parameters().all()) {
      if (!golden::is_generated(p)) continue;
      const Tensor place = store.slice(weights, p);
      const std::vector<double> values = golden::parameter_values(p);
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (dtype == DType::f64) place.data<double>()[i] = values[i];
        else place.data<float>()[i] = static_cast<float>(values[i]);
      }
    }
    store.from_host(weights, store.weights());
    store.refresh_shadow();
    store.reset_ema();
  }
};

/// An f64 tensor of the host on the device in another dtype.
Tensor on_device(const Stream& stream, const Tensor& x, DType dtype) {
  if (dtype == DType::f64) return stream.to_device(x);
  Tensor single = host_zeros(x.shape(), DType::f32);
  for (std::int64_t i = 0; i < x.numel(); ++i) single.data<float>()[i] = static_cast<float>(x.data<double>()[i]);
  const Tensor there = stream.to_device(single);
  stream.wait();
  if (dtype == DType::f32) return there;
  Tensor y = stream.empty(x.shape(), dtype);
  kernels::cast(stream, there, y);
  return y;
}

/// Truth and denoising queries of a recorded batch, padded as in training.
StepInputs recorded_inputs(const Stream& stream, const models::DecoderConfig& config, const std::string& prefix, const std::vector<std::int64_t>& counts,
                           DType dtype) {
  const std::int64_t largest = counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
  const data::Targets targets = data::make_targets(golden::targets(prefix, counts, config.num_classes), data::box_capacity(largest), DType::f64);
  const std::int64_t m = std::max<std::int64_t>(largest, 1);
  const std::int64_t groups = largest == 0 ? 1 : std::max<std::int64_t>(1, config.num_denoising / m);
  const data::DenoisingOptions options{config.num_denoising, config.label_noise_ratio, config.box_noise_scale, config.num_classes};
  const data::Denoising denoising = data::make_denoising(targets, options, golden::denoising_draws(2 * m * groups, config.num_classes),
                                                         data::denoising_capacity(config.num_denoising, largest));
  StepInputs inputs;
  targets_to_device(stream, targets, denoising, targets.total, dtype, inputs);
  return inputs;
}

/// Tokens [begin, end) of each image, on the host: (N, T, C) -> (N, end - begin, C).
Tensor tokens(const Stream& stream, const Tensor& tensor, std::int64_t begin, std::int64_t end) {
  const Tensor x = stream.to_host(tensor);
  const std::int64_t n = x.dim(0), t = x.dim(1), c = x.dim(2);
  Tensor y = host_zeros({n, end - begin, c}, DType::f64);
  for (std::int64_t i = 0; i < y.numel(); ++i) {
    const std::int64_t channel = i % c, token = i / c % (end - begin), image = i / c / (end - begin);
    y.data<double>()[i] = host_value(x, (image * t + begin + token) * c + channel);
  }
  return y;
}

void compare_matches(const Stream& stream, Errors& errors, const json& wanted, const std::vector<Tensor>& matches) {
  const json& sets = wanted.at("value");
  if (sets.size() != matches.size()) return errors.fault(concat(matches.size(), " matchings, wanted ", sets.size()));
  for (std::size_t s = 0; s < matches.size(); ++s) {
    const std::int64_t q = matches[s].dim(1);
    const Tensor match = stream.to_host(matches[s]);
    for (std::size_t n = 0; n < sets[s].size(); ++n) {
      std::vector<std::int64_t> queries, boxes;
      for (std::int64_t i = 0; i < q; ++i) {
        const std::int64_t box = match.data<std::int64_t>()[static_cast<std::int64_t>(n) * q + i];
        if (box < 0) continue;
        queries.push_back(i);
        boxes.push_back(box);
      }
      if (sets[s][n][0] != json(queries) || sets[s][n][1] != json(boxes)) errors.fault(concat("matching ", s, " of image ", n, " differs"));
    }
  }
}

Tensor imposed_topk(const json& file) {
  const json& rows = file.at("topk_indices");
  std::vector<std::int64_t> flat;
  for (const json& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  return host_tensor<std::int64_t>({static_cast<std::int64_t>(rows.size()), static_cast<std::int64_t>(flat.size() / rows.size())}, flat);
}

/// A recorded batch up to its loss, with all tensors that the ops made on the way: first the model's, then the criterion's.
struct ForwardPass {
  Case run;
  StepInputs inputs;
  Tape tape;
  Context ctx;
  std::vector<Tensor> made;
  std::size_t made_by_model = 0;
  models::DecoderOutput output;
  models::CriterionOutput loss;

  ForwardPass(const json& file, const Stream& stream, DType dtype, const Tensor& topk) : run(config_of(file), stream, dtype), ctx(stream, &tape, true) {
    const models::ModelConfig config = config_of(file);
    const auto counts = file.at("counts").get<std::vector<std::int64_t>>();
    const auto size = file.at("size_hw").get<std::vector<std::int64_t>>();
    inputs = recorded_inputs(stream, config.decoder, "golden", counts, wide_dtype(dtype));
    const Tensor images = on_device(stream, golden::pictures("image", static_cast<std::int64_t>(counts.size()), size.at(0), size.at(1)), dtype);
    run.model.keep_features = true;
    ctx.made = &made;
    output = run.model.forward(ctx, Variable(images), inputs.denoising, stream.to_device(topk));
    made_by_model = made.size();
    loss = models::Criterion(config.criterion).forward(ctx, output, inputs.denoising, inputs.targets);
    ctx.made = nullptr;
  }
  ForwardPass(const ForwardPass&) = delete;   // ctx points at the tape, made and the tape share tensors
  ForwardPass& operator=(const ForwardPass&) = delete;
};

/// Compares each tensor of the model's float32 pass with the float64 pass, and then gives the float32 pass the values of the
/// other, so that its backward starts from exact values and takes the same decisions. A few of some ten million signs before a
/// ReLU, places of a maximum, sampled cells and matches depend on the last bit of float32, and each that changes moves some
/// gradients by up to several percent of their largest value: in this implementation, in the reference in float32, and in float64
/// after a change of the weights by one part in 2^24. What remains is the rounding of the backward, which is what is to be tested.
void take_exact_values(const Stream& stream, const ForwardPass& exact, ForwardPass& pass, Errors& errors) {
  // A discrete cell that changes moves a value by as much as two cells differ: no rounding, and no error.
  const bool continuous = exact.run.model.config().decoder.cross_attn_method != "discrete";
  if (exact.made.size() != pass.made.size()) return errors.fault(concat("float32 makes ", pass.made.size(), " tensors, float64 ", exact.made.size()));
  for (std::size_t k = 0; k < pass.made.size(); ++k) {
    const Tensor& from = exact.made[k];
    Tensor& to = pass.made[k];
    if (from.shape() != to.shape()) return errors.fault(concat("tensor ", k, " is ", to, " in float32 and ", from, " in float64"));
    if (from.dtype() != DType::f64) {
      stream.copy(from, to);
      continue;
    }
    if (continuous && k < pass.made_by_model) errors.tensors("intermediates", concat("tensor ", k), to, from);
    stream.copy(on_device(stream, from, to.dtype()), to);
  }
  stream.wait();
}

/// In bf16 the losses alone are compared; what can be said of the gradients is that all are there and finite.
void check_bf16(const Stream& stream, ForwardPass& pass, Errors& errors) {
  pass.run.store.clear_gradients();
  pass.tape.backward(pass.ctx, pass.loss.total);
  for (const Parameter& p : pass.run.store.trainable()) {
    if (!pass.tape.reached(p)) continue;
    const Tensor grad = stream.to_host(p.grad());
    for (std::int64_t i = 0; i < grad.numel(); ++i) {
      if (std::isfinite(host_value(grad, i))) continue;
      errors.fault("gradient of " + p.name() + " is not finite");
      break;
    }
  }
}

void run_training(const json& file, DType dtype, const Stream& stream, Errors& errors) {
  const Tensor topk = dtype != DType::f64 && file.contains("topk_indices") ? imposed_topk(file) : Tensor();
  ForwardPass pass(file, stream, dtype, topk);
  Case& run = pass.run;
  const models::DecoderOutput& output = pass.output;
  const models::CriterionOutput& loss = pass.loss;
  const StepInputs& inputs = pass.inputs;

  std::vector<Tensor> layer_terms;
  for (const Variable& terms : loss.terms) layer_terms.push_back(stream.to_host(terms.value()));
  const auto losses = models::named_losses(layer_terms);
  const double total = host_value(stream.to_host(loss.total.value()), 0);
  errors.number("losses", "total", total, file.at("total").get<double>());
  if (dtype == DType::bf16) return check_bf16(stream, pass, errors);
  if (losses.size() != file.at("losses").size()) errors.fault(concat(losses.size(), " losses, wanted ", file["losses"].size()));
  for (const auto& [name, value] : losses) {
    if (!file["losses"].contains(name)) errors.fault("no " + name + " in the file");
    else errors.number("losses", name, value, file["losses"][name].get<double>());
  }
  if (dtype == DType::f64) {
    if (file.contains("topk_indices")) {
      const Tensor wanted = imposed_topk(file), got = stream.to_host(output.selected);
      const auto a = wanted.span<std::int64_t>(), b = got.span<std::int64_t>();
      if (!std::equal(a.begin(), a.end(), b.begin(), b.end())) errors.fault("another top-k selection");
    }
    if (file.contains("matches")) compare_matches(stream, errors, file["matches"], loss.matches);
  }
  const std::int64_t dn = inputs.denoising.classes.defined() ? inputs.denoising.classes.dim(1) : 0;
  const Tensor &logits = output.logits.back().value(), &boxes = output.boxes.back().value();
  errors.summary("outputs", "pred_logits", tokens(stream, logits, dn, logits.dim(1)), file.at("pred_logits"));
  errors.summary("outputs", "pred_boxes", tokens(stream, boxes, dn, boxes.dim(1)), file.at("pred_boxes"));
  for (std::size_t i = 0; i < 3; ++i) {
    if (file.contains("backbone")) errors.summary("features", concat("backbone.", i), run.model.backbone_features()[i].value(), file["backbone"][i]);
    if (file.contains("encoder")) errors.summary("features", concat("encoder.", i), run.model.encoder_features()[i].value(), file["encoder"][i]);
  }

  // After the comparisons of what the forward computed.
  if (dtype != DType::f64) take_exact_values(stream, ForwardPass(file, Stream::cpu(stream.pool().threads()), DType::f64, topk), pass, errors);
  run.store.clear_gradients();
  pass.tape.backward(pass.ctx, loss.total);
  const json& grads = file.at("grads");
  double largest = 0;
  for (const auto& [name, wanted] : grads.items()) largest = std::max(largest, wanted.at("max").get<double>());
  // Rounding of the largest gradient, with room for the sums on the way: below, there is nothing to compare.
  const double noise = largest * (dtype == DType::f64 ? 1e-9 : 1e-3);
  const bool partial = file.value("partial", false);   // lists some of the gradients alone
  std::size_t found = 0;
  for (const Parameter& p : run.store.trainable()) {
    if (!pass.tape.reached(p)) continue;
    if (grads.contains(p.name())) {
      errors.summary("gradients", p.name(), p.grad(), grads[p.name()], noise);
      ++found;
    } else if (!partial) {
      errors.fault("gradient of " + p.name() + " is not in the file");
    }
  }
  if (found != grads.size()) errors.fault(concat(found, " of the file's ", grads.size(), " gradients"));
  const json frozen = file.value("frozen", json::array()), running = file.value("running", json::object());
  for (const json& name : frozen) {
    if (!run.model.parameters().contains(name) || run.model.parameters().find(name).trainable()) errors.fault(name.get<std::string>() + " should be frozen");
  }
  for (const auto& [name, wanted] : running.items()) {
    if (run.model.parameters().contains(name)) errors.summary("statistics", name, run.model.parameters().find(name).value(), wanted);
    else errors.fault("no buffer " + name);
  }
  if (file.contains("n_params")) {
    std::int64_t count = 0;
    for (const Parameter& p : run.model.parameters().all()) count += p.is_buffer() ? 0 : p.shape().numel();
    if (count != file["n_params"].get<std::int64_t>()) errors.fault(concat(count, " parameters, wanted ", file["n_params"].get<std::int64_t>()));
  }
}

void run_evaluation(const json& file, DType dtype, const Stream& stream, Errors& errors) {
  Case run(config_of(file), stream, dtype);
  const auto size = file.at("size_hw").get<std::vector<std::int64_t>>();
  const auto orig = file.at("orig_wh").get<std::vector<std::int64_t>>();
  Context ctx(stream, nullptr, false);
  const models::DecoderOutput output = run.model.forward(ctx, Variable(on_device(stream, golden::pictures("image", 1, size.at(0), size.at(1)), dtype)));
  errors.summary("outputs", "pred_logits", output.logits.back().value(), file.at("pred_logits"));
  errors.summary("outputs", "pred_boxes", output.boxes.back().value(), file.at("pred_boxes"));
  const auto boxes = models::postprocess(stream, output.logits.back().value(), output.boxes.back().value(), {orig.at(0)}, {orig.at(1)}).at(0);
  const json& top = file.at("top");
  const double side = static_cast<double>(std::max(orig[0], orig[1]));
  for (std::size_t i = 0; i < top.at("labels").size(); ++i) {
    if (boxes.at(i).label != top["labels"][i].get<std::int64_t>()) errors.fault(concat("detection ", i, " has label ", boxes[i].label));
    errors.number("detections", concat("score ", i), boxes[i].score, top.at("scores").at(i).get<double>());
    for (std::size_t k = 0; k < 4; ++k) errors.number("detections", concat("box ", i), boxes[i].xyxy_px[k], top.at("boxes").at(i).at(k).get<double>(), side);
  }
}

/// The groups of the recorded optimiser case: the reference's shared include.
OptimizerConfig recorded_optimizer() {
  OptimizerConfig config;
  config.groups = {{"^(?=.*backbone)(?!.*norm).*$", 1e-5, std::nullopt}, {"^(?=.*(?:encoder|decoder))(?=.*(?:norm|bn)).*$", std::nullopt, 0.0}};
  return config;
}

void run_optimizer(const json& file, DType dtype, const Stream& stream, Errors& errors) {
  const models::ModelConfig config = config_of(file);
  Case run(config, stream, dtype);
  Optimizer optimizer(run.store, stream, recorded_optimizer());
  const models::Criterion criterion(config.criterion);
  const auto counts = file.at("counts").get<std::vector<std::int64_t>>();
  const auto size = file.at("size_hw").get<std::vector<std::int64_t>>();
  if (optimizer.group_sizes() != file.at("group_sizes").get<std::vector<std::int64_t>>()) errors.fault("the optimiser's groups have other sizes");
  for (std::size_t s = 0; s < file.at("steps").size(); ++s) {
    const json& wanted = file["steps"][s];
    const StepInputs inputs = recorded_inputs(stream, config.decoder, concat("golden.step", s), counts, wide_dtype(dtype));
    const Tensor images = on_device(stream, golden::pictures(concat("image.step", s), static_cast<std::int64_t>(counts.size()), size.at(0), size.at(1)), dtype);
    Tape tape;
    Context ctx(stream, &tape, true);
    run.store.clear_gradients();
    const models::DecoderOutput output = run.model.forward(ctx, Variable(images), inputs.denoising);
    const models::CriterionOutput loss = criterion.forward(ctx, output, inputs.denoising, inputs.targets);
    tape.backward(ctx, loss.total);
    std::vector<bool> used;
    for (const Parameter& p : run.store.trainable()) used.push_back(tape.reached(p));
    const double factor = warmup_factor(static_cast<std::int64_t>(s), 2000);
    if (!optimizer.step(factor, used)) errors.fault(concat("step ", s, " was not made"));
    errors.number("losses", concat("total of step ", s), host_value(stream.to_host(loss.total.value()), 0), wanted.at("total").get<double>());
    errors.number("gradients", concat("norm of step ", s), optimizer.gradient_norm(), wanted.at("grad_norm").get<double>());
    for (std::size_t g = 0; g < wanted.at("lr").size(); ++g)
      errors.number("schedule", concat("lr ", g, " of step ", s), factor * optimizer.group_lr().at(g), wanted["lr"][g].get<double>());
    errors.number("schedule", concat("EMA decay of step ", s), 0.9999 * (1 - std::exp(-static_cast<double>(optimizer.ema_updates()) / 2000)), wanted.at("ema_decay").get<double>());
  }
  const auto compare = [&](const char* kind, const Tensor& buffer) {
    for (const auto& [name, wanted] : file.at(kind).items()) {
      if (!run.model.parameters().contains(name)) errors.fault("no tensor " + name);
      else errors.summary(kind, name, run.store.slice(buffer, run.model.parameters().find(name)), wanted);
    }
  };
  compare("params", run.store.weights());
  compare("ema", run.store.ema());
}

}  // namespace

double GoldenReport::largest() const {
  double largest = 0;
  for (const GoldenError& e : errors) largest = std::max(largest, e.error);
  return largest;
}

GoldenReport run_golden(const fs::path& path, DType dtype, const Stream& stream) {
  const auto start = std::chrono::steady_clock::now();
  GoldenReport report;
  report.name = path.stem().string();
  Errors errors(report, stream);
  try {
    std::ifstream in(path);
    if (!in) throw DataError("cannot be read");
    const json file = json::parse(in);
    if (report.name.starts_with("train_")) run_training(file, dtype, stream, errors);
    else if (report.name.starts_with("eval_")) run_evaluation(file, dtype, stream, errors);
    else if (report.name.starts_with("optim_")) run_optimizer(file, dtype, stream, errors);
    else throw DataError("the name must begin with train_, eval_ or optim_");
  } catch (const json::exception& error) {
    throw DataError(path.string(), ": not a recorded case: ", error.what());
  } catch (const Error& error) {
    throw DataError(path.string(), ": ", error.what());
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

std::vector<fs::path> golden_files(const fs::path& folder) {
  std::vector<fs::path> files;
  if (!fs::is_directory(folder)) throw DataError(folder.string(), ": no such folder");
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const bool recorded = name.starts_with("train_") || name.starts_with("eval_") || name.starts_with("optim_");
    if (recorded && name.ends_with(".json")) files.push_back(entry.path());
  }
  if (files.empty()) throw DataError(folder.string(), ": no train_*.json, eval_*.json or optim_*.json");
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace detr::train

#include "train/memory_plan.h"

#include <iomanip>
#include <set>
#include <sstream>

#include "runtime/error.h"
#include "train/step.h"

namespace detr::train {
namespace {

std::int64_t in_use(const Stream& stream) { return static_cast<std::int64_t>(stream.allocator().bytes_in_use()); }

/// Taken from the device, whether in use or not.
std::int64_t held(const Stream& stream) { return in_use(stream) + static_cast<std::int64_t>(stream.allocator().bytes_cached()); }

/// The forward pass of an evaluation; between steps it uses their memory.
void plan_evaluation(const Stream& stream, models::RtDetr& model, const std::vector<std::int64_t>& pictures, DType compute) {
  Context ctx(stream, nullptr, false);
  model.forward(ctx, Variable(resized_pictures(stream, stream.empty(Shape(pictures), DType::u8), pictures.at(1), pictures.at(2), compute)));
}

MemoryRequest with_batch(MemoryRequest request, std::int64_t pictures) {
  for (StepKey& key : request.keys) key.pictures.at(0) = pictures;
  return request;
}

std::string gib(std::int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / static_cast<double>(std::int64_t{1} << 30);
  return text.str();
}

/// A run that has taken `reserve` bytes for its steps. unused: beyond the reserve.
MemoryPlan walk(const MemoryRequest& request, std::int64_t reserve) {
  const Stream stream = Stream::planning(request.device);
  const std::unique_ptr<models::RtDetr> model = request.make_model();
  ParameterStore store(model->parameters(), stream, DType::f32, request.compute);
  Optimizer optimizer(store, stream, request.optimizer);
  Step step(*model, store, optimizer, stream, request.step);
  const Allocator& arena = step.stream().allocator();

  MemoryPlan plan;
  plan.state = in_use(stream);
  if (reserve > 0) step.reserve(reserve);
  for (const bool captured : {false, true}) {
    if (captured && !request.step.graphs) continue;
    for (const StepKey& key : request.keys) {
      const std::size_t before = arena.peak_bytes();
      step.plan(key);
      if (arena.peak_bytes() > before) plan.largest = key;
    }
  }
  if (!request.evaluation.empty()) plan_evaluation(step.stream(), *model, request.evaluation, request.compute);
  const bool uploads = !request.device.is_cpu();   // through memory of each batch in flight
  plan.inputs = (in_use(stream) - plan.state) * (1 + (uploads ? static_cast<std::int64_t>(Step::kInFlight) : 0));
  plan.activations = static_cast<std::int64_t>(arena.peak_bytes());
  plan.unused = held(stream) - in_use(stream) + held(step.stream()) - reserve;
  return plan;
}

}  // namespace

std::vector<StepKey> keys_of(const data::LoaderOptions& options, std::int64_t most_boxes, std::int64_t micro_batches) {
  const auto [height, width] = data::output_size(options.transforms);
  std::set<std::pair<std::int64_t, std::int64_t>> sizes = {{height, width}}, slots;
  if (options.scales_stop_epoch > 0) {
    for (const std::int64_t side : options.scales) sizes.insert({side, side});
  }
  for (std::int64_t boxes = 0; boxes <= most_boxes; ++boxes)
    slots.insert({data::box_capacity(boxes), data::denoising_capacity(options.denoising.num_denoising, boxes)});
  std::vector<StepKey> keys;
  for (const auto& [h, w] : sizes) {
    for (const auto& [box_slots, denoising_slots] : slots) keys.push_back({{options.batch_size / options.ranks / micro_batches, height, width, 3}, h, w, box_slots, denoising_slots});
  }
  return keys;
}

CollectivePlan plan_collectives(const MemoryRequest& request) {
  DETR_CHECK(!request.keys.empty(), "collectives: no step to plan for");
  const Stream stream = Stream::planning(request.device);
  const std::unique_ptr<models::RtDetr> model = request.make_model();
  ParameterStore store(model->parameters(), stream, request.compute == DType::f64 ? DType::f64 : DType::f32, request.compute);
  Optimizer optimizer(store, stream, request.optimizer);
  Step step(*model, store, optimizer, stream, request.step);
  step.plan(request.keys.back());
  return step.collective_plan();
}

MemoryPlan plan_memory(const MemoryRequest& request) {
  DETR_CHECK(!request.keys.empty(), "memory plan: no step to plan for");
  MemoryPlan plan = walk(request, 0);   // for what is in use; how it lies in the reserve shows when the reserve is known
  const auto share = static_cast<std::int64_t>(kScratchShare * static_cast<double>(plan.activations));
  plan.allowance = kScratchBytes + share;
  plan.reserve = plan.activations + share;
  plan.unused = walk(request, plan.reserve).unused;
  return plan;
}

std::int64_t largest_batch(const MemoryRequest& request, std::int64_t free_bytes) {
  const auto fits = [&](std::int64_t pictures) { return plan_memory(with_batch(request, pictures)).total() <= free_bytes; };
  std::int64_t fitting = 0, too_large = request.keys.at(0).pictures.at(0) + 1;
  while (too_large - fitting > 1) {
    const std::int64_t middle = fitting + (too_large - fitting) / 2;
    (fits(middle) ? fitting : too_large) = middle;
  }
  return fitting;
}

void expect_fit(const MemoryRequest& request, const MemoryPlan& plan, std::int64_t free_bytes) {
  if (plan.total() <= free_bytes) return;
  const std::int64_t batch = largest_batch(request, free_bytes);
  throw OutOfMemory("train does not fit on ", request.device, ": needs ", gib(plan.total()), " GiB at ", plan.largest.height, " x ", plan.largest.width, " with ",
                    plan.largest.box_slots, " box slots, ", gib(free_bytes), " free; ",
                    batch > 0 ? concat("--batch-size ", batch * request.step.micro_batches * request.step.ranks.size, " fits") : std::string("--batch-size 1 does not fit either"));
}

std::string describe(const MemoryPlan& plan, std::int64_t free_bytes) {
  return concat("memory    a step needs ", gib(plan.total()), " GiB at ", plan.largest.height, " x ", plan.largest.width, ", ", plan.largest.box_slots, " box slots: activations ",
                gib(plan.activations), ", state ", gib(plan.state), ", inputs ", gib(plan.inputs), ", unused parts of segments ", gib(plan.unused), ", allowance ",
                gib(plan.allowance), "; ", gib(free_bytes), " GiB free");
}

}  // namespace detr::train

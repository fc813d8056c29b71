#include "kernels/cuda/cudnn_graph.h"

#include <algorithm>

#include "runtime/cuda/stream_state.h"

namespace detr::kernels::cuda {
namespace {

/// The descriptors that an attribute of another holds, at most `limit`.
std::vector<CudnnDescriptor> held(const CudnnDescriptor& holder, cudnnBackendAttributeName_t name, cudnnBackendDescriptorType_t type, std::int64_t limit) {
  std::vector<CudnnDescriptor> made;
  std::vector<cudnnBackendDescriptor_t> raw;
  for (std::int64_t i = 0; i < limit; ++i) raw.push_back(made.emplace_back(type).get());
  std::int64_t count = 0;
  DETR_TRY(cudnnBackendGetAttribute(holder.get(), name, CUDNN_TYPE_BACKEND_DESCRIPTOR, limit, &count, raw.data()));
  made.erase(made.begin() + std::min(count, limit), made.end());
  return made;
}

bool has_note(const CudnnDescriptor& engine, cudnnBackendNumericalNote_t wanted) {
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes{};
  std::int64_t count = 0;
  DETR_TRY(cudnnBackendGetAttribute(engine.get(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &count, notes.data()));
  return std::find(notes.begin(), notes.begin() + count, wanted) != notes.begin() + count;
}

/// Whether the library takes what a descriptor describes, which depends on the description alone. Throws DeviceError where it fails for
/// another reason, such as memory: to go on with the next engine then would change the bits of a run.
bool is_supported(const CudnnDescriptor& descriptor) {
  const cudnnStatus_t status = cudnnBackendFinalize(descriptor.get());
  const int category = CUDNN_STATUS_CATEGORY(static_cast<int>(status));
  if (category == CUDNN_STATUS_NOT_SUPPORTED || category == CUDNN_STATUS_BAD_PARAM) return false;
  detr::cuda::expect_success(status, "cudnnBackendFinalize");
  return true;
}

CudnnDescriptor made_tensor(std::int64_t id, DType dtype, const Shape& shape, bool is_virtual) {
  // The library names dimensions in the order N, C, H, W whatever the memory; the strides say that channels come last.
  const std::array<std::int64_t, 4> dims = {shape[0], shape[3], shape[1], shape[2]};
  const std::array<std::int64_t, 4> strides = {shape[1] * shape[2] * shape[3], 1, shape[2] * shape[3], shape[3]};
  const cudnnDataType_t type = dtype == DType::bf16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_FLOAT;
  constexpr std::int64_t kAlignment = 16;
  CudnnDescriptor tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id)
      .set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type)
      .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, kAlignment)
      .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, std::span<const std::int64_t>(dims))
      .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, std::span<const std::int64_t>(strides))
      .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, is_virtual)
      .finalize();
  return tensor;
}

}  // namespace

CudnnDescriptor cudnn_tensor(std::int64_t id, DType dtype, const Shape& shape) { return made_tensor(id, dtype, shape, false); }

CudnnDescriptor cudnn_virtual_tensor(std::int64_t id, const Shape& shape) { return made_tensor(id, DType::f32, shape, true); }

std::int64_t engine_index(const CudnnDescriptor& config) {
  const std::vector<CudnnDescriptor> engine = held(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_BACKEND_ENGINE_DESCRIPTOR, 1);
  std::int64_t index = -1, count = 0;
  if (!engine.empty()) DETR_TRY(cudnnBackendGetAttribute(engine[0].get(), CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1, &count, &index));
  return index;
}

Cudnn::Cudnn(const Stream& stream) {
  cudnnHandle_t made = nullptr;
  DETR_TRY(cudnnCreate(&made));
  handle_.reset(made);
  DETR_TRY(cudnnSetStream(made, detr::cuda::native(stream)));
}

std::vector<CudnnDescriptor> Cudnn::configs(std::span<const cudnnBackendDescriptor_t> operations, bool tensor_cores) const {
  CudnnDescriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle()).set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, operations);
  std::vector<CudnnDescriptor> found;
  if (!is_supported(graph)) return found;   // the library has nothing for such a graph
  for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    CudnnDescriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph).set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
    if (!is_supported(heuristic)) continue;   // this mode knows nothing for the graph
    std::int64_t count = 0;
    DETR_TRY(cudnnBackendGetAttribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr));
    for (CudnnDescriptor& config : held(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, count)) {
      const std::vector<CudnnDescriptor> engine = held(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_BACKEND_ENGINE_DESCRIPTOR, 1);
      if (engine.empty() || has_note(engine[0], CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC)) continue;
      if (!tensor_cores && has_note(engine[0], CUDNN_NUMERICAL_NOTE_TENSOR_CORE)) continue;
      found.push_back(std::move(config));
    }
  }
  return found;
}

std::optional<CudnnPlan> Cudnn::plan(const CudnnDescriptor& config) const {
  CudnnPlan made{CudnnDescriptor(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)};
  made.plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle()).set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
  if (!is_supported(made.plan)) return std::nullopt;
  std::int64_t count = 0;
  DETR_TRY(cudnnBackendGetAttribute(made.plan.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count, &made.workspace_bytes));
  return made;
}

void run_plan(const Stream& stream, const Cudnn& cudnn, const CudnnPlan& plan, std::span<const std::int64_t> ids, std::span<void* const> tensors) {
  const Tensor workspace = stream.empty({plan.workspace_bytes}, DType::u8);
  void* const scratch = workspace.raw();
  CudnnDescriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, ids)
      .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, tensors)
      .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, scratch)
      .finalize();
  DETR_TRY(cudnnBackendExecute(cudnn.handle(), plan.plan.get(), pack.get()));
}

}  // namespace detr::kernels::cuda

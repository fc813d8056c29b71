#include <vector>

#include "runtime/cuda/stream_state.h"
#include "runtime/cuda/try.h"

namespace detr::cuda {

struct GraphState {
  UniqueGraph graph;
  UniqueGraphExec executable;
};

std::shared_ptr<GraphState> capture(const Stream& stream, const std::function<void()>& enqueue) {
  auto state = std::make_shared<GraphState>();
  // Relaxed: the allocator may have to ask for memory.
  DETR_TRY(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeRelaxed));
  cudaGraph_t graph = nullptr;
  try {
    enqueue();
  } catch (...) {
    if (cudaStreamEndCapture(native(stream), &graph) == cudaSuccess) state->graph.reset(graph);
    throw;
  }
  DETR_TRY(cudaStreamEndCapture(native(stream), &graph));
  state->graph.reset(graph);
  cudaGraphExec_t executable = nullptr;
  DETR_TRY(cudaGraphInstantiate(&executable, graph, 0));
  state->executable.reset(executable);
  DETR_TRY(cudaGraphUpload(executable, native(stream)));
  return state;
}

void launch(const Stream& stream, const GraphState& graph) { DETR_TRY(cudaGraphLaunch(graph.executable.get(), native(stream))); }

std::int64_t count_nodes(const GraphState& graph) {
  std::size_t count = 0;
  DETR_TRY(cudaGraphGetNodes(graph.graph.get(), nullptr, &count));
  return static_cast<std::int64_t>(count);
}

std::int64_t count_kernels(const GraphState& graph) {
  std::size_t count = static_cast<std::size_t>(count_nodes(graph));
  std::vector<cudaGraphNode_t> nodes(count);
  DETR_TRY(cudaGraphGetNodes(graph.graph.get(), nodes.data(), &count));
  std::int64_t kernels = 0;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    DETR_TRY(cudaGraphNodeGetType(node, &type));
    kernels += type == cudaGraphNodeTypeKernel ? 1 : 0;
  }
  return kernels;
}

}  // namespace detr::cuda

#include "bench/machine.h"

#include <cuda_runtime.h>
#include <cudnn_graph.h>

#include "runtime/cuda/try.h"
#include "runtime/error.h"

namespace detr::bench {

Machine describe_gpu(int index) {
  cudaDeviceProp properties{};
  DETR_TRY(cudaGetDeviceProperties(&properties, index));
  char bus_id[32] = {};
  DETR_TRY(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, index));
  int runtime = 0;
  DETR_TRY(cudaRuntimeGetVersion(&runtime));
  const std::size_t cudnn = cudnnGetVersion();   // 90100 is 9.1.0
  Machine machine;
  machine.device = properties.name;
  machine.bus_id = bus_id;
  machine.cuda = concat(runtime / 1000, ".", runtime % 1000 / 10);
  machine.cudnn = concat(cudnn / 10000, ".", cudnn % 10000 / 100, ".", cudnn % 100);
  machine.l2_bytes = properties.l2CacheSize;
  return machine;
}

}  // namespace detr::bench

#pragma once
#include <array>
#include <optional>
#include <string>

#include "bench/case.h"

namespace detr::bench {

/// A time of somebody else's code for one of our cases.
struct Peer {
  const char* op;      ///< Case::op
  const char* shape;   ///< shape_text of the case
  const char* name;
  char kind;           ///< m: measured on an H200 with the same inputs; p: published by others, on another machine
  double ms;
};

/// Those of the sampler are in f32 unless they say otherwise; of them only DCNv4 has the softmax inside, and all backward ones but grid_sample's
/// add with atomics.
inline constexpr std::array kPeers = {
    Peer{"deformable_attention_forward", "decoder N=16 Q=500 V=3", "Deformable-DETR CUDA", 'm', 0.146},
    Peer{"deformable_attention_forward", "decoder N=16 Q=500 V=3", "grid_sample bf16", 'm', 0.821},
    Peer{"deformable_attention_forward", "decoder N=16 Q=500 V=3", "msda-triton", 'm', 0.186},
    Peer{"deformable_attention_forward", "decoder N=16 Q=500 V=3", "DCNv4", 'm', 0.075},
    Peer{"deformable_attention_forward", "decoder N=16 Q=500 V=3", "DCNv4 fp16", 'm', 0.053},
    Peer{"deformable_attention_backward", "decoder N=16 Q=500 V=3", "Deformable-DETR CUDA", 'm', 0.359},
    Peer{"deformable_attention_backward", "decoder N=16 Q=500 V=3", "grid_sample bf16", 'm', 1.984},
    Peer{"deformable_attention_backward", "decoder N=16 Q=500 V=3", "msda-triton", 'm', 0.608},
    Peer{"deformable_attention_backward", "decoder N=16 Q=500 V=3", "DCNv4", 'm', 0.495},
    Peer{"deformable_attention_backward", "decoder N=16 Q=500 V=3", "DCNv4 fp16", 'm', 0.647},
    Peer{"deformable_attention_forward", "decoder N=64 Q=500 V=3", "Deformable-DETR CUDA", 'm', 0.523},
    Peer{"deformable_attention_forward", "decoder N=64 Q=500 V=3", "grid_sample bf16", 'm', 3.077},
    Peer{"deformable_attention_forward", "decoder N=64 Q=500 V=3", "msda-triton", 'm', 0.475},
    Peer{"deformable_attention_forward", "decoder N=64 Q=500 V=3", "DCNv4", 'm', 0.246},
    Peer{"deformable_attention_forward", "decoder N=64 Q=500 V=3", "DCNv4 fp16", 'm', 0.150},
    Peer{"deformable_attention_backward", "decoder N=64 Q=500 V=3", "Deformable-DETR CUDA", 'm', 1.359},
    Peer{"deformable_attention_backward", "decoder N=64 Q=500 V=3", "grid_sample bf16", 'm', 6.556},
    Peer{"deformable_attention_backward", "decoder N=64 Q=500 V=3", "msda-triton", 'm', 1.646},
    Peer{"deformable_attention_backward", "decoder N=64 Q=500 V=3", "DCNv4", 'm', 1.858},
    Peer{"deformable_attention_backward", "decoder N=64 Q=500 V=3", "DCNv4 fp16", 'm', 2.478},
    Peer{"deformable_attention_forward", "encoder N=2 Q=22223 V=4", "Deformable-DETR CUDA", 'm', 0.780},
    Peer{"deformable_attention_forward", "encoder N=2 Q=22223 V=4", "grid_sample bf16", 'm', 4.514},
    Peer{"deformable_attention_forward", "encoder N=2 Q=22223 V=4", "msda-triton", 'm', 0.682},
    Peer{"deformable_attention_forward", "encoder N=2 Q=22223 V=4", "DCNv4", 'm', 0.385},
    Peer{"deformable_attention_forward", "encoder N=2 Q=22223 V=4", "DCNv4 fp16", 'm', 0.198},
    Peer{"deformable_attention_backward", "encoder N=2 Q=22223 V=4", "Deformable-DETR CUDA", 'm', 2.005},
    Peer{"deformable_attention_backward", "encoder N=2 Q=22223 V=4", "grid_sample bf16", 'm', 13.80},
    Peer{"deformable_attention_backward", "encoder N=2 Q=22223 V=4", "msda-triton", 'm', 2.186},
    Peer{"deformable_attention_backward", "encoder N=2 Q=22223 V=4", "DCNv4", 'm', 3.227},
    Peer{"deformable_attention_backward", "encoder N=2 Q=22223 V=4", "DCNv4 fp16", 'm', 3.800},
    Peer{"deformable_attention_forward", "encoder N=4 Q=22223 V=4", "Deformable-DETR CUDA", 'm', 1.595},
    Peer{"deformable_attention_forward", "encoder N=4 Q=22223 V=4", "grid_sample bf16", 'm', 8.861},
    Peer{"deformable_attention_forward", "encoder N=4 Q=22223 V=4", "msda-triton", 'm', 1.178},
    Peer{"deformable_attention_forward", "encoder N=4 Q=22223 V=4", "DCNv4", 'm', 0.668},
    Peer{"deformable_attention_forward", "encoder N=4 Q=22223 V=4", "DCNv4 fp16", 'm', 0.330},
    Peer{"deformable_attention_backward", "encoder N=4 Q=22223 V=4", "Deformable-DETR CUDA", 'm', 4.028},
    Peer{"deformable_attention_backward", "encoder N=4 Q=22223 V=4", "grid_sample bf16", 'm', 27.09},
    Peer{"deformable_attention_backward", "encoder N=4 Q=22223 V=4", "msda-triton", 'm', 4.121},
    Peer{"deformable_attention_backward", "encoder N=4 Q=22223 V=4", "DCNv4", 'm', 6.307},
    Peer{"deformable_attention_backward", "encoder N=4 Q=22223 V=4", "DCNv4 fp16", 'm', 7.444},
    Peer{"assign", "N=112 Q=300 G=7", "SciPy", 'm', 2.06},
    Peer{"assign", "N=112 Q=300 G=7", "torch-linear-assignment", 'm', 1.83},
    Peer{"assign", "N=448 Q=300 G=100", "SciPy", 'm', 151},
    Peer{"assign", "N=448 Q=300 G=100", "torch-linear-assignment", 'm', 39.8},
    Peer{"assign", "N=16 Q=300 G=7", "SciPy", 'm', 0.36},
    Peer{"assign", "N=16 Q=300 G=7", "torch-linear-assignment", 'm', 0.62},
    Peer{"assign", "N=112 Q=300 G=60", "SciPy", 'm', 19.2},
    Peer{"assign", "N=112 Q=300 G=60", "torch-linear-assignment", 'm', 18.1},
    Peer{"assign", "N=448 Q=300 G=20", "SciPy", 'm', 20.7},
    Peer{"assign", "N=448 Q=300 G=20", "torch-linear-assignment", 'm', 6.0},
    Peer{"assign", "N=16 Q=900 G=100", "SciPy", 'm', 10.6},
    Peer{"assign", "N=16 Q=900 G=100", "torch-linear-assignment", 'm', 35.0},
    Peer{"optimizer_step", "segments=500 elements=43000000", "a public trainer before fusing", 'p', 6},
};

/// The fastest peer of a case, if it has any.
inline std::optional<Peer> best_peer(const Case& c) {
  std::optional<Peer> best;
  const std::string shape = shape_text(c);
  for (const Peer& peer : kPeers) {
    if (c.op == peer.op && shape == peer.shape && (!best || peer.ms < best->ms)) best = peer;
  }
  return best;
}

}  // namespace detr::bench

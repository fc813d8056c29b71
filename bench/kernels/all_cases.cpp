#include "bench/kernels/cases.h"

namespace detr::bench {

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto family : {deformable_attention_cases, assignment_cases, detection_loss_cases, attention_cases, batch_norm_cases, layer_norm_cases, linear_cases, conv2d_cases, topk_cases,
                            optimizer_cases, pool_cases, pointwise_cases}) {
    for (Case& one : family()) cases.push_back(std::move(one));
  }
  return cases;
}

}  // namespace detr::bench

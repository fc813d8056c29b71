#pragma once
#include <vector>

#include "bench/case.h"

namespace detr::bench {

std::vector<Case> deformable_attention_cases();
std::vector<Case> assignment_cases();
std::vector<Case> detection_loss_cases();
std::vector<Case> attention_cases();
std::vector<Case> batch_norm_cases();
std::vector<Case> layer_norm_cases();
std::vector<Case> linear_cases();
std::vector<Case> conv2d_cases();
std::vector<Case> topk_cases();
std::vector<Case> optimizer_cases();
std::vector<Case> pool_cases();
std::vector<Case> pointwise_cases();

/// All of them, in this order.
std::vector<Case> all_cases();

}  // namespace detr::bench

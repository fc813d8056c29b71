#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "data/batch.h"
#include "runtime/dtype.h"
#include "runtime/random.h"

namespace detr::data {

/// Ground truth of one image: dense labels and boxes (cx, cy, w, h) in fractions of the picture, one for each label.
struct ImageTargets {
  std::vector<std::int64_t> labels;
  std::vector<std::array<double, 4>> boxes;
};

/// Padded box slots an image: the smallest of 32, 128, 512, 2048, ... that holds `boxes` >= 0.
std::int64_t box_capacity(std::int64_t boxes);

/// Padded denoising slots an image for a step whose fullest image has at most `largest` boxes: 2 num_denoising up to
/// num_denoising boxes, 2 box_capacity(largest) beyond, 0 without denoising. Holds the Q of every smaller count too.
std::int64_t denoising_capacity(std::int64_t num_denoising, std::int64_t largest);

/// Pads the images' targets to `gcap` >= the largest count. `dtype` f32 or f64 is that of the boxes.
Targets make_targets(const std::vector<ImageTargets>& images, std::int64_t gcap, DType dtype);

struct DenoisingOptions {
  std::int64_t num_denoising = 100;   ///< 0: none
  double label_noise_ratio = 0.5;     ///< half of it is the chance that a slot's class is drawn anew
  double box_noise_scale = 1;         ///< in half sizes of the true box; 0: boxes are not moved
  std::int64_t num_classes = 80;      ///< also the padding row of the class embedding
};

/// One slot of the denoising queries: group g, side 0 (positive) or 1 (negative), box j, at `index` = g 2M + side M + j.
struct DenoisingSlot {
  std::int64_t image, group, side, box, index;
};

/// What chance decides for one slot.
struct DenoisingDraw {
  double label_mask = 1;           ///< in [0, 1); the class is replaced where it is below label_noise_ratio / 2
  std::int64_t new_label = 0;      ///< in [0, num_classes)
  std::array<double, 4> sign{};    ///< -1 or 1, for x0, y0, x1, y1
  std::array<double, 4> part{};    ///< in [0, 1); a negative slot adds 1
};
using DenoisingDraws = std::function<DenoisingDraw(const DenoisingSlot&)>;

/// Draws keyed by (image's key, group, side, box): they depend neither on the other images of the batch nor on M.
DenoisingDraws keyed_draws(std::vector<RandomKey> image_keys, std::int64_t num_classes);

/// Contrastive denoising queries. With M = `largest` (the fullest image among all ranks; -1: of these targets) there are
/// G = max(1, floor(num_denoising / M)) groups of 2M slots: for each true box a positive, whose corners move by less than
/// half a box size, and a negative, whose corners move by half a size to a whole one. Slots j >= counts(i) are unreal: class
/// num_classes, a box without size at the corner, no match; yet they take part as queries, as in the reference.
/// M = 0: one group of two unreal slots with box (0.5, 0.5, 0.1, 0.1), noise applied.
/// Boxes are sigmoid(inverse_sigmoid(b)) of the noised ones, with the inverse sigmoid's clamp at 1e-5: crossed corners end
/// at size 1e-5. Dtype of the result's boxes is that of the targets'; computed in double.
/// `qcap` >= 2 M G is the padded number of slots. Throws InvalidArgument.
/// Zhang et al. 2022, "DINO: DETR with Improved DeNoising Anchor Boxes", arXiv:2203.03605, section 3.3.
Denoising make_denoising(const Targets& targets, const DenoisingOptions& options, const DenoisingDraws& draws, std::int64_t qcap,
                         std::int64_t largest = -1);

}  // namespace detr::data

#include "models/detr/rtdetr.h"

#include "runtime/error.h"

namespace detr::models {
namespace {

const ModelConfig& validated(const ModelConfig& config) {
  config.validate();
  return config;
}

}  // namespace

RtDetr::RtDetr(const ModelConfig& config)
    : config_(validated(config)),
      backbone_(list_, "backbone", config.backbone),
      encoder_(list_, "encoder", backbone_.channels(), config.encoder),
      decoder_(list_, "decoder", config.encoder.hidden_dim, config.decoder) {}

DecoderOutput RtDetr::forward(Context& ctx, const Variable& images, const DenoisingInputs& denoising, const Tensor& imposed_topk) {
  DETR_CHECK(images.shape().rank() == 4 && images.dim(3) == 3, "model: images must be (N, H, W, 3), got ", images.value());
  DETR_CHECK(images.dim(1) % 32 == 0 && images.dim(2) % 32 == 0 && images.dim(1) > 0 && images.dim(2) > 0,
             "model: image height and width must be multiples of 32, got ", images.value());
  const std::vector<Variable> features = backbone_.forward(ctx, images);
  const std::vector<Variable> maps = encoder_.forward(ctx, features);
  if (keep_features) {
    backbone_features_ = features;
    encoder_features_ = maps;
  }
  return decoder_.forward(ctx, maps, denoising, imposed_topk);
}

}  // namespace detr::models

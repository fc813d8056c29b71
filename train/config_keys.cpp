#include <array>

#include "kernels/optimizer.h"
#include "train/config_schema.h"

// The table of keys. Defaults are those of the structs in models/detr/config.h, train/optimizer.h and train/config.h; names, and the
// values that are checked because nothing else is built here, are the reference's (its YAML files and constructors).
namespace detr::train::schema {
namespace {

using enum Kind;

constexpr double kMaxSide = 16384;   // pixels of an image side
constexpr double kMaxLayers = kernels::kMaxStatuses - 1;   // each has an assignment, as the encoder's proposals have

// The reference's training list. Pictures to tensors and boxes to fractions, its last two, are what the loader does anyway.
constexpr std::string_view kTrainOps =
    R"([{"type": "RandomPhotometricDistort", "p": 0.5}, {"type": "RandomZoomOut", "fill": 0}, {"type": "RandomIoUCrop", "p": 0.8},
        {"type": "SanitizeBoundingBoxes", "min_size": 1}, {"type": "RandomHorizontalFlip"}, {"type": "Resize", "size": [640, 640]},
        {"type": "SanitizeBoundingBoxes", "min_size": 1}])";
constexpr std::string_view kValOps = R"([{"type": "Resize", "size": [640, 640]}])";
constexpr std::string_view kStrongOps = R"(["RandomPhotometricDistort", "RandomZoomOut", "RandomIoUCrop"])";

constexpr auto kKeys = std::to_array<Key>({
    {"task", text, R"("detection")", "what is trained", {.only = R"(["detection"])"}},
    {"model", text, R"("RTDETR")", "section of the model", {.only = R"(["RTDETR"])"}},
    {"criterion", text, R"("RTDETRCriterionv2")", "section of the losses", {.only = R"(["RTDETRCriterionv2"])"}},
    {"postprocessor", text, R"("RTDETRPostProcessor")", "section of the output", {.only = R"(["RTDETRPostProcessor"])"}},
    {"use_focal_loss", boolean, "true", "scores are independent sigmoids", {.only = "[true]"}},
    {"eval_spatial_size", integers, "[640, 640]", "height and width in evaluation; the validation Resize decides", {.low = 32, .high = kMaxSide, .count = 2, .nullable = true}},
    {"num_classes", integer, "80", "advice: the annotation file decides", {.low = 1}},
    {"remap_mscoco_category", boolean, "true", "advice: ids are mapped by the annotation file's categories"},

    {"RTDETR.backbone", text, R"("PResNet")", "section of the backbone", {.only = R"(["PResNet"])"}},
    {"RTDETR.encoder", text, R"("HybridEncoder")", "section of the encoder", {.only = R"(["HybridEncoder"])"}},
    {"RTDETR.decoder", text, R"("RTDETRTransformerv2")", "section of the decoder", {.only = R"(["RTDETRTransformerv2"])"}},

    {"PResNet.depth", integer, "50", "ResNet-vd depth; 0: basic blocks, as many as PResNet.blocks says", {.only = "[0, 18, 34, 50, 101]"}},
    {"PResNet.variant", text, R"("d")", "shape of stem and shortcuts", {.only = R"(["d"])"}},
    {"PResNet.blocks", integers, "null", "blocks of the four stages; null: by depth", {.low = 1, .count = 4, .nullable = true}},
    {"PResNet.widths", integers, "[64, 128, 256, 512]", "channels of the four stages", {.low = 1, .count = 4}},
    {"PResNet.stem_width", integer, "32", "channels of the first two stem convolutions; the third has twice as many", {.low = 1}},
    {"PResNet.num_stages", integer, "4", "stages", {.only = "[4]"}},
    {"PResNet.return_idx", integers, "[1, 2, 3]", "stages that feed the encoder", {.only = "[[1, 2, 3]]"}},
    {"PResNet.act", text, R"("relu")", "activation", {.only = R"(["relu"])"}},
    {"PResNet.freeze_at", integer, "-1", "-1: nothing is frozen; k: the stem and the first k stages", {.low = -1, .high = 4}},
    {"PResNet.freeze_norm", boolean, "false", "batch norms of the backbone are constants"},
    {"PResNet.pretrained", text, "false", "file with weights of the backbone; false: random", {.nullable = true, .also = "[false, true]"}},

    {"HybridEncoder.in_channels", integers, "null", "channels of the backbone's maps; null: as they are", {.low = 1, .count = 3, .nullable = true}},
    {"HybridEncoder.feat_strides", integers, "[8, 16, 32]", "strides of the maps", {.only = "[[8, 16, 32]]"}},
    {"HybridEncoder.hidden_dim", integer, "256", "width of the encoder", {.low = 4}},
    {"HybridEncoder.use_encoder_idx", integers, "[2]", "maps with a transformer layer", {.only = "[[2]]"}},
    {"HybridEncoder.num_encoder_layers", integer, "1", "transformer layers", {.only = "[1]"}},
    {"HybridEncoder.nhead", integer, "8", "attention heads", {.low = 1}},
    {"HybridEncoder.dim_feedforward", integer, "1024", "width inside the feed-forward part", {.low = 1}},
    {"HybridEncoder.dropout", number, "0.0", "dropout", {.only = "[0.0]"}},
    {"HybridEncoder.enc_act", text, R"("gelu")", "activation of the transformer layer", {.only = R"(["gelu"])"}},
    {"HybridEncoder.pe_temperature", number, "10000.0", "base of the position table's wave lengths", {.low = 0, .above = true}},
    {"HybridEncoder.expansion", number, "1.0", "width of the CSP blocks relative to hidden_dim", {.low = 0, .above = true}},
    {"HybridEncoder.depth_mult", number, "1.0", "RepVGG units of a CSP block: 3 times this, rounded", {.low = 0, .above = true}},
    {"HybridEncoder.act", text, R"("silu")", "activation of the convolutions", {.only = R"(["silu"])"}},
    {"HybridEncoder.version", text, R"("v2")", "shape of the CSP blocks", {.only = R"(["v2"])"}},

    {"RTDETRTransformerv2.feat_channels", integers, "null", "channels of the encoder's maps; null: as they are", {.low = 1, .count = 3, .nullable = true}},
    {"RTDETRTransformerv2.feat_strides", integers, "[8, 16, 32]", "strides of the maps", {.only = "[[8, 16, 32]]"}},
    {"RTDETRTransformerv2.hidden_dim", integer, "256", "width of the decoder", {.low = 4}},
    {"RTDETRTransformerv2.num_levels", integer, "3", "maps", {.only = "[3]"}},
    {"RTDETRTransformerv2.num_layers", integer, "6", "decoder layers", {.low = 1, .high = kMaxLayers}},
    {"RTDETRTransformerv2.num_queries", integer, "300", "object queries", {.low = 1}},
    {"RTDETRTransformerv2.nhead", integer, "8", "attention heads", {.low = 1}},
    {"RTDETRTransformerv2.dim_feedforward", integer, "1024", "width inside the feed-forward part", {.low = 1}},
    {"RTDETRTransformerv2.dropout", number, "0.0", "dropout", {.only = "[0.0]"}},
    {"RTDETRTransformerv2.activation", text, R"("relu")", "activation", {.only = R"(["relu"])"}},
    {"RTDETRTransformerv2.num_denoising", integer, "100", "denoising queries, about; 0: none", {.low = 0}},
    {"RTDETRTransformerv2.label_noise_ratio", number, "0.5", "twice the chance of another label", {.low = 0, .high = 2}},
    {"RTDETRTransformerv2.box_noise_scale", number, "1.0", "noise of corners in half box sizes", {.low = 0, .above = true}},
    {"RTDETRTransformerv2.learn_query_content", boolean, "false", "content of the queries is learned", {.only = "[false]"}},
    {"RTDETRTransformerv2.eval_idx", integer, "-1", "layer that evaluation reads; negative counts from the end"},
    {"RTDETRTransformerv2.eps", number, "0.01", "margin of the anchors", {.only = "[0.01]"}},
    {"RTDETRTransformerv2.aux_loss", boolean, "true", "losses on every layer", {.only = "[true]"}},
    {"RTDETRTransformerv2.num_points", integers, "[4, 4, 4]", "sampling points of each map; one number: of all", {.low = 1, .count = 3, .single = true}},
    {"RTDETRTransformerv2.cross_attn_method", text, R"("default")", "sampling: bilinear, or the nearest cell", {.only = R"(["default", "discrete"])"}},
    {"RTDETRTransformerv2.query_select_method", text, R"("default")", "how queries are picked", {.only = R"(["default"])"}},

    {"RTDETRPostProcessor.num_top_queries", integer, "300", "detections kept of an image", {.low = 1}},

    {"RTDETRCriterionv2.weight_dict.loss_vfl", number, "1.0", "weight of the varifocal loss", {.low = 0}},
    {"RTDETRCriterionv2.weight_dict.loss_bbox", number, "5.0", "weight of the L1 loss", {.low = 0}},
    {"RTDETRCriterionv2.weight_dict.loss_giou", number, "2.0", "weight of the GIoU loss", {.low = 0}},
    {"RTDETRCriterionv2.losses", texts, R"(["vfl", "boxes"])", "losses", {.only = R"([["vfl", "boxes"], ["boxes", "vfl"]])"}},
    {"RTDETRCriterionv2.alpha", number, "0.75", "weight of negatives in the varifocal loss", {.low = 0}},
    {"RTDETRCriterionv2.gamma", number, "2.0", "focusing exponent of the varifocal loss", {.low = 0}},
    {"RTDETRCriterionv2.boxes_weight_format", text, "null", "weights of box losses", {.nullable = true, .only = "[null]"}},
    {"RTDETRCriterionv2.share_matched_indices", boolean, "false", "one matching for all layers", {.only = "[false]"}},
    {"RTDETRCriterionv2.matcher.type", text, R"("HungarianMatcher")", "matcher", {.only = R"(["HungarianMatcher"])"}},
    {"RTDETRCriterionv2.matcher.weight_dict.cost_class", number, "2.0", "weight of the class cost", {.low = 0}},
    {"RTDETRCriterionv2.matcher.weight_dict.cost_bbox", number, "5.0", "weight of the L1 cost", {.low = 0}},
    {"RTDETRCriterionv2.matcher.weight_dict.cost_giou", number, "2.0", "weight of the GIoU cost", {.low = 0}},
    {"RTDETRCriterionv2.matcher.alpha", number, "0.25", "focal weight of positives in the class cost", {.low = 0, .high = 1}},
    {"RTDETRCriterionv2.matcher.gamma", number, "2.0", "focusing exponent of the class cost", {.low = 0}},

    {"epochs", integer, "72", "epochs of the run", {.low = 1}},
    {"optimizer.type", text, R"("AdamW")", "optimiser", {.only = R"(["AdamW"])"}},
    {"optimizer.lr", number, "0.0001", "learning rate after the warm-up", {.low = 0, .above = true}},
    {"optimizer.betas", numbers, "[0.9, 0.999]", "decay of the two moments", {.low = 0, .high = 1, .below = true, .count = 2}},
    {"optimizer.eps", number, "1e-08", "added to the root of the second moment", {.low = 0, .above = true}},
    {"optimizer.weight_decay", number, "0.0001", "decoupled weight decay", {.low = 0}},
    {"optimizer.params", objects, "[]", "parameter groups; what none of them matches forms a last one"},
    {"clip_max_norm", number, "0.1", "largest norm of the gradient; 0: no clipping", {.low = 0}},
    {"lr_scheduler.type", text, R"("MultiStepLR")", "decay of the learning rate", {.only = R"(["MultiStepLR"])"}},
    {"lr_scheduler.milestones", integers, "[1000]", "epochs at which it falls", {.low = 1}},
    {"lr_scheduler.gamma", number, "0.1", "factor of each fall", {.low = 0, .above = true}},
    {"lr_warmup_scheduler.type", text, R"("LinearWarmup")", "warm-up", {.only = R"(["LinearWarmup"])"}},
    {"lr_warmup_scheduler.warmup_duration", integer, R"("auto")", "steps of the warm-up; auto: min(2000, steps of the run / 5)", {.low = 0, .also = R"(["auto"])"}},
    {"use_ema", boolean, "true", "keep, evaluate and save a moving average of the weights"},
    {"ema.type", text, R"("ModelEMA")", "moving average", {.only = R"(["ModelEMA"])"}},
    {"ema.decay", number, "0.9999", "decay for a step once the ramp is over", {.low = 0, .high = 1, .below = true}},
    {"ema.warmups", integer, R"("auto")", "steps of the decay's ramp; auto: min(2000, steps of the run / 5)", {.low = 1, .also = R"(["auto"])"}},
    {"sync_bn", boolean, "true", "batch norm statistics over all ranks"},

    {"train_dataloader.type", text, R"("DataLoader")", "loader", {.only = R"(["DataLoader"])"}},
    {"train_dataloader.total_batch_size", integer, "16", "images of a step over all ranks", {.low = 1, .high = 65536}},
    {"train_dataloader.shuffle", boolean, "true", "a new order each epoch", {.only = "[true]"}},
    {"train_dataloader.drop_last", boolean, "true", "leave out an epoch's last, smaller batch"},
    {"train_dataloader.num_workers", integer, "4", "decode threads of a rank; 0 is 1", {.low = 0, .high = 1024}},
    {"train_dataloader.collate_fn.type", text, R"("BatchImageCollateFunction")", "how batches are made", {.only = R"(["BatchImageCollateFunction"])"}},
    {"train_dataloader.collate_fn.scales", integers, "null", "multi-scale: side of a step's images, drawn from these; null: off", {.low = 32, .high = kMaxSide, .nullable = true}},
    {"train_dataloader.collate_fn.stop_epoch", integer, "null", "from this epoch (from 0) on no multi-scale; null: never", {.low = 0, .nullable = true}},
    {"train_dataloader.dataset.type", text, R"("CocoDetection")", "kind of annotations", {.only = R"(["CocoDetection"])"}},
    {"train_dataloader.dataset.ann_file", text, "null", "annotation file; --data and --ann win", {.nullable = true}},
    {"train_dataloader.dataset.img_folder", text, "null", "image folder; --data and --images win", {.nullable = true}},
    {"train_dataloader.dataset.transforms.type", text, R"("Compose")", "list of transforms", {.only = R"(["Compose"])"}},
    {"train_dataloader.dataset.transforms.ops", objects, kTrainOps, "transforms, in order", {.nullable = true}},
    {"train_dataloader.dataset.transforms.policy.name", text, R"("stop_epoch")", "default: the transforms never change", {.only = R"(["stop_epoch", "default"])"}},
    {"train_dataloader.dataset.transforms.policy.epoch", integer, "null", "from this epoch (from 0) on without policy.ops; null: never", {.low = 0, .nullable = true}},
    {"train_dataloader.dataset.transforms.policy.ops", texts, kStrongOps, "types of the transforms that are left out"},

    {"val_dataloader.type", text, R"("DataLoader")", "loader", {.only = R"(["DataLoader"])"}},
    {"val_dataloader.total_batch_size", integer, "32", "images of a batch", {.low = 1, .high = 65536}},
    {"val_dataloader.shuffle", boolean, "false", "evaluation goes by image id", {.only = "[false]"}},
    {"val_dataloader.drop_last", boolean, "false", "evaluation takes every image", {.only = "[false]"}},
    {"val_dataloader.num_workers", integer, "4", "decode threads of a rank; 0 is 1", {.low = 0, .high = 1024}},
    {"val_dataloader.collate_fn.type", text, R"("BatchImageCollateFunction")", "how batches are made", {.only = R"(["BatchImageCollateFunction"])"}},
    {"val_dataloader.collate_fn.scales", integers, "null", "evaluation has one size", {.nullable = true, .only = "[null]"}},
    {"val_dataloader.dataset.type", text, R"("CocoDetection")", "kind of annotations", {.only = R"(["CocoDetection"])"}},
    {"val_dataloader.dataset.ann_file", text, "null", "annotation file; --data and --ann win", {.nullable = true}},
    {"val_dataloader.dataset.img_folder", text, "null", "image folder; --data and --images win", {.nullable = true}},
    {"val_dataloader.dataset.transforms.type", text, R"("Compose")", "list of transforms", {.only = R"(["Compose"])"}},
    {"val_dataloader.dataset.transforms.ops", objects, kValOps, "transforms, in order", {.nullable = true}},
    {"evaluator.type", text, R"("CocoEvaluator")", "metric", {.only = R"(["CocoEvaluator"])"}},
    {"evaluator.iou_types", texts, R"(["bbox"])", "what is scored", {.only = R"([["bbox"]])"}},

    {"output_dir", text, "null", "folder of the run; null: the next free runs/<config>-NNN", {.nullable = true}},
    {"print_every", integer, "50", "steps between progress lines", {.low = 1}},
    {"save_every", integer, "1", "epochs between checkpoints, which are left out where saving would take more than a tenth of the time; 0: only at the end", {.low = 0}},
    {"eval_every", integer, "1", "epochs between evaluations; 0: never", {.low = 0}},
    {"amp", text, R"("auto")", "activations in bf16, or off: all in f32; auto: bf16 on GPUs of compute capability 8.0 and newer", {.only = R"(["auto", "bf16", "off"])"}},
    {"graph", boolean, "true", "on a GPU: each step as one captured graph"},
    {"accum", integer, "1", "micro-batches of a step on each rank, whose gradients are added", {.low = 1, .high = 4096}},
    {"comm.backend", text, R"("auto")", "engine that sums over the ranks: nccl, gloo, or auto: NCCL on GPUs, Gloo on CPUs", {.only = R"(["auto", "nccl", "gloo"])"}},
    {"comm.timeout_s", number, "120.0", "seconds after which a rank that others wait for counts as stalled", {.low = 0.1, .high = 86400}},
    {"comm.start_timeout_s", number, "60.0", "seconds for all ranks to come", {.low = 0.1, .high = 86400}},
    {"comm.bucket_dtype", text, R"("f32")", "gradients are summed in f32, or rounded to bf16 for the sum", {.only = R"(["f32", "bf16"])"}},
    {"comm.bucket_mib", integer, "25", "MiB of gradients that the ranks sum as one", {.low = 1, .high = 65536}},
    {"compat.rank_rules", boolean, "false", "as in the reference: denoising groups follow a rank's own pictures, and the losses' divisor is at least the number of ranks"},
    {"patience", integer, "0", "evaluations without a better AP before the run ends; 0: never", {.low = 0}},
    {"max_skips", integer, "20", "steps in a row that may be skipped for values that are not finite", {.low = 0}},
    {"seed", integer, "0", "of every random choice", {.low = 0, .high = 18446744073709551615.0}},
    {"data.exif", text, R"("auto")", "turn pictures as their EXIF orientation says", {.only = R"(["auto", "apply", "ignore"])"}},
    {"data.bad_images", text, R"("auto")", "pictures that cannot be read while training", {.only = R"(["auto", "skip", "stop"])"}},
    {"data.max_bad_share", number, "0.01", "share of pictures that auto skips at most", {.low = 0, .high = 1}},
    {"data.max_pixels", integer, "64000000", "pixels of a picture at most", {.low = 1}},
    {"data.max_side", integer, "16384", "pixels of a picture's side at most", {.low = 1}},
    {"data.drop_empty", boolean, "false", "train without the images that have no box"},

    {"tuning", text, "null", "weights to start from", {.nullable = true}},
    {"resume", text, "null", "checkpoint to go on with", {.nullable = true}},
    {"use_amp", ignored, "null", "mixed precision"},
    {"scaler", ignored, "null", "loss scaling of mixed precision"},
    {"find_unused_parameters", ignored, "null", "parameters that a loss does not reach are found anyway"},
    {"train_dataloader.pin_memory", ignored, "null", "a setting of the reference's loader"},
    {"train_dataloader.persistent_workers", ignored, "null", "a setting of the reference's loader"},
    {"train_dataloader.dataset.return_masks", ignored, "null", "masks are not read"},
    {"val_dataloader.pin_memory", ignored, "null", "a setting of the reference's loader"},
    {"val_dataloader.persistent_workers", ignored, "null", "a setting of the reference's loader"},
    {"val_dataloader.dataset.return_masks", ignored, "null", "masks are not read"},
});

constexpr auto kGroup = std::to_array<Key>({
    {"params", text, "null", "expression (ECMAScript) searched in the names of trainable parameters"},
    {"lr", number, "null", "learning rate; left out: optimizer.lr", {.low = 0}},
    {"weight_decay", number, "null", "weight decay; left out: optimizer.weight_decay", {.low = 0}},
});

constexpr Rule kShare{.low = 0, .high = 1};
constexpr Rule kRange{.count = 2};
constexpr Rule kColour{.low = 0, .high = 255, .count = 3, .single = true};
constexpr Rule kSize{.low = 1, .high = kMaxSide, .count = 2};

constexpr auto kPhotometric = std::to_array<Key>({
    {"type", text, R"("RandomPhotometricDistort")", "changes of colour"},
    {"brightness", numbers, "[0.875, 1.125]", "range of the factor", kRange},
    {"contrast", numbers, "[0.5, 1.5]", "range of the factor", kRange},
    {"saturation", numbers, "[0.5, 1.5]", "range of the factor", kRange},
    {"hue", numbers, "[-0.05, 0.05]", "range of the shift, in turns of the hue circle", kRange},
    {"p", number, "0.5", "chance of each change", kShare},
});
constexpr auto kZoomOut = std::to_array<Key>({
    {"type", text, R"("RandomZoomOut")", "puts the picture on a larger canvas"},
    {"fill", integers, "[0, 0, 0]", "colour of the canvas; one number: grey", kColour},
    {"side_range", numbers, "[1.0, 4.0]", "range of the canvas size", kRange},
    {"p", number, "0.5", "chance", kShare},
});
constexpr auto kIouCrop = std::to_array<Key>({
    {"type", text, R"("RandomIoUCrop")", "a crop that keeps boxes to a drawn overlap"},
    {"min_scale", number, "0.3", "smallest side of the crop, as a share"},
    {"max_scale", number, "1.0", "largest side of the crop, as a share"},
    {"min_aspect_ratio", number, "0.5", "smallest width / height"},
    {"max_aspect_ratio", number, "2.0", "largest width / height"},
    {"sampler_options", numbers, "[0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]", "overlaps to draw from; 1: no crop", {.low = 0}},
    {"trials", integer, "40", "crops tried for a drawn overlap", {.low = 1}},
    {"p", number, "1.0", "chance", kShare},
});
constexpr auto kSanitize = std::to_array<Key>({
    {"type", text, R"("SanitizeBoundingBoxes")", "drops boxes that a crop left too small"},
    {"min_size", number, "1.0", "smallest width and height in pixels", {.low = 1}},
});
constexpr auto kFlip = std::to_array<Key>({
    {"type", text, R"("RandomHorizontalFlip")", "mirrors the picture"},
    {"p", number, "0.5", "chance", kShare},
});
constexpr auto kResize = std::to_array<Key>({
    {"type", text, R"("Resize")", "resizes, whatever the aspect ratio"},
    {"size", integers, "[640, 640]", "height and width", kSize},
});
constexpr auto kPad = std::to_array<Key>({
    {"type", text, R"("PadToSize")", "a margin at the right and at the bottom"},
    {"size", integers, "[640, 640]", "width and height, as in the reference; one number: both", {.low = 1, .high = kMaxSide, .count = 2, .single = true}},
    {"fill", integers, "[0, 0, 0]", "colour of the margin; one number: grey", kColour},
    {"padding_mode", text, R"("constant")", "what the margin shows", {.only = R"(["constant"])"}},
});
constexpr auto kToTensor = std::to_array<Key>({
    {"type", text, R"("ConvertPILImage")", "what the loader does anyway"},
    {"dtype", text, R"("float32")", "type of pixels", {.only = R"(["float32"])"}},
    {"scale", boolean, "true", "pixels from 0 to 1", {.only = "[true]"}},
});
constexpr auto kToFractions = std::to_array<Key>({
    {"type", text, R"("ConvertBoxes")", "what the loader does anyway"},
    {"fmt", text, R"("cxcywh")", "form of boxes", {.only = R"(["cxcywh"])"}},
    {"normalize", boolean, "true", "boxes in fractions of the picture", {.only = "[true]"}},
});

constexpr std::string_view kTrainList = "train_dataloader.dataset.transforms.ops", kValList = "val_dataloader.dataset.transforms.ops";

struct Type {
  std::string_view name;
  std::span<const Key> keys;
};
constexpr Type kTypes[] = {{"RandomPhotometricDistort", kPhotometric}, {"RandomZoomOut", kZoomOut}, {"RandomIoUCrop", kIouCrop},
                           {"SanitizeBoundingBoxes", kSanitize}, {"RandomHorizontalFlip", kFlip}, {"Resize", kResize}, {"PadToSize", kPad},
                           {"ConvertPILImage", kToTensor}, {"ConvertBoxes", kToFractions}};

}  // namespace

std::span<const Key> keys() { return kKeys; }

bool has_typed_entries(std::string_view list) { return list == kTrainList || list == kValList; }

std::span<const Key> entry_keys(std::string_view list, std::string_view type) {
  if (list == "optimizer.params") return kGroup;
  for (const Type& known : kTypes) {
    if (has_typed_entries(list) && known.name == type) return known.keys;
  }
  return {};
}

std::span<const std::string> op_types() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Type& known : kTypes) all.emplace_back(known.name);
    return all;
  }();
  return names;
}

}  // namespace detr::train::schema

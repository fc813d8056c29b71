#pragma once
#include <nlohmann/json.hpp>
#include <string>

/// Inside of `make_synthetic`: annotation files with one fault.
namespace detr::data::synth {

/// Throws ConfigError where `fault` is not one of synth_faults().
void check_fault(const std::string& fault);

/// The text of an annotation file with the fault of that name (one of synth_faults(); empty: none). `coco` is a good data set
/// with at least one image and one category.
std::string faulty_text(nlohmann::ordered_json coco, const std::string& fault);

}  // namespace detr::data::synth

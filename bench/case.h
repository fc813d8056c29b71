#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bench/inputs.h"
#include "bench/roofline.h"

namespace detr::bench {

/// An op with its inputs, ready to run any number of times on the stream they were made for (or one with another arena).
struct Work {
  std::function<void(const Stream&)> run;
  std::vector<Tensor> outputs;   ///< everything that it writes
};

/// One line of the benchmark.
struct Case {
  std::string op;
  std::string variant = {};      ///< what the sizes do not say
  std::vector<std::pair<std::string, std::int64_t>> shape = {};   ///< letters of the glossary and their sizes
  DType dtype = DType::bf16;     ///< of what most bytes are
  std::int64_t size = 1;         ///< images, as a rule: what `make` is given where time is taken
  std::int64_t small_size = 1;   ///< what it is given where the results are compared with the CPU's
  Cost cost = {};                ///< at `size`
  std::function<Work(Inputs&, std::int64_t)> make = {};
};

/// "decoder N=16 Q=500": the variant and the sizes.
inline std::string shape_text(const Case& c) {
  std::string text = c.variant;
  for (const auto& [letter, count] : c.shape) text += (text.empty() ? "" : " ") + letter + "=" + std::to_string(count);
  return text;
}

}  // namespace detr::bench

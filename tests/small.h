#pragma once
#include <cstdlib>

namespace detr::test {

/// Whether the environment variable DETR_SMALL_TESTS asks tests to leave out sizes that take no other path through a kernel than
/// smaller ones do: under a tool that watches every access (compute-sanitizer's racecheck) they would take minutes.
inline bool small_tests() { return std::getenv("DETR_SMALL_TESTS") != nullptr; }

}  // namespace detr::test

#pragma once
#include <type_traits>

#include "kernels/activation.h"
#include "runtime/error.h"

namespace detr::kernels {

template <Activation kind>
using ActivationTag = std::integral_constant<Activation, kind>;

/// Calls fn(ActivationTag<activation>{}), so that the choice is made once and not for each element.
template <class F>
void dispatch_activation(Activation activation, F&& fn) {
  switch (activation) {
    case Activation::none: fn(ActivationTag<Activation::none>{}); return;
    case Activation::relu: fn(ActivationTag<Activation::relu>{}); return;
    case Activation::silu: fn(ActivationTag<Activation::silu>{}); return;
    case Activation::gelu: fn(ActivationTag<Activation::gelu>{}); return;
    case Activation::sigmoid: fn(ActivationTag<Activation::sigmoid>{}); return;
  }
  throw InvalidArgument("activation: unknown kind ", static_cast<int>(activation));
}

/// Whether the derivative is taken from the output rather than from the input.
template <Activation kind>
inline constexpr bool kReadsOutput = kind == Activation::relu || kind == Activation::sigmoid;

}  // namespace detr::kernels

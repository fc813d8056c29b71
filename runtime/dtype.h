#pragma once
#include <bit>
#include <cstdint>
#include <ostream>
#include <type_traits>

namespace detr {

/// Element types of a Tensor. bf16 is stored as its 16 bits.
enum class DType : std::uint8_t { f32, f64, bf16, i64, u8 };

/// Storage type of a bf16 element on the host: the upper half of an f32.
struct BFloat16 {
  std::uint16_t bits = 0;
};

inline float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }
/// Rounded to nearest, ties to even; NaN stays NaN.
inline BFloat16 to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};
  return {static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

/// Bytes of one element.
constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return 4;
    case DType::f64: return 8;
    case DType::bf16: return 2;
    case DType::i64: return 8;
    case DType::u8: return 1;
  }
  return 0;
}

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::f64: return "f64";
    case DType::bf16: return "bf16";
    case DType::i64: return "i64";
    case DType::u8: return "u8";
  }
  return "?";
}

/// What boxes, statistics, losses and the gradients of parameters have where activations are of this type: f32 for bf16.
constexpr DType wide_dtype(DType dtype) { return dtype == DType::bf16 ? DType::f32 : dtype; }

inline std::ostream& operator<<(std::ostream& out, DType dtype) { return out << name_of(dtype); }

/// The DType of a C++ element type: dtype_of<float> is DType::f32.
template <class T> struct DTypeOf;
template <> struct DTypeOf<float> { static constexpr DType value = DType::f32; };
template <> struct DTypeOf<double> { static constexpr DType value = DType::f64; };
template <> struct DTypeOf<BFloat16> { static constexpr DType value = DType::bf16; };
template <> struct DTypeOf<std::int64_t> { static constexpr DType value = DType::i64; };
template <> struct DTypeOf<std::uint8_t> { static constexpr DType value = DType::u8; };
template <class T> inline constexpr DType dtype_of = DTypeOf<std::remove_const_t<T>>::value;

}  // namespace detr

#include "tests/dist/steps.h"

#include <algorithm>
#include <cmath>

namespace detr::dist::test {
namespace {

std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}
std::uint64_t draw(std::uint64_t seed, std::int64_t step, int rank, std::int64_t what) {
  return mix(mix(mix(mix(seed) + static_cast<std::uint64_t>(step)) + static_cast<std::uint64_t>(rank)) + static_cast<std::uint64_t>(what));
}

}  // namespace

Layout Steps::layout() {
  std::vector<ParameterSpec> parameters;
  for (int i = 0; i < 15; ++i) parameters.push_back({"layer." + std::to_string(i) + ".weight", DType::f32, {i + 1, 37}});
  return make_layout(std::move(parameters), {1024, 4096});
}

bool Steps::reached(std::int64_t step, int rank, int parameter) const {
  if (std::ranges::find(never, parameter) != never.end()) return false;
  return std::ldexp(static_cast<double>(draw(seed, step, rank, -1 - parameter)), -64) >= missing;
}

float Steps::gradient(std::int64_t step, int rank, std::int64_t element) const {
  const std::uint64_t bits = draw(seed, step, rank, element);
  return integers ? static_cast<float>(bits % 201U) - 100.0F : static_cast<float>(std::ldexp(static_cast<double>(bits), -63) - 1.0);
}

void Steps::run(Bucketer& bucketer, const Tensor& grads, std::int64_t step, int rank, const std::function<void(std::size_t)>& before) const {
  const Layout& layout = bucketer.layout();
  std::ranges::fill(grads.span<float>(), 0.0F);
  bucketer.begin(step);
  std::vector<int> order(layout.parameters.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::mt19937 shuffle(order_seed * 1000U + static_cast<unsigned>(step * 10 + rank));
  std::ranges::shuffle(order, shuffle);
  for (std::size_t n = 0; n < order.size(); ++n) {
    const int p = order[n];
    before(n);
    if (!reached(step, rank, p)) {
      if (shuffle() % 2U == 0) bucketer.mark_missing(p);   // or nobody says so
      continue;
    }
    const std::int64_t begin = layout.offsets[static_cast<std::size_t>(p)], count = layout.parameters[static_cast<std::size_t>(p)].shape.numel();
    for (std::int64_t i = begin; i < begin + count; ++i) grads.data<float>()[i] = gradient(step, rank, i);
    bucketer.mark_ready(p);
  }
  for (std::int64_t i = 0; i < bucketer.extras().numel(); ++i) bucketer.extras().data<double>()[i] = static_cast<double>(rank + i + step);
  bucketer.finish();
}

std::vector<int> unused_everywhere(const Bucketer& bucketer, const Stream& stream) {
  const Tensor counts = stream.to_host(bucketer.used());
  std::vector<int> unused;
  for (std::size_t i = 0; i < bucketer.layout().parameters.size(); ++i) {
    if (counts.span<double>()[i] == 0.0) unused.push_back(static_cast<int>(i));
  }
  return unused;
}

Tensor values(DType dtype, std::int64_t count, int rank, bool integers) {
  std::mt19937 draw(static_cast<unsigned>(17 * rank + 3));
  Tensor out = host_zeros({count}, dtype);
  for (std::int64_t i = 0; i < count; ++i) {
    const double x = integers ? static_cast<double>(draw() % 17U) - 8.0 : std::ldexp(static_cast<double>(draw()), -31) - 1.0;
    if (dtype == DType::f32) out.data<float>()[i] = static_cast<float>(x);
    if (dtype == DType::f64) out.data<double>()[i] = x;
    if (dtype == DType::bf16) out.data<BFloat16>()[i] = to_bf16(static_cast<float>(x));
    if (dtype == DType::u8) out.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(x + 8.0);
    if (dtype == DType::i64) out.data<std::int64_t>()[i] = static_cast<std::int64_t>(x * (integers ? 1.0 : 1e15));
  }
  return out;
}

}  // namespace detr::dist::test

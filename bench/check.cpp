#include "bench/check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/error.h"
#include "runtime/host_value.h"

namespace detr::bench {
namespace {

constexpr std::int64_t kReadBytes = std::int64_t{32} << 20;   // of each end of an output
constexpr std::uint64_t kSeed = 1;

bool is_integer(const Tensor& tensor) { return tensor.dtype() == DType::i64 || tensor.dtype() == DType::u8; }

/// The ends of each output, on the host. Waits.
std::vector<Tensor> read_ends(const Stream& stream, const Work& work) {
  std::vector<Tensor> parts;
  for (const Tensor& output : work.outputs) {
    const Tensor flat = output.reshape({output.numel()});
    const std::int64_t most = kReadBytes / size_of(output.dtype());
    if (flat.numel() <= 2 * most) {
      parts.push_back(stream.to_host(flat));
    } else {
      parts.push_back(stream.to_host(flat.slice(0, most)));
      parts.push_back(stream.to_host(flat.slice(flat.numel() - most, flat.numel())));
    }
  }
  return parts;
}

std::vector<Tensor> run_once(const Case& c, const RandomPool& pool, std::int64_t size) {
  Inputs inputs(pool, kSeed);
  const Work work = c.make(inputs, size);
  work.run(pool.stream);
  return read_ends(pool.stream, work);
}

bool same_bits(const Tensor& a, const Tensor& b) { return a.bytes() == b.bytes() && std::memcmp(a.raw(), b.raw(), static_cast<std::size_t>(a.bytes())) == 0; }

}  // namespace

double difference(const Tensor& got, const Tensor& wanted) {
  DETR_CHECK(got.numel() == wanted.numel() && is_integer(got) == is_integer(wanted), "difference: ", got, " and ", wanted);
  if (got.numel() == 0) return 0;
  if (is_integer(got)) {
    DETR_CHECK(got.dtype() == DType::i64 && wanted.dtype() == DType::i64, "difference: integers must be i64, got ", got, " and ", wanted);
    std::int64_t others = 0;
    for (std::int64_t i = 0; i < got.numel(); ++i) others += got.data<std::int64_t>()[i] != wanted.data<std::int64_t>()[i] ? 1 : 0;
    return static_cast<double>(others) / static_cast<double>(got.numel());
  }
  double error = 0, size = 0;
  for (std::int64_t i = 0; i < got.numel(); ++i) {
    const double a = host_value(got, i), b = host_value(wanted, i);
    error += (a - b) * (a - b);
    size += b * b;
  }
  if (!std::isfinite(error)) return std::numeric_limits<double>::infinity();
  return error == 0 ? 0 : std::sqrt(error / size);
}

bool all_finite(const Tensor& tensor) {
  if (is_integer(tensor)) return true;
  bool finite = true;
  for (std::int64_t i = 0; i < tensor.numel(); ++i) finite = finite && std::isfinite(host_value(tensor, i));
  return finite;
}

Check check_case(const Case& c, const RandomPool& pool, const RandomPool* oracle) {
  Check check;
  {
    const std::vector<Tensor> first = run_once(c, pool, c.size), second = run_once(c, pool, c.size);
    for (std::size_t i = 0; i < first.size(); ++i) {
      if (!all_finite(first[i])) check.fault = "an output is not finite";
      else if (!same_bits(first[i], second[i])) check.fault = "two runs differ";
    }
  }
  if (oracle) {
    const std::vector<Tensor> got = run_once(c, pool, c.small_size), wanted = run_once(c, *oracle, c.small_size);
    check.max_error = 0;
    bool close = true;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double error = difference(got[i], wanted[i]);
      close = close && error <= (is_integer(got[i]) ? 0 : c.dtype == DType::bf16 ? 0.02 : 1e-4);
      check.max_error = std::max(check.max_error, error);
    }
    if (!close && check.fault.empty()) check.fault = concat("differs from the CPU by ", check.max_error);
  }
  check.ok = check.fault.empty();
  return check;
}

}  // namespace detr::bench

#pragma once
#include <memory>
#include <vector>

#include "runtime/random.h"
#include "runtime/stream.h"

namespace detr::bench {

/// A few million random numbers on a stream's device, from which inputs of any size are tiled. The numbers are exact in bf16, so a CPU in f32
/// and a GPU in bf16 are given the same ones.
struct RandomPool {
  RandomPool(const Stream& stream, DType dtype);

  Stream stream;
  Stream host;          ///< on the CPU, for what inputs are computed from; `stream` itself where that is on the CPU
  DType dtype;          ///< of activations
  Tensor values;        ///< standard normal, of `dtype`
  Tensor wide_values;   ///< the same, of its wide dtype
  Tensor bytes;         ///< uniform, u8
  std::shared_ptr<std::vector<float>> host_values;
};

/// Makes the inputs of one piece of work: the same for the same seed and order of calls, on every device. Never zeros: a GPU at its power limit is
/// faster on those.
class Inputs {
 public:
  Inputs(const RandomPool& pool, std::uint64_t seed) : pool_(&pool), random_(RandomKey(seed).fold(1)), at_(seed * 7919) {}

  const Stream& stream() const { return pool_->stream; }
  const Stream& host() const { return pool_->host; }
  DType dtype() const { return pool_->dtype; }
  DType wide() const { return wide_dtype(pool_->dtype); }

  /// sigma times standard normal values, of the activations' dtype or the wide one. sigma is a power of two, so that nothing is rounded.
  Tensor normal(const Shape& shape, double sigma = 1) { return tiled(shape, sigma, pool_->values); }
  Tensor wide_normal(const Shape& shape, double sigma = 1) { return tiled(shape, sigma, pool_->wide_values); }
  /// Uniform bytes.
  Tensor bytes(const Shape& shape) { return tiled(shape, 1, pool_->bytes); }
  /// mean + sigma times normal values, f32 on the host.
  Tensor host_normal(const Shape& shape, double mean, double sigma);
  /// (..., 4) f32 on the host: boxes (cx, cy, w, h) inside the picture, sizes uniform from 0.05 to 0.5.
  Tensor host_boxes(const Shape& shape);
  /// i64 on the host, uniform in [0, bound).
  Tensor host_integers(const Shape& shape, std::int64_t bound);

  /// The host's tensor on the device. Waits.
  Tensor upload(const Tensor& host) const;
  Tensor empty(const Shape& shape) const { return stream().empty(shape, dtype()); }
  Tensor wide_empty(const Shape& shape) const { return stream().empty(shape, wide()); }

 private:
  Tensor tiled(const Shape& shape, double sigma, const Tensor& pool);
  /// Where the next input starts in the pool.
  std::int64_t next_start();

  const RandomPool* pool_;
  RandomSequence random_;
  std::uint64_t at_;
};

}  // namespace detr::bench

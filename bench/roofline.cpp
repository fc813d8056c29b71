#include "bench/roofline.h"

#include <algorithm>

namespace detr::bench {
namespace {

double real(std::int64_t count) { return static_cast<double>(count); }

}  // namespace

Cost& Cost::operator+=(const Cost& other) {
  mac += other.mac;
  bytes += other.bytes;
  floor_ms += other.floor_ms;
  return *this;
}

Cost operator+(Cost a, const Cost& b) { return a += b; }

Cost operator*(double factor, const Cost& cost) { return {factor * cost.mac, factor * cost.bytes, factor * cost.floor_ms}; }

Cost kernel_cost(double mac, double bytes) { return {mac, bytes, 1e3 * std::max(2 * mac / kFlopsPerSecond, bytes / kBytesPerSecond)}; }

double ConvGeometry::x() const { return real(n * h * w * in); }
double ConvGeometry::y() const { return real(n * out_h() * out_w() * out); }
double ConvGeometry::weights() const { return real(in * out * kernel * kernel); }
double ConvGeometry::mac() const { return y() * real(in * kernel * kernel); }

Cost conv_forward(const ConvGeometry& g, double e, double extra_maps) { return kernel_cost(g.mac(), e * (g.x() + (1 + extra_maps) * g.y() + g.weights())); }

Cost conv_data_gradient(const ConvGeometry& g, double e, double extra_maps) {
  return kernel_cost(g.mac(), e * ((1 + extra_maps) * g.x() + g.y() + g.weights()));
}

Cost conv_weight_gradient(const ConvGeometry& g, double e) { return kernel_cost(g.mac(), e * (g.x() + g.y()) + 4 * g.weights()); }

Cost linear_product(std::int64_t rows, std::int64_t in, std::int64_t out, double e) { return kernel_cost(real(rows) * real(in) * real(out), e * real(rows) * real(in + out)); }

Cost attention_forward(const AttentionGeometry& g, double e) {
  const double width = real(g.n * g.heads * g.head_dim);
  return kernel_cost(2 * width * real(g.queries) * real(g.keys), e * width * 2 * real(g.queries + g.keys));
}

Cost attention_backward(const AttentionGeometry& g, double e) { return 2.5 * attention_forward(g, e); }

namespace {

/// Samples of one image, N left out.
double samples(const SamplerGeometry& g) { return real(g.queries * g.heads * g.slots); }

Cost sampler(const SamplerGeometry& g, double e, double mac_per_value, double maps_of_tokens, double numbers_per_sample) {
  const double width = real(g.heads * g.head_dim), n = real(g.n);
  return kernel_cost(mac_per_value * real(g.head_dim) * n * samples(g),
                     e * n * (maps_of_tokens * real(g.tokens) * width + real(g.queries) * width + numbers_per_sample * samples(g)));
}

}  // namespace

Cost sampler_forward(const SamplerGeometry& g, double e) { return sampler(g, e, 4, 1, 3); }
Cost sampler_backward(const SamplerGeometry& g, double e) { return sampler(g, e, 8, 2, 6); }

Cost passes_over(std::int64_t elements, double passes, double e) { return kernel_cost(0, passes * e * real(elements)); }

Cost batch_norm_forward(std::int64_t elements, double e, bool residual) { return passes_over(elements, residual ? 4 : 3, e); }

Cost batch_norm_inference(std::int64_t elements, double e, bool residual) { return passes_over(elements, residual ? 3 : 2, e); }

Cost batch_norm_backward(std::int64_t elements, double e, bool batch_statistics, int masks, bool residual) {
  const int reads = batch_statistics ? 2 * (2 + masks) : 1 + masks;
  return passes_over(elements, reads + 1 + (residual ? 1 : 0), e);
}

Cost layer_norm_forward(std::int64_t rows, std::int64_t width, double e, bool residual) {
  return kernel_cost(0, real(rows) * (real(width) * e * (residual ? 4 : 2) + 8));
}

Cost layer_norm_backward(std::int64_t rows, std::int64_t width, double e) { return kernel_cost(0, real(rows) * (real(width) * e * 3 + 8)); }

Cost detection_loss(std::int64_t n, std::int64_t queries, std::int64_t classes, double e) { return kernel_cost(0, 2 * e * real(n * queries * classes)); }

}  // namespace detr::bench

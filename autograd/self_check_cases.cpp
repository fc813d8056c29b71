#include "autograd/self_check_cases.h"

#include <memory>

#include "autograd/attention.h"
#include "autograd/conv2d.h"
#include "autograd/detection.h"
#include "autograd/gather.h"
#include "autograd/linear.h"
#include "autograd/norm.h"
#include "autograd/pointwise.h"
#include "autograd/spatial.h"
#include "autograd/statistics.h"
#include "runtime/error.h"

namespace detr {
namespace {

using kernels::Activation;
using Constants = std::span<const Tensor>;

Tensor normals(const Shape& shape, std::uint64_t seed) {
  Tensor x = host_zeros(shape, DType::f64);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<double>()[i] = normal(RandomKey(seed), static_cast<std::uint64_t>(i));
  return x;
}

Tensor uniforms(const Shape& shape, double low, double high, std::uint64_t seed) {
  Tensor x = host_zeros(shape, DType::f64);
  for (std::int64_t i = 0; i < x.numel(); ++i) x.data<double>()[i] = low + (high - low) * uniform(RandomKey(seed), static_cast<std::uint64_t>(i));
  return x;
}

Tensor integers(const Shape& shape, std::vector<std::int64_t> values) { return host_tensor<std::int64_t>(shape, values); }

CaseTensor weight(Tensor values) { return {std::move(values), CaseTensor::Type::weight}; }
CaseTensor wide(Tensor values) { return {std::move(values), CaseTensor::Type::wide}; }

void add_products(std::vector<OpCase>& cases) {
  cases.push_back({"linear", {normals({3, 5}, 1), weight(normals({4, 5}, 2)), weight(normals({4}, 3))}, {},
                   [](Context& c, Inputs in, Constants) { return linear(c, in[0], in[1], in[2]); }});
  for (const std::int64_t stride : {1, 2}) {
    cases.push_back({concat("conv2d, stride ", stride), {normals({2, 5, 4, 3}, 4), weight(normals({2, 3, 3, 3}, 5))}, {},
                     [stride](Context& c, Inputs in, Constants) { return conv2d(c, in[0], in[1], {stride, 1}); }});
  }
  // Two users of one input: the second adds its gradient to the first's.
  cases.push_back({"linear, shared input", {normals({3, 5}, 42), weight(normals({4, 5}, 43)), weight(normals({4, 5}, 44))}, {},
                   [](Context& c, Inputs in, Constants) { return add(c, linear(c, in[0], in[1], {}), linear(c, in[0], in[2], {})); }});
  cases.push_back({"conv2d, shared input", {normals({1, 3, 2, 8}, 45), weight(normals({8, 3, 3, 8}, 46)), weight(normals({8, 1, 1, 8}, 47))}, {},
                   [](Context& c, Inputs in, Constants) { return add(c, conv2d(c, in[0], in[1], {1, 1}), conv2d(c, in[0], in[2], {1, 0})); }});
  // No sum before the activation is near 0, where rounding the folded weight to bf16 could move it across ReLU's kink.
  for (const Activation act : {Activation::none, Activation::relu}) {
    cases.push_back({concat("conv2d_norm, activation ", static_cast<int>(act)), {normals({1, 3, 2, 3}, 50), weight(normals({3, 3, 3, 3}, 51)), normals({1, 3, 2, 3}, 52)},
                     {wide(uniforms({3}, 0.5, 1.5, 53)), wide(normals({3}, 54)), wide(normals({3}, 55)), wide(uniforms({3}, 0.5, 1.5, 56))},
                     [act](Context& c, Inputs in, Constants norm) {
                       const Tensor exact = cast(c, in[1].detach(), norm[0].dtype()).value();
                       return conv2d_norm(c, in[0], in[1], exact, {norm[0], norm[1], norm[2], norm[3]}, in[2], act, {1, 1});
                     }});
  }
}

/// Two ranks with the same rows, whose joined statistics and gradients are those of one.
class Twins final : public SharedStatistics {
 public:
  int ranks() const override { return 2; }
  int gather_forward(const Stream& stream, const Tensor& mine, Tensor& all) override {
    gather(stream, mine, all);
    return 0;
  }
  void gather_backward(const Stream& stream, int, const Tensor& mine, Tensor& all) override { gather(stream, mine, all); }

 private:
  static void gather(const Stream& stream, const Tensor& mine, Tensor& all) {
    for (int rank = 0; rank < 2; ++rank) {
      Tensor part = all.view(rank * mine.numel(), mine.shape());
      stream.copy(mine, part);
    }
  }
};

void add_norms(std::vector<OpCase>& cases) {
  for (const Activation act : {Activation::none, Activation::relu, Activation::silu}) {
    for (const bool batch : {true, false}) {
      cases.push_back({concat("batch_norm, ", batch ? "batch" : "given", " statistics, activation ", static_cast<int>(act)),
                       {normals({2, 3, 2, 3}, 6), wide(uniforms({3}, 0.5, 1.5, 7)), wide(normals({3}, 8)), normals({2, 3, 2, 3}, 9)},
                       {wide(normals({3}, 10)), wide(uniforms({3}, 0.5, 1.5, 11))},
                       [act, batch](Context& c, Inputs in, Constants running) {
                         return batch_norm(c, in[0], in[1], in[2], in[3], act, 1e-5, 0.1, batch, {running[0], running[1]});
                       }});
    }
  }
  for (const Activation act : {Activation::relu, Activation::silu}) {
    cases.push_back({concat("batch_norm, shared statistics, activation ", static_cast<int>(act)),
                     {normals({2, 3, 2, 3}, 57), wide(uniforms({3}, 0.5, 1.5, 58)), wide(normals({3}, 59)), normals({2, 3, 2, 3}, 60)},
                     {wide(normals({3}, 61)), wide(uniforms({3}, 0.5, 1.5, 62))},
                     [act, twins = std::make_shared<Twins>()](Context& c, Inputs in, Constants running) {
                       c.statistics = twins.get();
                       const Variable y = batch_norm(c, in[0], in[1], in[2], in[3], act, 1e-5, 0.1, true, {running[0], running[1]});
                       c.statistics = nullptr;
                       return y;
                     }});
  }
  cases.push_back({"batch_norm_sum, shared statistics",
                   {normals({2, 3, 2, 3}, 63), wide(uniforms({3}, 0.5, 1.5, 64)), wide(normals({3}, 65)), normals({2, 3, 2, 3}, 66), wide(uniforms({3}, 0.5, 1.5, 67)), wide(normals({3}, 68))},
                   {wide(normals({3}, 69)), wide(uniforms({3}, 0.5, 1.5, 70)), wide(normals({3}, 71)), wide(uniforms({3}, 0.5, 1.5, 72))},
                   [twins = std::make_shared<Twins>()](Context& c, Inputs in, Constants running) {
                     c.statistics = twins.get();
                     const Variable y = batch_norm_sum(c, {in[0], in[1], in[2], 1e-5, 0.1, {running[0], running[1]}}, {in[3], in[4], in[5], 1e-5, 0.1, {running[2], running[3]}},
                                                       Activation::silu, true);
                     c.statistics = nullptr;
                     return y;
                   }});
  cases.push_back({"layer_norm", {normals({3, 5}, 12), normals({3, 5}, 13), wide(normals({5}, 14)), wide(normals({5}, 15))}, {},
                   [](Context& c, Inputs in, Constants) { return layer_norm(c, in[0], in[1], in[2], in[3], 1e-5); }});
}

void add_pointwise(std::vector<OpCase>& cases) {
  for (const Activation act : {Activation::relu, Activation::silu, Activation::gelu, Activation::sigmoid}) {
    cases.push_back({concat("activation ", static_cast<int>(act)), {normals({3, 7}, 16)}, {},
                     [act](Context& c, Inputs in, Constants) { return activation(c, in[0], act); }});
  }
  cases.push_back({"add", {normals({2, 3, 4}, 17), normals({3, 4}, 18)}, {}, [](Context& c, Inputs in, Constants) { return add(c, in[0], in[1]); }});
  cases.push_back({"sum", {normals({2, 3}, 19), normals({4}, 20)}, {}, [](Context& c, Inputs in, Constants) { return sum(c, in); }});
  cases.push_back({"cast, and add", {normals({3, 5}, 48), wide(normals({3, 5}, 49))}, {},
                   [](Context& c, Inputs in, Constants) { return add(c, cast(c, in[0], in[1].value().dtype()), in[1]); }});
}

void add_spatial(std::vector<OpCase>& cases) {
  cases.push_back({"max_pool", {normals({1, 5, 6, 2}, 21)}, {}, [](Context& c, Inputs in, Constants) { return max_pool(c, in[0]); }});
  cases.push_back({"avg_pool", {normals({1, 5, 6, 2}, 22)}, {}, [](Context& c, Inputs in, Constants) { return avg_pool(c, in[0]); }});
  cases.push_back({"upsample", {normals({1, 2, 3, 2}, 23)}, {}, [](Context& c, Inputs in, Constants) { return upsample(c, in[0]); }});
  cases.push_back({"concatenate", {normals({2, 3, 2}, 24), normals({2, 1, 2}, 25)}, {}, [](Context& c, Inputs in, Constants) { return concatenate(c, in, 1); }});
  cases.push_back({"reshape", {normals({2, 3}, 26)}, {}, [](Context& c, Inputs in, Constants) { return reshape(c, in[0], {3, 2}); }});
  cases.push_back({"gather_rows", {normals({2, 4, 3}, 27)}, {integers({2, 3}, {3, 0, 3, 1, 2, 0}), host_tensor<std::uint8_t>({4}, std::vector<std::uint8_t>{1, 1, 0, 1})},
                   [](Context& c, Inputs in, Constants k) { return gather_rows(c, in[0], k[0], k[1]); }});
  cases.push_back({"embedding", {weight(normals({4, 3}, 28))}, {integers({2, 3}, {0, 2, 1, 1, 2, 0})},
                   [](Context& c, Inputs in, Constants k) { return embedding(c, in[0], k[0], 3); }});
}

void add_attention(std::vector<OpCase>& cases) {
  cases.push_back({"attention", {normals({2, 5, 4}, 29), normals({2, 5, 4}, 30), normals({2, 5, 4}, 31)}, {integers({5}, {0, 1, -2, -1, -1})},
                   [](Context& c, Inputs in, Constants k) { return attention(c, in[0], in[1], in[2], 2, k[0]); }});
  for (const auto sampling : {kernels::Sampling::bilinear, kernels::Sampling::discrete}) {
    cases.push_back({concat("deformable_attention, ", sampling == kernels::Sampling::bilinear ? "bilinear" : "discrete"),
                     {normals({1, 20, 4}, 32), normals({1, 3, 2 * 3 * 2}, 33), normals({1, 3, 2 * 3}, 34)}, {wide(uniforms({1, 3, 4}, 0.2, 0.8, 35))},
                     [sampling](Context& c, Inputs in, Constants k) {
                       kernels::DeformableOptions options;
                       options.heads = 2;
                       options.levels = {{4, 4}, {2, 2}};
                       options.points = {2, 1};
                       options.sampling = sampling;
                       return deformable_attention(c, in[0], in[1], in[2], k[0], options);
                     }});
  }
}

void add_detection(std::vector<OpCase>& cases) {
  cases.push_back({"refine_boxes", {wide(normals({3, 4}, 36)), wide(uniforms({3, 4}, 0.1, 0.9, 37))}, {},
                   [](Context& c, Inputs in, Constants) { return refine_boxes(c, in[0], in[1]); }});
  cases.push_back({"detection_loss", {normals({2, 5, 3}, 38), wide(uniforms({2, 5, 4}, 0.2, 0.5, 39))},
                   {integers({2, 3}, {0, -1, 1, -1, 0, -1}), integers({2, 2}, {1, -1, -1, 0}), integers({2}, {0, -2}), wide(uniforms({1}, 2, 2, 0)),
                    integers({2, 2}, {2, 0, 1, 1}), wide(uniforms({2, 2, 4}, 0.2, 0.5, 40))},
                   [](Context& c, Inputs in, Constants k) {
                     return detection_loss(c, in[0], in[1], {{2, k[0], Tensor(), k[3]}, {0, k[1], k[2], k[3]}}, {k[4], k[5]}, {});
                   },
                   false});
}

}  // namespace

std::vector<OpCase> op_cases() {
  std::vector<OpCase> cases;
  add_products(cases);
  add_norms(cases);
  add_pointwise(cases);
  add_spatial(cases);
  add_attention(cases);
  add_detection(cases);
  return cases;
}

}  // namespace detr

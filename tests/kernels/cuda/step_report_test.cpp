#include "kernels/step_report.h"

#include "tests/gpu.h"
#include "tests/kernels/values.h"

using namespace detr;
using namespace detr::test;

TEST_CASE("step_report on CUDA: more inputs than one launch takes", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  std::vector<Tensor> inputs;
  std::vector<double> wanted;
  for (int i = 0; i < 70; ++i) {
    const Tensor host = random({(i * 37) % 301}, DType::f64, static_cast<std::uint64_t>(i));
    const bool whole = i % 3 == 0;
    Tensor ids = host_zeros(host.shape(), DType::i64);
    for (std::int64_t k = 0; k < host.numel(); ++k) {
      ids.data<std::int64_t>()[k] = k - 5;
      wanted.push_back(whole ? static_cast<double>(k - 5) : rounded(host, DType::f32).data<double>()[k]);
    }
    inputs.push_back(whole ? on_gpu(ids, DType::i64) : on_gpu(host, DType::f32));
  }
  Guarded y({static_cast<std::int64_t>(wanted.size())}, DType::f64);
  kernels::collect(gpu(), inputs, y.tensor);
  CHECK(values_of(y.values()) == wanted);
}

TEST_CASE("step_report on CUDA: first element that is not finite", "[gpu]") {
  if (!cuda_available()) SKIP("no CUDA device");
  std::vector<Tensor> inputs;
  std::vector<double> wanted;
  const double inf = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 40; ++i) {
    Tensor host = random({i * i * 97}, DType::f64, static_cast<std::uint64_t>(i));
    const std::int64_t at = i % 4 == 0 || host.numel() == 0 ? -1 : (i * 7919) % host.numel();
    for (std::int64_t k = at; k >= 0 && k < host.numel(); k += 1 + host.numel() / 5) host.data<double>()[k] = i % 2 ? inf : -std::numeric_limits<double>::quiet_NaN();
    wanted.push_back(static_cast<double>(at));
    inputs.push_back(on_gpu(host, i % 3 ? DType::bf16 : DType::f32));
  }
  Guarded first({40}, DType::i64);
  kernels::first_not_finite(gpu(), inputs, first.tensor);
  CHECK(values_of(first.values()) == wanted);
}

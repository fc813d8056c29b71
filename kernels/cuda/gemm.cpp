#include "kernels/cuda/gemm.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "runtime/cuda/stream_state.h"
#include "runtime/cuda/try.h"

namespace detr::cuda {

inline void expect_success(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) throw DeviceError(call, ": ", cublasLtGetStatusString(status));
}

}  // namespace detr::cuda

namespace detr::kernels::cuda {
namespace {

using detr::cuda::Unique;
using UniqueLt = Unique<cublasLtHandle_t, cublasLtDestroy>;
using UniqueProduct = Unique<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using UniqueLayout = Unique<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using UniquePreference = Unique<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

constexpr std::int64_t kWorkspaceBytes = std::int64_t{32} << 20;

cudaDataType_t type_of(DType dtype) { return dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

/// Largest power of two up to 256 that divides the address.
std::uint32_t alignment_of(const void* place) {
  const auto address = reinterpret_cast<std::uintptr_t>(place);
  std::uint32_t alignment = 256;
  while (address % alignment != 0) alignment /= 2;
  return alignment;
}

UniqueLayout layout(DType dtype, std::int64_t rows, std::int64_t columns) {
  cublasLtMatrixLayout_t made = nullptr;
  DETR_TRY(cublasLtMatrixLayoutCreate(&made, type_of(dtype), static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns), rows));
  return UniqueLayout(made);
}

/// All that fixes an algorithm.
struct Key {
  DType type, c_type;
  bool a_transposed, b_transposed, with_bias;
  std::int64_t m, n, k;
  std::array<std::uint32_t, 3> alignment;
  auto operator<=>(const Key&) const = default;
};

struct Plan {
  UniqueProduct product;
  UniqueLayout first, second, result;
  cublasLtMatmulAlgo_t algorithm;
};

/// The library's handle, its workspace and the algorithms chosen so far.
struct Products {
  explicit Products(const Stream& stream) : workspace(stream.empty({kWorkspaceBytes}, DType::u8)) {
    cublasLtHandle_t made = nullptr;
    DETR_TRY(cublasLtCreate(&made));
    handle.reset(made);
  }

  const Plan& plan(const Key& key);

  UniqueLt handle;
  Tensor workspace;
  std::map<Key, Plan> plans;
};

/// cuBLAS has column-major matrices: row-major c is its transpose, op(b)^T op(a)^T, so b comes first.
const Plan& Products::plan(const Key& key) {
  if (const auto found = plans.find(key); found != plans.end()) return found->second;
  Plan plan;
  cublasLtMatmulDesc_t product = nullptr;
  DETR_TRY(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  plan.product.reset(product);
  const cublasOperation_t first_op = key.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, second_op = key.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  DETR_TRY(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSA, &first_op, sizeof first_op));
  DETR_TRY(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSB, &second_op, sizeof second_op));
  if (key.with_bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    DETR_TRY(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
  }
  plan.first = key.b_transposed ? layout(key.type, key.k, key.n) : layout(key.type, key.n, key.k);
  plan.second = key.a_transposed ? layout(key.type, key.m, key.k) : layout(key.type, key.k, key.m);
  plan.result = layout(key.c_type, key.n, key.m);

  cublasLtMatmulPreference_t preference = nullptr;
  DETR_TRY(cublasLtMatmulPreferenceCreate(&preference));
  const UniquePreference owner(preference);
  const std::size_t workspace_bytes = static_cast<std::size_t>(kWorkspaceBytes);
  // The parts of a split product: not in place, where they are added in the order in which they finish, and not rounded to bf16.
  const std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, const auto& value) { DETR_TRY(cublasLtMatmulPreferenceSetAttribute(preference, name, &value, sizeof value)); };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.alignment[1]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.alignment[0]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.alignment[2]);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.alignment[2]);
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  DETR_TRY(cublasLtMatmulAlgoGetHeuristic(handle.get(), product, plan.first.get(), plan.second.get(), plan.result.get(), plan.result.get(), preference, 1, &result, &found));
  if (found == 0) throw DeviceError("cublasLtMatmulAlgoGetHeuristic: no algorithm for a product ", key.m, " x ", key.n, " x ", key.k, " in ", key.type);
  plan.algorithm = result.algo;
  return plans.emplace(key, std::move(plan)).first->second;
}

}  // namespace

void gemm(const Stream& stream, DType type, Operand a, Operand b, std::int64_t m, std::int64_t n, std::int64_t k, const void* bias,
          DType c_type, void* c, bool add) {
  DETR_CHECK(k >= 1, "gemm: k must be >= 1, got ", k);
  if (m == 0 || n == 0) return;
  auto& products = stream.cuda_state().get<Products>(stream);
  const Plan& plan = products.plan({type, c_type, a.transposed, b.transposed, bias != nullptr, m, n, k, {alignment_of(a.data), alignment_of(b.data), alignment_of(c)}});
  if (bias) DETR_TRY(cublasLtMatmulDescSetAttribute(plan.product.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
  const float one = 1, beta = add ? 1 : 0;
  DETR_TRY(cublasLtMatmul(products.handle.get(), plan.product.get(), &one, b.data, plan.first.get(), a.data, plan.second.get(), &beta, c, plan.result.get(), c,
                          plan.result.get(), &plan.algorithm, products.workspace.raw(), static_cast<std::size_t>(kWorkspaceBytes), detr::cuda::native(stream)));
}

}  // namespace detr::kernels::cuda

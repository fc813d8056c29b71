#include "kernels/gather.h"

#include <algorithm>
#include <vector>

#include "kernels/cuda/launch.cuh"

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffU;
constexpr std::int64_t kMaxWords = 0x7fffffff;   // of one array: the kernels index words in 32 bits

std::uintptr_t address(const void* place) { return reinterpret_cast<std::uintptr_t>(place); }

/// Calls fn(TypeTag<Word>{}) with the widest word, of at most 16 bytes, that divides all of some sizes and addresses, given as
/// their bitwise or.
template <class F>
void with_word(std::uintptr_t bits, F&& fn) {
  if (bits % 16 == 0) fn(TypeTag<uint4>{});
  else if (bits % 8 == 0) fn(TypeTag<uint2>{});
  else if (bits % 4 == 0) fn(TypeTag<unsigned>{});
  else if (bits % 2 == 0) fn(TypeTag<unsigned short>{});
  else fn(TypeTag<unsigned char>{});
}

/// W neighbouring elements: one, or a vector.
template <class T, int W>
__device__ inline void load(const T* place, float (&x)[W]) {
  if constexpr (W == 1) x[0] = to_float(*place);
  else load_vector(place, x);
}
template <class T, int W>
__device__ inline void store(T* place, const float (&x)[W]) {
  if constexpr (W == 1) *place = from_float<T>(x[0]);
  else store_vector(place, x);
}

// ---- concat

constexpr std::size_t kMaxParts = 8;                  // of one launch
constexpr unsigned kUnroll = 4;                       // words a thread copies: all are loaded before the first is stored
constexpr unsigned kBlockWords = kThreads * kUnroll;

/// What a launch copies, in words of one size. Part i lies at place[i] in rows of width[i] words, in all total[i]; its rows start at
/// offset[i] in those of the whole. Blocks from first_block[i] on belong to it.
struct PartTable {
  void* place[kMaxParts];
  unsigned width[kMaxParts], total[kMaxParts];
  std::int64_t offset[kMaxParts];
  unsigned first_block[kMaxParts + 1];
};

/// Parts into the whole, whose rows have `row` words, or back.
template <class Word, bool kIntoWhole>
__global__ void __launch_bounds__(kThreads) concat_kernel(const __grid_constant__ PartTable parts, Word* whole, std::int64_t row) {
  int i = 0;
  while (blockIdx.x >= parts.first_block[i + 1]) ++i;
  const unsigned width = parts.width[i], total = parts.total[i];
  const unsigned begin = (blockIdx.x - parts.first_block[i]) * kBlockWords + threadIdx.x;
  Word* part = static_cast<Word*>(parts.place[i]);
  whole += parts.offset[i];
  Word words[kUnroll];
#pragma unroll
  for (unsigned u = 0; u < kUnroll; ++u) {
    const unsigned at = begin + u * kThreads;
    if (at < total) words[u] = kIntoWhole ? part[at] : whole[at / width * row + at % width];
  }
#pragma unroll
  for (unsigned u = 0; u < kUnroll; ++u) {
    const unsigned at = begin + u * kThreads;
    if (at < total) (kIntoWhole ? whole[at / width * row + at % width] : part[at]) = words[u];
  }
}

/// A part on the host's side: `bytes` of each row, which start `offset` bytes into the whole's.
struct Part {
  void* place;
  std::int64_t bytes, offset;
};

/// Bytes of one step along the axis.
std::int64_t step_bytes(const Tensor& tensor, int axis) {
  std::int64_t bytes = size_of(tensor.dtype());
  for (int i = axis + 1; i < tensor.rank(); ++i) bytes *= tensor.dim(i);
  return bytes;
}

/// Copies parts into the whole or back, in one launch for every kMaxParts.
template <bool kIntoWhole>
void copy_parts(const Stream& stream, const Tensor& whole, int axis, std::span<const Part> parts) {
  const std::int64_t row_bytes = whole.dim(axis) * step_bytes(whole, axis);
  std::int64_t rows = 1;
  for (int i = 0; i < axis; ++i) rows *= whole.dim(i);
  for (std::size_t first = 0; first < parts.size(); first += kMaxParts) {
    const std::span<const Part> group = parts.subspan(first, std::min(kMaxParts, parts.size() - first));
    std::uintptr_t bits = address(whole.raw()) | static_cast<std::uintptr_t>(row_bytes);
    for (const Part& part : group) bits |= address(part.place) | static_cast<std::uintptr_t>(part.bytes | part.offset);
    with_word(bits, [&](auto tag) {
      using Word = typename decltype(tag)::type;
      constexpr auto kSize = static_cast<std::int64_t>(sizeof(Word));
      PartTable table{};
      unsigned blocks = 0;
      for (std::size_t i = 0; i < group.size(); ++i) {
        const std::int64_t total = rows * group[i].bytes / kSize;
        DETR_CHECK(total <= kMaxWords, "concat: a part of ", whole, " has too many elements: ", total);
        table.place[i] = group[i].place;
        table.width[i] = static_cast<unsigned>(group[i].bytes / kSize);
        table.total[i] = static_cast<unsigned>(total);
        table.offset[i] = group[i].offset / kSize;
        table.first_block[i] = blocks;
        blocks += blocks_for(total, kBlockWords);
      }
      table.first_block[group.size()] = blocks;
      launch(stream, concat_kernel<Word, kIntoWhole>, blocks, kThreads, 0, table, static_cast<Word*>(whole.raw()), row_bytes / kSize);
    });
  }
}

// ---- rows by index

/// y (rows, width) = rows of x by index: row r comes from x[r / Q], an array of T rows; zeros where the index is out of range or not
/// valid. A thread a word.
template <class Word>
__global__ void __launch_bounds__(kThreads) gather_rows_kernel(const Word* __restrict__ x, const std::int64_t* __restrict__ index,
                                                               const std::uint8_t* __restrict__ valid, std::int64_t T, unsigned Q,
                                                               unsigned width, unsigned total, Word* __restrict__ y) {
  const unsigned at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= total) return;
  const unsigned row = at / width;
  const std::int64_t t = index[row];
  Word word{};
  if (t >= 0 && t < T && (!valid || valid[t])) word = x[(row / Q * T + t) * width + at % width];
  y[at] = word;
}

/// x (N, T, D), index (N, Q), y (N, Q, D) by their sizes; all f32 or all bf16.
void gather_rows(const char* op, const Stream& stream, const Tensor& x, std::int64_t T, const Tensor& index, std::int64_t Q,
                 const Tensor* valid, Tensor& y) {
  if (y.numel() == 0) return;
  dispatch_float(op, x.dtype(), [](auto) {});   // the copy is of bytes; other dtypes are refused as on the CPU
  const std::int64_t row_bytes = x.dim(-1) * size_of(x.dtype());
  with_word(address(x.raw()) | address(y.raw()) | static_cast<std::uintptr_t>(row_bytes), [&](auto tag) {
    using Word = typename decltype(tag)::type;
    const std::int64_t width = row_bytes / static_cast<std::int64_t>(sizeof(Word)), total = index.numel() * width;
    DETR_CHECK(total <= kMaxWords, op, ": y has too many elements: ", y);
    launch(stream, gather_rows_kernel<Word>, blocks_for(total, kThreads), kThreads, 0, static_cast<const Word*>(x.raw()),
           index.data<std::int64_t>(), valid ? valid->data<std::uint8_t>() : nullptr, T, static_cast<unsigned>(Q),
           static_cast<unsigned>(width), static_cast<unsigned>(total), static_cast<Word*>(y.raw()));
  });
}

/// Into dx (N, T, D), all zeros: the sums of dy (N, Q, D) by index (N, Q). A warp a row of dy; the first row of each distinct index
/// writes the sum over it and those that follow, in order. D is a multiple of W.
template <class T, int W>
__global__ void __launch_bounds__(kThreads) gather_rows_backward_kernel(const T* __restrict__ dy, const std::int64_t* __restrict__ index,
                                                                        const std::uint8_t* __restrict__ valid, std::int64_t tokens,
                                                                        unsigned Q, std::int64_t D, unsigned rows, T* __restrict__ dx) {
  const unsigned row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const std::int64_t image = row / Q;
  const unsigned q = row % Q;
  index += image * Q;
  dy += image * Q * D;
  const std::int64_t t = index[q];
  if (t < 0 || t >= tokens || (valid && !valid[t])) return;
  for (unsigned base = 0; base < q; base += 32) {
    const unsigned other = base + lane;
    if (__any_sync(kAllLanes, other < q && index[other] == t)) return;   // an earlier row has this index
  }
  for (std::int64_t begin = 0; begin < D; begin += 32 * W) {
    const std::int64_t d = begin + lane * W;
    float sum[W] = {};
    for (unsigned base = q / 32 * 32; base < Q; base += 32) {
      const unsigned other = base + lane;
      unsigned same = __ballot_sync(kAllLanes, other >= q && other < Q && index[other] == t);
      for (; same; same &= same - 1) {
        const std::int64_t from = base + static_cast<unsigned>(__ffs(static_cast<int>(same))) - 1;
        if (d >= D) continue;
        float x[W];
        load<T, W>(dy + from * D + d, x);
#pragma unroll
        for (int i = 0; i < W; ++i) sum[i] += x[i];
      }
    }
    if (d < D) store<T, W>(dx + (image * tokens + t) * D + d, sum);
  }
}

// ---- embedding's gradient

constexpr int kLanes = 8;                       // threads side by side on a row of dy: 128 bytes with vectors
constexpr int kSlots = kThreads / kLanes;       // rows that are added side by side
constexpr int kRounds = 8;                      // indices a thread looks at in a tile
constexpr int kTile = kThreads * kRounds;

/// dtable (K, D) from dy (R, D) and index (R). A block sums kLanes W columns of table row blockIdx.x: tile by tile it lists the rows of
/// dy that have this index, in order, and deals them to kSlots sums, which are added up at the end. D is a multiple of W.
template <class T, int W>
__global__ void __launch_bounds__(kThreads) embedding_backward_kernel(const T* __restrict__ dy, const std::int64_t* __restrict__ index, int R,
                                                                      std::int64_t D, std::int64_t padding_row, float* __restrict__ dtable) {
  __shared__ int list[kTile];
  __shared__ int warp_matches[kWarps];
  __shared__ float sums[kSlots][kLanes * W];
  const std::int64_t k = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, slot = thread / kLanes;
  const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.y) * kLanes * W, d = first_column + thread % kLanes * W;
  float sum[W] = {};
  const int count_all = k == padding_row ? 0 : R;
  for (int tile = 0; tile < count_all; tile += kTile) {
    const int begin = tile + warp * (32 * kRounds) + lane;   // each warp has a range of its own
    std::int64_t values[kRounds];
#pragma unroll
    for (int u = 0; u < kRounds; ++u) values[u] = begin + 32 * u < R ? index[begin + 32 * u] : -1;
    unsigned matches[kRounds];
    int mine = 0;
#pragma unroll
    for (int u = 0; u < kRounds; ++u) {
      matches[u] = __ballot_sync(kAllLanes, values[u] == k);
      mine += __popc(matches[u]);
    }
    if (lane == 0) warp_matches[warp] = mine;
    __syncthreads();
    int place = 0, count = 0;
    for (int w = 0; w < kWarps; ++w) {
      place += w < warp ? warp_matches[w] : 0;
      count += warp_matches[w];
    }
#pragma unroll
    for (int u = 0; u < kRounds; ++u) {
      if (values[u] == k) list[place + __popc(matches[u] & ((1U << lane) - 1))] = begin + 32 * u;
      place += __popc(matches[u]);
    }
    __syncthreads();
    if (d < D) {
#pragma unroll 4
      for (int i = slot; i < count; i += kSlots) {
        float x[W];
        load<T, W>(dy + list[i] * D + d, x);
#pragma unroll
        for (int j = 0; j < W; ++j) sum[j] += x[j];
      }
    }
    // The next tile's list is written behind its first barrier, so nobody reads this one any more.
  }
#pragma unroll
  for (int j = 0; j < W; ++j) sums[slot][thread % kLanes * W + j] = sum[j];
  __syncthreads();
  if (thread < kLanes * W && first_column + thread < D) {
    float total = 0;
    for (int s = 0; s < kSlots; ++s) total += sums[s][thread];
    dtable[k * D + first_column + thread] = total;
  }
}

template <class T, int W>
void launch_embedding_backward(const Stream& stream, const Tensor& dy, const Tensor& index, std::int64_t padding_row, Tensor& dtable) {
  const std::int64_t D = dtable.dim(1);
  const dim3 grid(blocks_for(dtable.dim(0), 1), blocks_for(D, kLanes * W));
  DETR_CHECK(grid.y <= 65535, "embedding: rows are too long: ", dtable);
  launch(stream, embedding_backward_kernel<T, W>, grid, kThreads, 0, dy.data<T>(), index.data<std::int64_t>(),
         static_cast<int>(index.numel()), D, padding_row, dtable.data<float>());
}

}  // namespace

void concat_forward(const Stream& stream, std::span<const Tensor> inputs, int axis, Tensor& y) {
  std::vector<Part> parts;
  std::int64_t offset = 0;
  const std::int64_t step = step_bytes(y, axis);
  for (const Tensor& input : inputs) {
    const std::int64_t bytes = input.dim(axis) * step;
    if (input.numel()) parts.push_back({input.raw(), bytes, offset});
    offset += bytes;
  }
  copy_parts<true>(stream, y, axis, parts);
}

void concat_backward(const Stream& stream, const Tensor& dy, int axis, std::span<const std::int64_t> sizes,
                     std::span<Tensor* const> dinputs) {
  std::vector<Part> parts;
  std::int64_t offset = 0;
  const std::int64_t step = step_bytes(dy, axis);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::int64_t bytes = sizes[i] * step;
    if (dinputs[i] && dinputs[i]->numel()) parts.push_back({dinputs[i]->raw(), bytes, offset});
    offset += bytes;
  }
  copy_parts<false>(stream, dy, axis, parts);
}

void gather_rows_forward(const Stream& stream, const Tensor& x, const Tensor& index, const Tensor* valid, Tensor& y) {
  gather_rows("gather_rows", stream, x, x.dim(1), index, index.dim(1), valid, y);
}

void gather_rows_backward(const Stream& stream, const Tensor& dy, const Tensor& index, const Tensor* valid, Tensor* dx) {
  const std::int64_t D = dx->dim(2), rows = index.numel();
  DETR_CHECK(rows <= kMaxWords, "gather_rows: index is too large: ", index);
  dispatch_float("gather_rows", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (dx->numel() == 0) return;
    DETR_TRY(cudaMemsetAsync(dx->raw(), 0, static_cast<std::size_t>(dx->bytes()), native(stream)));
    const bool vectors = fits_vectors<T>(dy.raw(), D) && fits_vectors<T>(dx->raw(), D);
    launch(stream, vectors ? gather_rows_backward_kernel<T, kVector<T>> : gather_rows_backward_kernel<T, 1>, blocks_for(rows, kWarps), kThreads, 0,
           dy.data<T>(), index.data<std::int64_t>(), valid ? valid->data<std::uint8_t>() : nullptr, dx->dim(1),
           static_cast<unsigned>(index.dim(1)), D, static_cast<unsigned>(rows), dx->data<T>());
  });
}

void embedding_forward(const Stream& stream, const Tensor& table, const Tensor& index, Tensor& y) {
  gather_rows("embedding", stream, table, table.dim(0), index, index.numel(), nullptr, y);
}

void embedding_backward(const Stream& stream, const Tensor& dy, const Tensor& index, std::int64_t padding_row, Tensor* dtable) {
  DETR_CHECK(index.numel() <= 1 << 30, "embedding: index is too large: ", index);
  dispatch_float("embedding", dy.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (fits_vectors<T>(dy.raw(), dtable->dim(1))) launch_embedding_backward<T, kVector<T>>(stream, dy, index, padding_row, *dtable);
    else launch_embedding_backward<T, 1>(stream, dy, index, padding_row, *dtable);
  });
}

}  // namespace detr::kernels::cuda

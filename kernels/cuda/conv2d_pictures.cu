#include "kernels/cuda/conv2d_pictures.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"

// A pixel's window is three runs of nine neighbouring elements, one in each row of the picture, and the pixels of a row of y begin at every sixth
// element. So rows of the picture lie in shared memory as they are, and 16 pixels are operand A (16, 32) of a product, read from there: elements 1 to
// 8 of each run in pairs, which begin at even places, then the three elements 0, then zeros.

namespace detr::kernels::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kChannels = 32;       // of y in one block
constexpr int kRowsPerBlock = 8;    // of y: the weight is read once for them
constexpr int kLeft = 8;            // elements before a row, of which the last three are the padding's pixel

struct Picture {
  int H, W, h, w;   // of x and y
  int rows;         // of y, of all pictures
  int channels;     // of y
};

__device__ inline unsigned pair_of(bf16 low, bf16 high) {
  const __nv_bfloat162 pair(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}

/// The element of the window, as (o, 3, 3, 3) has it, that is row k of operand B; -1 for a row of zeros.
__device__ inline int element_of(int k) { return k < 24 ? k / 8 * 9 + k % 8 + 1 : k < 27 ? (k - 24) * 9 : -1; }

/// blockIdx.x: kRowsPerBlock rows of y; blockIdx.y: kChannels of its channels. A warp has 16 pixels at a time; of each, thread t of four has the
/// channels [8 t, 8 t + 8), which the columns of B are ordered for.
__global__ void __launch_bounds__(kThreads) pictures_kernel(Picture size, const bf16* x, const bf16* weight, const float* shift, bool relu, bf16* y) {
  extern __shared__ uint4 memory[];
  auto* rows = reinterpret_cast<bf16*>(memory);
  const int pitch = kLeft + size.W * 3, lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, g = lane / 4, t = lane % 4;
  const int first_channel = static_cast<int>(blockIdx.y) * kChannels;

  unsigned b[4][4];   // of 8 columns each, of 8 rows each
  {
    for (int j = 0; j < 4; ++j) {
      const bf16* from = weight + (first_channel + g / 2 * 8 + j * 2 + g % 2) * 27;
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const int low = element_of(s * 8 + 2 * t), high = element_of(s * 8 + 2 * t + 1);
        const bf16 zero = from_float<bf16>(0);
        b[j][s] = pair_of(low < 0 ? zero : from[low], high < 0 ? zero : from[high]);
      }
    }
  }
  float shifts[8] = {};
  if (shift) {
#pragma unroll
    for (int i = 0; i < 8; ++i) shifts[i] = shift[first_channel + t * 8 + i];
  }

  const int begin = static_cast<int>(blockIdx.x) * kRowsPerBlock, end = min(begin + kRowsPerBlock, size.rows), vectors = size.W * 3 / 8;
  for (int row = begin; row < end; ++row) {
    const int n = row / size.h, top = row % size.h * 2 - 1;
    __syncthreads();   // the row before has been read
    for (int k = 0; k < 3; ++k) {
      const int from = top + k;
      const bool exists = from >= 0 && from < size.H;
      const auto* source = reinterpret_cast<const uint4*>(x + (std::int64_t{n} * size.H + (exists ? from : 0)) * (size.W * 3));
      auto* to = reinterpret_cast<uint4*>(rows + k * pitch);
      for (int i = static_cast<int>(threadIdx.x); i <= vectors; i += kThreads) to[i] = i > 0 && exists ? source[i - 1] : uint4{};
    }
    __syncthreads();
    for (int tile = warp * 16; tile < size.w; tile += kWarps * 16) {
      const int pixels[2] = {tile + g, tile + g + 8};
      unsigned a[4][2];   // of 8 columns each, of the two pixels
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const bf16* window = rows + kLeft - 3 + min(pixels[p], size.w - 1) * 6;
#pragma unroll
        for (int k = 0; k < 3; ++k) a[k][p] = *reinterpret_cast<const unsigned*>(window + k * pitch + 1 + 2 * t);
        const bf16 zero = from_float<bf16>(0);
        a[3][p] = pair_of(t < 2 ? window[2 * t * pitch] : zero, t < 1 ? window[pitch] : zero);
      }
      const unsigned low[4] = {a[0][0], a[0][1], a[1][0], a[1][1]}, high[4] = {a[2][0], a[2][1], a[3][0], a[3][1]};
      float sums[4][4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        multiply_add(sums[j], low, b[j][0], b[j][1]);
        multiply_add(sums[j], high, b[j][2], b[j][3]);
      }
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (pixels[p] >= size.w) continue;
        float out[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float value = sums[i / 2][2 * p + i % 2] + shifts[i];
          out[i] = relu && value <= 0 ? 0.0F : value;   // NaN stays
        }
        store_vector(y + (std::int64_t{row} * size.w + pixels[p]) * size.channels + first_channel + t * 8, out);
      }
    }
  }
}

}  // namespace

bool try_pictures_forward(const Stream& stream, const Tensor& x, const Tensor& weight, const Tensor* shift, Activation activation, const Conv2dOptions& options,
                          const Tensor& y) {
  if (x.dtype() != DType::bf16 || weight.dim(3) != 3 || weight.dim(1) != 3 || weight.dim(2) != 3 || weight.dim(0) % kChannels != 0) return false;
  if (options.stride != 2 || options.padding != 1 || x.dim(2) % 8 != 0 || y.numel() == 0) return false;
  const std::size_t shared = 3 * static_cast<std::size_t>(kLeft + x.dim(2) * 3) * sizeof(bf16);
  if (shared > 48 * 1024 || y.rows() >= std::int64_t{1} << 31 || !fits_vectors<bf16>(x.raw(), 8) || !fits_vectors<bf16>(y.raw(), 8)) return false;
  const Picture size{static_cast<int>(x.dim(1)), static_cast<int>(x.dim(2)), static_cast<int>(y.dim(1)), static_cast<int>(y.dim(2)), static_cast<int>(y.dim(0) * y.dim(1)),
                     static_cast<int>(y.dim(3))};
  launch(stream, pictures_kernel, dim3(blocks_for(size.rows, kRowsPerBlock), static_cast<unsigned>(size.channels / kChannels)), dim3(kThreads), shared, size, x.data<bf16>(),
         weight.data<bf16>(), shift ? shift->data<float>() : nullptr, activation == Activation::relu, y.data<bf16>());
  return true;
}

}  // namespace detr::kernels::cuda

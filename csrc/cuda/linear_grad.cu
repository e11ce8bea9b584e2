// Backward pass: the gradient of the pre-activation and, in the same read, the bias gradient. Formulas: launch.h.
//
// A block of rows leaves one partial sum a column, in A; a second kernel adds the blocks, in double. Within a block a
// thread adds its rows from the top, then the threads of a column are added from the top: one order for each shape.
#include "cuda/tile.cuh"

namespace megacore::cuda {
namespace {

template <class T, class Act, bool kVector>
__global__ void __launch_bounds__(kThreads, 2)
    backward(const T* dy, int64_t dy_stride, const T* __restrict__ pre, T* dpre, acc_t<T>* __restrict__ partial,
             int64_t rows, int64_t columns, Tiling tile) {
  using A = acc_t<T>;
  constexpr int kParts = Act::kParts, kW = kWide<T>;
  constexpr int kFlight = kParts == 1 ? 4 : kVector ? 2 : 1;  // rows whose loads are in flight together
  constexpr bool kSumOnly = std::is_same<Act, activation::Identity>::value;
  const int64_t down = blockIdx.x / tile.across;
  const Columns<T, kVector> at(blockIdx.x - down * tile.across, columns);
  A sums[kParts][kW] = {};

  const int64_t last = at.any() ? min((down + 1) * tile.rows, rows) : 0;
  for (int64_t r = down * tile.rows + threadIdx.y; r < last; r += int64_t(blockDim.y) * kFlight) {
    alignas(16) T g[kFlight][kW], p[kFlight][kParts][kW];
#pragma unroll
    for (int f = 0; f < kFlight; ++f)
      if (const int64_t row = r + f * int(blockDim.y); row < last) {
        at.load(dy + row * dy_stride, g[f]);
        if constexpr (!kSumOnly)
#pragma unroll
          for (int h = 0; h < kParts; ++h) at.load(pre + (row * kParts + h) * columns, p[f][h]);
      }
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const int64_t row = r + f * int(blockDim.y);
      if (row >= last) continue;
#pragma unroll
      for (int j = 0; j < kW; ++j) {
        if (!kVector && at.column(j) >= columns) continue;
        A in[kParts], d[kParts];
#pragma unroll
        for (int h = 0; h < kParts; ++h) in[h] = kSumOnly ? A(0) : widen(p[f][h][j]);
        Act::gradient(A(widen(g[f][j])), in, d);
#pragma unroll
        for (int h = 0; h < kParts; ++h) {
          sums[h][j] += d[h];
          if constexpr (!kSumOnly) narrow(d[h], p[f][h][j]);
        }
      }
      if constexpr (!kSumOnly)
#pragma unroll
        for (int h = 0; h < kParts; ++h) at.store(dpre + (row * kParts + h) * columns, p[f][h]);
    }
  }

  if (partial == nullptr) return;
  __shared__ A shared[kThreads * kW];
  const int columns_here = blockDim.x * kW, thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int h = 0; h < kParts; ++h) {
    __syncthreads();  // the sums of the other part have been read
#pragma unroll
    for (int j = 0; j < kW; ++j)  // by the column within the tile
      shared[threadIdx.y * columns_here + (kVector ? threadIdx.x * kW + j : threadIdx.x + j * blockDim.x)] = sums[h][j];
    __syncthreads();
    for (int c = thread; c < columns_here; c += kThreads) {
      const int64_t column = (blockIdx.x - down * tile.across) * columns_here + c;
      if (column >= columns) break;
      A total = 0;
      for (int i = 0; i < int(blockDim.y); ++i) total += shared[i * columns_here + c];
      partial[(down * kParts + h) * columns + column] = total;
    }
  }
}

constexpr int kLanes = 32, kDeep = 16;

// dbias[c] = sum over blocks of partial[block, c].
template <class T>
__global__ void __launch_bounds__(kLanes* kDeep)
    add_blocks(const acc_t<T>* __restrict__ partial, T* __restrict__ dbias, int64_t blocks, int64_t columns) {
  __shared__ double shared[kDeep][kLanes];
  const int64_t c = int64_t(blockIdx.x) * kLanes + threadIdx.x;
  double total = 0;
  if (c < columns)
#pragma unroll 4
    for (int64_t i = threadIdx.y; i < blocks; i += kDeep) total += double(partial[i * columns + c]);
  shared[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || c >= columns) return;
  total = 0;
  for (int i = 0; i < kDeep; ++i) total += shared[i][threadIdx.x];
  narrow(acc_t<T>(total), dbias[c]);
}

}  // namespace

int64_t backward_scratch(Activation a, Storage s, int64_t rows, int64_t columns) {
  const int size = s == Storage::f64 ? 8 : s == Storage::f32 ? 4 : 2;
  return tiling(16 / size, rows, columns).blocks_down * parts_of(a) * columns * (s == Storage::f64 ? 8 : 4);
}

cudaError_t launch_backward(Activation a, Storage s, const BackwardPass& p, cudaStream_t stream) {
  if (p.columns == 0) return cudaSuccess;
  return with_storage(s, [&](auto zero) {
    using T = decltype(zero);
    using A = acc_t<T>;
    const Tiling tile = tiling(kWide<T>, p.rows, p.columns);
    const int64_t blocks = tile.across * tile.blocks_down, wide = parts_of(a) * p.columns;
    if (blocks > INT32_MAX || (wide + kLanes - 1) / kLanes > INT32_MAX) return cudaErrorInvalidConfiguration;
    const bool vector =
        p.columns % kWide<T> == 0 && p.dy_stride % kWide<T> == 0 && aligned(p.dy) && aligned(p.pre) && aligned(p.dpre);
    A* partial = p.dbias == nullptr ? nullptr : static_cast<A*>(p.scratch);
    if (blocks > 0) {
      const cudaError_t status = with_activation(a, [&](auto act) {
        using Act = decltype(act);
        const auto kernel = vector ? backward<T, Act, true> : backward<T, Act, false>;
        MEGACORE_LAUNCH(kernel, blocks, dim3(tile.wide, tile.down), stream, static_cast<const T*>(p.dy), p.dy_stride,
                        static_cast<const T*>(p.pre), static_cast<T*>(p.dpre), partial, p.rows, p.columns, tile);
        return cudaGetLastError();
      });
      if (status != cudaSuccess) return status;
    }
    if (p.dbias == nullptr) return cudaSuccess;
    MEGACORE_LAUNCH(add_blocks<T>, (wide + kLanes - 1) / kLanes, dim3(kLanes, kDeep), stream, partial,
                    static_cast<T*>(p.dbias), tile.blocks_down, wide);
    return cudaGetLastError();
  });
}

}  // namespace megacore::cuda

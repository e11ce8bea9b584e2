// Forward pass over a GEMM's output: bias and activation. Formulas and shapes: launch.h; how a matrix is cut: tile.cuh.
#include "cuda/tile.cuh"

namespace megacore::cuda {
namespace {

template <class T, class Act, bool kVector>
__global__ void __launch_bounds__(kThreads, 2)
    forward(T* pre, const T* bias, T* y, int64_t rows, int64_t columns, Tiling tile) {
  using A = acc_t<T>;
  constexpr int kParts = Act::kParts, kW = kWide<T>, kFlight = 4 / kParts;  // rows whose loads are in flight together
  constexpr bool kBiasOnly = std::is_same<Act, activation::Identity>::value;
  const int64_t down = blockIdx.x / tile.across;
  const Columns<T, kVector> at(blockIdx.x - down * tile.across, columns);
  if (!at.any()) return;

  alignas(16) T b[kParts][kW];
  if (bias != nullptr)
#pragma unroll
    for (int h = 0; h < kParts; ++h) at.load(bias + h * columns, b[h]);

  const int64_t last = min((down + 1) * tile.rows, rows);
  for (int64_t r = down * tile.rows + threadIdx.y; r < last; r += int64_t(blockDim.y) * kFlight) {
    alignas(16) T p[kFlight][kParts][kW];
#pragma unroll
    for (int f = 0; f < kFlight; ++f)
      if (const int64_t row = r + f * int(blockDim.y); row < last)
#pragma unroll
        for (int h = 0; h < kParts; ++h) at.load(pre + (row * kParts + h) * columns, p[f][h]);
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      const int64_t row = r + f * int(blockDim.y);
      if (row >= last) continue;
      if (bias != nullptr)
#pragma unroll
        for (int h = 0; h < kParts; ++h) {
#pragma unroll
          for (int j = 0; j < kW; ++j) narrow(widen(p[f][h][j]) + widen(b[h][j]), p[f][h][j]);
          at.store(pre + (row * kParts + h) * columns, p[f][h]);
        }
      if constexpr (!kBiasOnly) {
        alignas(16) T out[kW];
#pragma unroll
        for (int j = 0; j < kW; ++j) {
          A in[kParts];
#pragma unroll
          for (int h = 0; h < kParts; ++h) in[h] = widen(p[f][h][j]);  // rounded: what backward will read
          narrow(Act::value(in), out[j]);
        }
        at.store(y + row * columns, out);
      }
    }
  }
}

}  // namespace

cudaError_t launch_forward(Activation a, Storage s, const ForwardPass& p, cudaStream_t stream) {
  if (p.rows == 0 || p.columns == 0) return cudaSuccess;
  return with_storage(s, [&](auto zero) {
    using T = decltype(zero);
    const Tiling tile = tiling(kWide<T>, p.rows, p.columns);
    const int64_t blocks = tile.across * tile.blocks_down;
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    const bool vector = p.columns % kWide<T> == 0 && aligned(p.pre) && aligned(p.bias) && aligned(p.y);
    return with_activation(a, [&](auto act) {
      using Act = decltype(act);
      const auto kernel = vector ? forward<T, Act, true> : forward<T, Act, false>;
      MEGACORE_LAUNCH(kernel, blocks, dim3(tile.wide, tile.down), stream, static_cast<T*>(p.pre),
                      static_cast<const T*>(p.bias), static_cast<T*>(p.y), p.rows, p.columns, tile);
      return cudaGetLastError();
    });
  });
}

}  // namespace megacore::cuda

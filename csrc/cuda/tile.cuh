// How the elementwise kernels of the linear family cut a matrix. A thread owns kWide<T> columns (16 bytes of them) and
// walks down the rows of its block, so that a bias and the sums of a bias gradient stay in registers. With vector
// accesses the columns are neighbours; without, they lie a warp-wide step apart, so that loads stay coalesced. Both
// give a thread the same number of columns and the same rows: the order of sums is one.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "activation.h"
#include "cuda/launch.h"

// A macro, so that tests/cuda_on_cpu can put a loop over blocks in its place and run the kernels without a GPU.
#ifndef MEGACORE_LAUNCH
#define MEGACORE_LAUNCH(kernel, blocks, threads, stream, ...) \
  (kernel)<<<unsigned(blocks), threads, 0, stream>>>(__VA_ARGS__)
#endif

namespace megacore::cuda {

constexpr int kThreads = 256;

template <class T>
constexpr int kWide = 16 / sizeof(T);

template <class T>
struct acc {
  using type = float;
};
template <>
struct acc<double> {
  using type = double;
};
template <class T>
using acc_t = typename acc<T>::type;

__device__ __forceinline__ float widen(float v) {
  return v;
}
__device__ __forceinline__ double widen(double v) {
  return v;
}
__device__ __forceinline__ float widen(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
__device__ __forceinline__ float widen(__half v) {
  return __half2float(v);
}
__device__ __forceinline__ void narrow(float v, float& to) {
  to = v;
}
__device__ __forceinline__ void narrow(double v, double& to) {
  to = v;
}
__device__ __forceinline__ void narrow(float v, __nv_bfloat16& to) {
  to = __float2bfloat16_rn(v);
}
__device__ __forceinline__ void narrow(float v, __half& to) {
  to = __float2half_rn(v);
}

// Blocks of `wide` x `down` threads, `rows` rows and wide * kWide<T> columns; `across` of them beside each other.
struct Tiling {
  int wide, down;
  int64_t rows, across, blocks_down;
};

inline Tiling tiling(int per_thread, int64_t rows, int64_t columns) {
  Tiling t{1, 1, 64, 1, 1};
  while (t.wide < kThreads && int64_t(t.wide) * per_thread < columns) t.wide *= 2;
  t.down = kThreads / t.wide;
  if (t.rows < 16 * t.down) t.rows = 16 * t.down;
  t.across = (columns + t.wide * per_thread - 1) / (int64_t(t.wide) * per_thread);
  t.blocks_down = (rows + t.rows - 1) / t.rows;
  return t;
}

// The columns of one thread.
template <class T, bool kVector>
struct Columns {
  int64_t first, end;

  __device__ __forceinline__ Columns(int64_t tile, int64_t columns)
      : first(tile * blockDim.x * kWide<T> + threadIdx.x * (kVector ? kWide<T> : 1)), end(columns) {}

  __device__ __forceinline__ int64_t column(int j) const { return kVector ? first + j : first + j * int(blockDim.x); }
  __device__ __forceinline__ bool any() const { return first < end; }

  __device__ __forceinline__ void load(const T* row, T (&to)[kWide<T>]) const {
    if constexpr (kVector) {
      *reinterpret_cast<int4*>(to) = *reinterpret_cast<const int4*>(row + first);
    } else {
#pragma unroll
      for (int j = 0; j < kWide<T>; ++j)
        if (column(j) < end) to[j] = row[column(j)];
    }
  }
  __device__ __forceinline__ void store(T* row, const T (&from)[kWide<T>]) const {
    if constexpr (kVector) {
      *reinterpret_cast<int4*>(row + first) = *reinterpret_cast<const int4*>(from);
    } else {
#pragma unroll
      for (int j = 0; j < kWide<T>; ++j)
        if (column(j) < end) row[column(j)] = from[j];
    }
  }
};

inline bool aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// f(T{}) for the storage type, g(Activation{}) for the activation.
template <class F>
cudaError_t with_storage(Storage s, F&& f) {
  switch (s) {
    case Storage::f32:
      return f(float{});
    case Storage::f64:
      return f(double{});
    case Storage::bf16:
      return f(__nv_bfloat16{});
    case Storage::f16:
      return f(__half{});
  }
  return cudaErrorInvalidValue;
}
template <class F>
cudaError_t with_activation(Activation a, F&& f) {
  switch (a) {
    case Activation::none:
      return f(activation::Identity{});
    case Activation::gelu_tanh:
      return f(activation::Gelu<activation::TanhGate>{});
    case Activation::gelu_erf:
      return f(activation::Gelu<activation::ErfGate>{});
    case Activation::swiglu:
      return f(activation::Swiglu{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace megacore::cuda

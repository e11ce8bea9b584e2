// A tile of an fp32 product in vector registers, and the panels it reads. Width-generic: W floats a vector.
#pragma once
#include <algorithm>

#include "cpu/simd.h"

namespace megacore {

constexpr int64_t kChain = 128;  // products summed in one register: the error of a sum grows with the root of it

template <int W>
struct TileOf {
  typedef float Vector __attribute__((vector_size(W * 4)));
  typedef float Loose __attribute__((vector_size(W * 4), aligned(4), may_alias));
  static constexpr int wide = 3;  // vectors
  static constexpr int64_t rows = W == 16 ? 8 : 4,
                           cols = wide * W;  // 24 (12) sums, 3 of b, 1 of a, of 32 (16) registers

  // panel[p][i] = from[i * across + p * along] for i < n, zeros for n <= i < Width.
  template <int64_t Width>
  MEGACORE_INLINE static void pack(const float* from, int64_t across, int64_t along, int64_t n, int64_t k,
                                   float* panel) {
    if (n == Width && across == 1) {
      for (int64_t p = 0; p < k; ++p)
        for (int64_t i = 0; i < Width; ++i) panel[p * Width + i] = from[i + p * along];
    } else if (n == Width && along == 1) {
      constexpr int64_t fours = Width / 4 * 4;
      for (int64_t i = 0; i < fours; i += 4) transpose(from + i * across, across, k, panel + i, Width);
      for (int64_t i = fours; i < Width; ++i)
        for (int64_t p = 0; p < k; ++p) panel[p * Width + i] = from[i * across + p];
    } else {
      for (int64_t p = 0; p < k; ++p)
        for (int64_t i = 0; i < Width; ++i) panel[p * Width + i] = i < n ? from[i * across + p * along] : 0.f;
    }
  }

  // to[p * width + i] = from[i * stride + p], i < 4: in squares of four, with vectors of four on every machine.
  MEGACORE_INLINE static void transpose(const float* from, int64_t stride, int64_t k, float* to, int64_t width) {
    typedef float Four __attribute__((vector_size(16)));
    typedef float Near __attribute__((vector_size(16), aligned(4), may_alias));
    typedef int32_t Order __attribute__((vector_size(16)));
    int64_t p = 0;
    for (; p + 4 <= k; p += 4) {
      const Four a = *(const Near*)(from + p), b = *(const Near*)(from + stride + p),
                 c = *(const Near*)(from + 2 * stride + p), d = *(const Near*)(from + 3 * stride + p);
      const Four ab = __builtin_shuffle(a, b, Order{0, 4, 1, 5}), cd = __builtin_shuffle(c, d, Order{0, 4, 1, 5});
      const Four ab2 = __builtin_shuffle(a, b, Order{2, 6, 3, 7}), cd2 = __builtin_shuffle(c, d, Order{2, 6, 3, 7});
      *(Near*)(to + p * width) = __builtin_shuffle(ab, cd, Order{0, 1, 4, 5});
      *(Near*)(to + (p + 1) * width) = __builtin_shuffle(ab, cd, Order{2, 3, 6, 7});
      *(Near*)(to + (p + 2) * width) = __builtin_shuffle(ab2, cd2, Order{0, 1, 4, 5});
      *(Near*)(to + (p + 3) * width) = __builtin_shuffle(ab2, cd2, Order{2, 3, 6, 7});
    }
    for (; p < k; ++p)
      for (int64_t i = 0; i < 4; ++i) to[p * width + i] = from[i * stride + p];
  }

  // c [m, n] (+)= a b of two panels, in chains; m <= rows, n <= cols.
  MEGACORE_INLINE static void multiply(const float* __restrict a, const float* __restrict b, int64_t k, float* c,
                                       int64_t stride, int64_t m, int64_t n, bool add) {
    for (int64_t r = 0; r < m; ++r)  // what is added to, or written over, arrives meanwhile
      for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(c + r * stride + i, 1);
    Vector total[rows][wide];
    for (int64_t at = 0; at < k; at += kChain) {
      Vector sum[rows][wide];
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int h = 0; h < wide; ++h) sum[r][h] = Vector{};
      for (int64_t p = std::min(kChain, k - at); p > 0; --p) {
        const Vector b0 = *(const Loose*)b, b1 = *(const Loose*)(b + W), b2 = *(const Loose*)(b + 2 * W);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
          const Vector v = a[r] - Vector{};
          sum[r][0] += v * b0;
          sum[r][1] += v * b1;
          sum[r][2] += v * b2;
        }
        a += rows;
        b += cols;
      }
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int h = 0; h < wide; ++h) total[r][h] = at == 0 ? sum[r][h] : total[r][h] + sum[r][h];
      asm volatile("" : "+m"(total));  // in memory between chains, or the sums would not fit in the registers
    }
    if (m == rows && n == cols) {
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int h = 0; h < wide; ++h) {
          Loose* out = (Loose*)(c + r * stride + h * W);
          *out = add ? *out + total[r][h] : total[r][h];
        }
    } else {
      for (int64_t r = 0; r < m; ++r)
        for (int64_t i = 0; i < n; ++i) {
          const float v = total[r][i / W][i % W];
          c[r * stride + i] = add ? c[r * stride + i] + v : v;
        }
    }
  }
};

}  // namespace megacore

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
  static constexpr int64_t rows = W == 16 ? 14 : 6, cols = 2 * W;  // 28 (12) sums, 2 of b, 1 of a: 31 of 32 (15 of 16)

  // panel[p][r] = a[r * row + p * col], zeros below `m`
  MEGACORE_INLINE static void pack_a(const float* a, int64_t row, int64_t col, int64_t m, int64_t k, float* panel) {
    for (int64_t p = 0; p < k; ++p)
      for (int64_t r = 0; r < rows; ++r) panel[p * rows + r] = r < m ? a[r * row + p * col] : 0.f;
  }

  // panel[p][c] = b[p * row + c * col], zeros beyond `n`
  MEGACORE_INLINE static void pack_b(const float* b, int64_t row, int64_t col, int64_t n, int64_t k, float* panel) {
    if (n == cols && col == 1) {
      for (int64_t p = 0; p < k; ++p)
        for (int64_t c = 0; c < cols; ++c) panel[p * cols + c] = b[p * row + c];
    } else {
      for (int64_t p = 0; p < k; ++p)
        for (int64_t c = 0; c < cols; ++c) panel[p * cols + c] = c < n ? b[p * row + c * col] : 0.f;
    }
  }

  // c [m, n] (+)= a b of two panels, in chains; m <= rows, n <= cols.
  MEGACORE_INLINE static void multiply(const float* __restrict a, const float* __restrict b, int64_t k, float* c,
                                       int64_t stride, int64_t m, int64_t n, bool add) {
    Vector total[rows][2];
    for (int64_t at = 0; at < k; at += kChain) {
      Vector sum[rows][2];
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) sum[r][0] = sum[r][1] = Vector{};
      for (int64_t p = std::min(kChain, k - at); p > 0; --p) {
        const Vector left = *(const Loose*)b, right = *(const Loose*)(b + W);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
          const Vector v = a[r] - Vector{};
          sum[r][0] += v * left;
          sum[r][1] += v * right;
        }
        a += rows;
        b += cols;
      }
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r)
        for (int h = 0; h < 2; ++h) total[r][h] = at == 0 ? sum[r][h] : total[r][h] + sum[r][h];
      asm volatile("" : "+m"(total));  // in memory between chains, or the sums would not fit in the registers
    }
    if (m == rows && n == cols) {
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r)
        for (int h = 0; h < 2; ++h) {
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

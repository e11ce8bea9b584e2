#include "cpu/product.h"

#include <ATen/Parallel.h>
#include <ATen/ops/mm.h>

#include <memory>

#include "cpu/fresh.h"
#include "cpu/tile.h"

namespace megacore {
namespace {

using Tile = TileOf<16>;
constexpr int64_t kDepth = 768;               // of K packed at a time: 25 KB of a, 147 KB of b a panel, in L2
constexpr int64_t kHeight = 14 * Tile::rows;  // rows of a packed at a time: 344 KB, in L2
constexpr int64_t kWidth = 21 * Tile::cols;   // columns of b packed at a time: 3 MB, in L3
constexpr int64_t kNarrow = 5 * Tile::cols;   // the same where few rows would read them
constexpr int64_t kLine = 16;                 // floats of a cache line
constexpr int64_t kSmall = 8 << 20;           // multiply-adds below which packing costs more than it gains

struct View {
  const float* data;
  int64_t row, col;
  View at(int64_t r, int64_t c) const { return {data + r * row + c * col, row, col}; }
};
View view(const at::Tensor& t) {
  return {t.const_data_ptr<float>(), t.stride(0), t.stride(1)};
}

// Panels of a, [m, k], packed one after the other.
struct PackA {
  MEGACORE_INLINE static void run(View a, int64_t m, int64_t k, float* to) {
    for (int64_t r = 0; r < m; r += Tile::rows, to += k * Tile::rows)
      Tile::pack<Tile::rows>(a.at(r, 0).data, a.row, a.col, std::min(Tile::rows, m - r), k, to);
  }
};
struct PackB {
  MEGACORE_INLINE static void run(View b, int64_t n, int64_t k, float* to) {
    for (int64_t c = 0; c < n; c += Tile::cols, to += k * Tile::cols)
      Tile::pack<Tile::cols>(b.at(0, c).data, b.col, b.row, std::min(Tile::cols, n - c), k, to);
  }
};
struct Block {
  MEGACORE_INLINE static void run(const float* a, const float* b, int64_t m, int64_t n, int64_t k, float* c,
                                  int64_t stride, bool add) {
    for (int64_t j = 0; j < n; j += Tile::cols)
      for (int64_t i = 0; i < m; i += Tile::rows)
        Tile::multiply(a + i * k, b + j * k, k, c + i * stride + j, stride, std::min(Tile::rows, m - i),
                       std::min(Tile::cols, n - j), add);
  }
};

int64_t up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Room for `count` floats, this thread's until its next call. Kept: malloc would give each call other pages.
float* scratch(int64_t count) {
  thread_local std::unique_ptr<float[]> room;
  thread_local int64_t held = 0;
  if (held < count) {
    room.reset();  // before the new one
    room.reset(new float[count + kLine]);
    held = count;
  }
  const uintptr_t at = reinterpret_cast<uintptr_t>(room.get()), line = kLine * sizeof(float);
  return reinterpret_cast<float*>((at + line - 1) / line * line);  // vectors that cross cache lines load twice
}

struct Problem {
  View a, b;
  float* c;
  int64_t stride, m, n, k;
  bool add;
};

// One thread's part: rows [row, row + m) and columns [col, col + n) of the whole.
void part(const Problem& whole, int64_t row, int64_t col, int64_t m, int64_t n, Done done) {
  const int64_t blocks = (whole.k + kDepth - 1) / kDepth, depth = up((whole.k + blocks - 1) / blocks, 8);  // even ones
  const int64_t height = std::min(kHeight, up(m, Tile::rows)), width = std::min(m > 4 * kHeight ? kWidth : kNarrow, n);
  float *pa = scratch(depth * (height + up(width, Tile::cols))), *pb = pa + depth * height;
  for (int64_t j = 0; j < n; j += width)
    for (int64_t p = 0; p < whole.k; p += depth) {
      const int64_t w = std::min(width, n - j), d = std::min(depth, whole.k - p);
      run_on_cpu<PackB>(whole.b.at(p, col + j), w, d, pb);
      for (int64_t i = 0; i < m; i += height) {
        const int64_t h = std::min(height, m - i);
        run_on_cpu<PackA>(whole.a.at(row + i, p), h, d, pa);
        run_on_cpu<Block>((const float*)pa, (const float*)pb, h, w, d, whole.c + (row + i) * whole.stride + col + j,
                          whole.stride, whole.add || p > 0);
        if (p + d >= whole.k) done(row + i, col + j, h, w);
      }
    }
}

}  // namespace

bool is_ours(at::ScalarType dtype, int64_t m, int64_t n, int64_t k) {
  return dtype == at::kFloat && multiplies_faster() && m >= Tile::rows && n >= Tile::cols && k > 0 &&
         m * n >= kSmall / k;
}

void multiply(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, bool add, Done done) {
  const Problem whole{view(a), view(b), c.mutable_data_ptr<float>(), c.stride(0), a.size(0), b.size(1), a.size(1), add};
  // A grid of parts, one a thread: each packs its own operands, so the parts should be near to square.
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  int64_t down = 1;
  for (int64_t d = 1; d <= threads; ++d)
    if (threads % d == 0 && whole.m / d + whole.n * d / threads < whole.m / down + whole.n * down / threads) down = d;
  const int64_t across = threads / down;
  const int64_t h = up((whole.m + down - 1) / down, Tile::rows), w = up((whole.n + across - 1) / across, Tile::cols);
  at::parallel_for(0, down * across, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t r = t / across * h, col = t % across * w;
      if (r < whole.m && col < whole.n) part(whole, r, col, std::min(h, whole.m - r), std::min(w, whole.n - col), done);
    }
  });
}

void multiply(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, bool add) {
  multiply(a, b, c, add, [](int64_t, int64_t, int64_t, int64_t) {});
}

at::Tensor product(const at::Tensor& a, bool a_t, const at::Tensor& b, bool b_t) {
  if (is_ours(a.scalar_type(), a.size(0), b.size(1), a.size(1))) {
    const at::Tensor c = fresh({a.size(0), b.size(1)}, a.options());
    multiply(a, b, c);
    return c;
  }
  return at::mm(a_t ? a.t().contiguous().t() : a.contiguous(), b_t ? b.t().contiguous().t() : b.contiguous());
}

}  // namespace megacore

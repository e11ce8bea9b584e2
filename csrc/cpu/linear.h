// What the passes of the linear family share: checks, rows, tiles, and the sum of a bias gradient.
//
// Tiles are kRows x kCols whatever the number of threads, so the bias gradient has one order of sums: kFew rows in
// turn, then the sums of a tile, both in the accumulation type, then tiles from the top in double.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <vector>

#include "check.h"
#include "cpu/gelu.h"
#include "cpu/storage.h"

namespace megacore {

constexpr int64_t kRows = 64, kCols = 1024, kFew = 8;

// For aten's operators inside a kernel. Under autocast its GEMM would choose its own dtype (the public functions have
// cast what autocast casts), and autograd would record what the operator's own gradient covers.
struct Inside {
  const c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
  const at::AutoDispatchBelowAutograd autograd;
};

inline int64_t rows_of(const at::Tensor& t) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
  return rows;
}

// [..., n] -> [rows, n]; a copy where the leading dimensions do not lie in one stride.
inline at::Tensor as_rows(const at::Tensor& t) {
  return t.reshape({rows_of(t), t.size(-1)});
}

// [rows, n] seen as [..., n] with the leading sizes of `like`.
inline at::Tensor with_leading(const at::Tensor& t, const at::Tensor& like) {
  auto shape = like.sizes().vec();
  shape.back() = t.size(-1);
  return t.view(shape);
}

// As rows whose elements are neighbours: the rows may lie anywhere, or be one row expanded.
inline at::Tensor as_near_rows(const at::Tensor& t) {
  const at::Tensor rows = as_rows(t);
  return rows.stride(1) == 1 ? rows : rows.contiguous();
}

template <class F>
void for_each_tile(int64_t rows, int64_t cols, int64_t width, F&& tile) {
  const int64_t across = (cols + width - 1) / width, down = (rows + kRows - 1) / kRows;
  at::parallel_for(0, down * across, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / across * kRows, c = i % across * width;
      tile(r, c, std::min(kRows, rows - r), std::min(width, cols - c));
    }
  });
}

// Sums of columns: a row of `sums` per tile of rows.
template <class A>
struct ColumnSums {
  int64_t down, cols;
  std::vector<A> sums;
  ColumnSums(int64_t rows, int64_t cols, bool wanted)
      : down((rows + kRows - 1) / kRows), cols(cols), sums(wanted ? down * cols : 0) {}
  A* at(int64_t r, int64_t c) { return sums.empty() ? nullptr : sums.data() + r / kRows * cols + c; }

  template <class T>
  void total(T* out) const {
    at::parallel_for(0, cols, 256, [&](int64_t begin, int64_t end) {
      std::vector<double> sum(end - begin);
      for (int64_t i = 0; i < down; ++i)
        for (int64_t c = begin; c < end; ++c) sum[c - begin] += sums[i * cols + c];
      for (int64_t c = begin; c < end; ++c) out[c] = narrow<T>(A(sum[c - begin]));
    });
  }
};

// The running sums of one tile, kept by a body on its stack.
template <class A, int64_t Width>
struct TileSums {
  A tile[Width] = {}, few[Width] = {};
  MEGACORE_INLINE void flush(int64_t row, int64_t rows, int64_t cols) {
    if (row % kFew != kFew - 1 && row != rows - 1) return;
    for (int64_t c = 0; c < cols; ++c) {
      tile[c] += few[c];
      few[c] = 0;
    }
  }
};

// What a pass applies: `halves` inputs of one output. Pre-activations of the second half lie beside the first.
struct Identity {
  static constexpr int64_t halves = 1;
};
template <class Form>
struct Gelu {
  static constexpr int64_t halves = 1;
};
struct Swiglu {
  static constexpr int64_t halves = 2;
};

template <class F>
void with_gelu(const char* op, c10::string_view approximate, F&& f) {
  MEGACORE_CHECK(approximate == "tanh" || approximate == "none", op, "approximate", "'" << approximate << "'",
                 "'tanh' or 'none' (erf)");
  approximate == "tanh" ? f(Gelu<TanhForm>{}) : f(Gelu<ErfForm>{});
}

}  // namespace megacore

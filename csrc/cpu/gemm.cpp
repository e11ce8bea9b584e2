#include "cpu/gemm.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

namespace megacore {
namespace {

constexpr int64_t kWide = 4 << 20, kPanel = 2 << 20;  // elements of fp32 scratch for rows of a, and for a panel of b

// How many rows of `each` elements: whole 64s, because a GEMM is slower at sizes between.
int64_t fit(int64_t elements, int64_t each, int64_t low, int64_t high) {
  return std::clamp(elements / std::max<int64_t>(each, 1) / 64 * 64, low, high);
}

// [rows, cols] at the start of a buffer that is large enough.
at::Tensor head(const at::Tensor& buffer, int64_t rows, int64_t cols) {
  return buffer.narrow(0, 0, rows * cols).view({rows, cols});
}

template <class Load>  // load(from, width) -> the panel of b as [K, width], widened
void for_each_block(const at::Tensor& a, int64_t cols, int64_t halves, int64_t panel, Load&& load, Consume consume) {
  const auto fp32 = a.options().dtype(at::kFloat);
  const int64_t m = a.size(0), k = a.size(1);
  const int64_t height = std::min(fit(kWide, k, 128, 2048), m);
  const at::Tensor wide = at::empty({height * k}, fp32), out = at::empty({height * panel * halves}, fp32);
  for (int64_t r = 0; r < m; r += height) {
    const int64_t h = std::min(height, m - r);
    const at::Tensor rows = head(wide, h, k);
    rows.copy_(a.narrow(0, r, h));
    for (int64_t c = 0; c < cols; c += panel) {
      const int64_t w = std::min(panel, cols - c);
      at::Tensor product = head(out, h, w * halves);
      at::mm_out(product, rows, load(c, w));
      consume(product, r, c);
    }
  }
}

}  // namespace

void widened_abt(const at::Tensor& a, const at::Tensor& b, int64_t halves, Consume consume) {
  const int64_t k = a.size(1), cols = b.size(0) / halves;
  const int64_t panel = std::min(fit(kPanel, k * halves, 64, 512), cols);
  const at::Tensor scratch = at::empty({halves * panel * k}, a.options().dtype(at::kFloat));
  const auto load = [&](int64_t from, int64_t w) {
    const at::Tensor p = head(scratch, halves * w, k);
    for (int64_t i = 0; i < halves; ++i) p.narrow(0, i * w, w).copy_(b.narrow(0, i * cols + from, w));
    return p.t();
  };
  for_each_block(a, cols, halves, panel, load, consume);
}

void widened_ab(const at::Tensor& a, const at::Tensor& b, Consume consume) {
  const int64_t k = a.size(1), cols = b.size(1);
  const int64_t panel = std::min(fit(kPanel, k, 64, 512), cols);
  const at::Tensor scratch = at::empty({k * panel}, a.options().dtype(at::kFloat));
  const auto load = [&](int64_t from, int64_t w) {
    const at::Tensor p = head(scratch, k, w);
    p.copy_(b.narrow(1, from, w));
    return p;
  };
  for_each_block(a, cols, 1, panel, load, consume);
}

void add_widened_atb(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  const auto fp32 = a.options().dtype(at::kFloat);
  const int64_t m = a.size(0), n = a.size(1), k = b.size(1);
  const int64_t panel = std::min<int64_t>(n, 4096), height = std::min(fit(kWide, panel + k, 128, 2048), m);
  const at::Tensor wide_a = at::empty({height * panel}, fp32), wide_b = at::empty({height * k}, fp32);
  for (int64_t c = 0; c < n; c += panel) {
    const int64_t w = std::min(panel, n - c);
    at::Tensor sum = out.narrow(0, c, w);
    for (int64_t r = 0; r < m; r += height) {
      const int64_t h = std::min(height, m - r);
      const at::Tensor x = head(wide_a, h, w), y = head(wide_b, h, k);
      x.copy_(a.narrow(0, r, h).narrow(1, c, w));
      y.copy_(b.narrow(0, r, h));
      at::addmm_out(sum, sum, x.t(), y);
    }
  }
}

}  // namespace megacore

// y = gelu(x W^T + b): the library's GEMM, then one pass over tiles that adds the bias, stores the pre-activation and
// applies GELU. Backward: one pass for dpre and the bias gradient; the two GEMMs of backward are aten's own.
//
// The pass moves 3 elements forward (read and write pre, write y) and 3 backward (read dy and pre, write dpre).
// Tiles are kRows x kCols whatever the number of threads, so the bias gradient has one order of sums: kFew rows in
// turn, then the sums of a tile, both in the accumulation type, then tiles from the top in double.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "check.h"
#include "cpu/fresh.h"
#include "cpu/gelu.h"
#include "cpu/storage.h"

namespace megacore {
namespace {

constexpr int64_t kRows = 64, kCols = 1024, kFew = 8;

template <class T, class Form>
struct Forward {  // pre += bias; y = gelu(pre)
  MEGACORE_INLINE static void run(T* pre, T* y, const T* bias, int64_t rows, int64_t cols, int64_t stride) {
    for (int64_t r = 0; r < rows; ++r) {
      T* __restrict p = pre + r * stride;
      T* __restrict out = y + r * stride;
      if (bias != nullptr)
        for (int64_t c = 0; c < cols; ++c) p[c] = narrow<T>(widen(p[c]) + widen(bias[c]));
      for (int64_t c = 0; c < cols; ++c) out[c] = narrow<T>(gelu<Form>(widen(p[c])));
    }
  }
};

template <class T, class Form>
struct Backward {  // dpre = dy * gelu'(pre); sums[c] = sum of its rows, before rounding
  MEGACORE_INLINE static void run(const T* dy, int64_t dy_stride, const T* pre, T* dpre, acc_t<T>* sums, int64_t rows,
                                  int64_t cols, int64_t stride) {
    using A = acc_t<T>;
    A tile[kCols] = {}, few[kCols] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const T* __restrict g = dy + r * dy_stride;
      const T* __restrict p = pre + r * stride;
      T* __restrict out = dpre + r * stride;
      for (int64_t c = 0; c < cols; ++c) {
        const A d = widen(g[c]) * gelu_derivative<Form>(widen(p[c]));
        out[c] = narrow<T>(d);
        few[c] += d;
      }
      if (r % kFew == kFew - 1 || r == rows - 1)
        for (int64_t c = 0; c < cols; ++c) {
          tile[c] += few[c];
          few[c] = 0;
        }
    }
    if (sums != nullptr) std::copy(tile, tile + cols, sums);
  }
};

template <class F>
void for_each_tile(int64_t rows, int64_t cols, F&& tile) {
  const int64_t across = (cols + kCols - 1) / kCols, down = (rows + kRows - 1) / kRows;
  at::parallel_for(0, down * across, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / across * kRows, c = i % across * kCols;
      tile(r, c, std::min(kRows, rows - r), std::min(kCols, cols - c));
    }
  });
}

template <class F>
void with_form(const char* op, c10::string_view approximate, F&& f) {
  MEGACORE_CHECK(approximate == "tanh" || approximate == "none", op, "approximate", "'" << approximate << "'",
                 "'tanh' or 'none' (erf)");
  approximate == "tanh" ? f(TanhForm{}) : f(ErfForm{});
}

std::tuple<at::Tensor, at::Tensor> linear_gelu(const at::Tensor& x, const at::Tensor& weight,
                                               const std::optional<at::Tensor>& bias, c10::string_view approximate) {
  constexpr const char* op = "linear_gelu";
  // Under autocast aten's GEMM would choose its own dtype; the public function has cast what autocast casts.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  check_floating(op, "x", x);
  check_same(op, "weight", weight, "x", x);
  MEGACORE_CHECK(x.dim() >= 1, op, "x", describe(x), "[..., K]");
  MEGACORE_CHECK(weight.dim() == 2 && weight.size(1) == x.size(-1), op, "weight", describe(weight),
                 "[N, " << x.size(-1) << "], the last size of x");
  const int64_t n = weight.size(0), k = x.size(-1);
  if (bias) {
    check_same(op, "bias", *bias, "x", x);
    MEGACORE_CHECK(bias->dim() == 1 && bias->size(0) == n, op, "bias", describe(*bias),
                   "[" << n << "], the rows of weight");
  }
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  // The library orders its sums by layout and leading dimension: copies make a view give the bits of a contiguous
  // tensor.
  const at::Tensor x2 = x.reshape({rows, k}).contiguous(), wt = weight.contiguous().t();
  // In 16 bits the bias enters inside the GEMM, before the one rounding of the pre-activation.
  const bool bias_in_pass = bias && x.element_size() >= 4;
  at::Tensor pre = fresh({rows, n}, x.options());
  bias && !bias_in_pass ? at::addmm_out(pre, *bias, x2, wt) : at::mm_out(pre, x2, wt);
  check_same(op, "pre", pre, "x", x);  // what follows reads and writes pre as x's type
  const at::Tensor y = fresh({rows, n}, x.options());
  const at::Tensor b = bias_in_pass ? bias->contiguous() : at::Tensor();

  with_form(op, approximate, [&](auto form) {
    dispatch_storage(x.scalar_type(), op, [&](auto zero) {
      using T = decltype(zero);
      T *p = data<T>(pre), *out = data<T>(y);
      const T* bp = b.defined() ? data<T>(b) : nullptr;
      for_each_tile(rows, n, [&](int64_t r, int64_t c, int64_t h, int64_t w) {
        run_on_cpu<Forward<T, decltype(form)>>(p + r * n + c, out + r * n + c, bp ? bp + c : nullptr, h, w, n);
      });
    });
  });
  auto shape = x.sizes().vec();
  shape.back() = n;
  return {y.view(shape), pre.view(shape)};
}

// dy [..., N] any strides; pre [..., N] -> dpre [..., N], dbias [N] (empty unless asked for).
std::tuple<at::Tensor, at::Tensor> linear_gelu_dpre(const at::Tensor& dy, const at::Tensor& pre, bool bias_grad,
                                                    c10::string_view approximate) {
  constexpr const char* op = "linear_gelu_dpre";
  check_floating(op, "pre", pre);
  check_same(op, "dy", dy, "pre", pre);
  MEGACORE_CHECK(pre.dim() >= 1 && dy.sizes() == pre.sizes(), op, "dy", describe(dy),
                 pre.sizes() << ", the shape of pre");
  const int64_t n = pre.size(-1);
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < pre.dim(); ++d) rows *= pre.size(d);
  const at::Tensor dy2 = dy.reshape({rows, n}), p2 = pre.contiguous();
  const at::Tensor g = dy2.stride(1) == 1 ? dy2 : dy2.contiguous();  // rows may lie anywhere, or be one row expanded
  const at::Tensor dpre = fresh({rows, n}, pre.options());
  const at::Tensor dbias = at::empty({bias_grad ? n : 0}, pre.options());
  const int64_t down = (rows + kRows - 1) / kRows;

  with_form(op, approximate, [&](auto form) {
    dispatch_storage(pre.scalar_type(), op, [&](auto zero) {
      using T = decltype(zero);
      using A = acc_t<T>;
      const T *gp = data<T>(g), *pp = data<T>(p2);
      T* out = data<T>(dpre);
      std::vector<A> sums(bias_grad ? down * n : 0);
      for_each_tile(rows, n, [&](int64_t r, int64_t c, int64_t h, int64_t w) {
        A* s = bias_grad ? sums.data() + r / kRows * n + c : nullptr;
        run_on_cpu<Backward<T, decltype(form)>>(gp + r * g.stride(0) + c, g.stride(0), pp + r * n + c, out + r * n + c,
                                                s, h, w, n);
      });
      T* db = data<T>(dbias);
      if (bias_grad)
        for (int64_t c = 0; c < n; ++c) {
          double total = 0;
          for (int64_t i = 0; i < down; ++i) total += sums[i * n + c];
          db[c] = narrow<T>(A(total));
        }
    });
  });
  return {dpre.view(pre.sizes()), dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(megacore, CPU, m) {
  m.impl("linear_gelu", linear_gelu);
  m.impl("linear_gelu_dpre", linear_gelu_dpre);
}

}  // namespace megacore

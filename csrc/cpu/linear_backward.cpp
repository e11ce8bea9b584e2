// Backward of the linear family: one pass for dpre and the bias gradient (read dy and pre, write dpre), and the two
// products, each by itself: a pipeline schedule may defer the second.
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "cpu/fresh.h"
#include "cpu/gemm.h"
#include "cpu/linear.h"
#include "cpu/native.h"
#include "cpu/product.h"
#include "cpu/silu.h"

namespace megacore {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;

template <class T>
struct Tile {
  const T* dy;
  int64_t dy_stride;
  const T* pre;
  T* dpre;
  int64_t stride, up;  // of pre and dpre; from the first half to the second, in sums too
  acc_t<T>* sums;      // or null
  int64_t rows, cols;
};

// dpre = dy * act'(pre); sums[c] = sum of its rows, before rounding.
template <class T, class Act>
struct Backward;

template <class T, class Form>
struct Backward<T, Gelu<Form>> {
  MEGACORE_INLINE static void run(Tile<T> t) {
    using A = acc_t<T>;
    TileSums<A, kCols> sums;
    for (int64_t r = 0; r < t.rows; ++r) {
      const T* __restrict g = t.dy + r * t.dy_stride;
      const T* __restrict p = t.pre + r * t.stride;
      T* __restrict out = t.dpre + r * t.stride;
      for (int64_t c = 0; c < t.cols; ++c) {
        const A d = widen(g[c]) * gelu_derivative<Form>(widen(p[c]));
        out[c] = narrow<T>(d);
        sums.few[c] += d;
      }
      sums.flush(r, t.rows, t.cols);
    }
    if (t.sums != nullptr) std::copy(sums.tile, sums.tile + t.cols, t.sums);
  }
};

template <class T>
struct Backward<T, Swiglu> {
  MEGACORE_INLINE static void run(Tile<T> t) {
    using A = acc_t<T>;
    TileSums<A, kCols / 2> gates, ups;
    for (int64_t r = 0; r < t.rows; ++r) {
      const T* __restrict g = t.dy + r * t.dy_stride;
      const T* __restrict gate = t.pre + r * t.stride;
      const T* __restrict up = gate + t.up;
      T* __restrict dgate = t.dpre + r * t.stride;
      T* __restrict dup = dgate + t.up;
      for (int64_t c = 0; c < t.cols; ++c) {
        const A d = widen(g[c]), v = widen(gate[c]);
        const A dv = d * widen(up[c]) * silu_derivative(v), du = d * silu(v);
        dgate[c] = narrow<T>(dv);
        dup[c] = narrow<T>(du);
        gates.few[c] += dv;
        ups.few[c] += du;
      }
      gates.flush(r, t.rows, t.cols);
      ups.flush(r, t.rows, t.cols);
    }
    if (t.sums == nullptr) return;
    std::copy(gates.tile, gates.tile + t.cols, t.sums);
    std::copy(ups.tile, ups.tile + t.cols, t.sums + t.up);
  }
};

template <class T>
struct Sum {
  MEGACORE_INLINE static void run(const T* x, int64_t stride, acc_t<T>* out, int64_t rows, int64_t cols) {
    TileSums<acc_t<T>, kCols> sums;
    for (int64_t r = 0; r < rows; ++r) {
      const T* __restrict row = x + r * stride;
      for (int64_t c = 0; c < cols; ++c) sums.few[c] += widen(row[c]);
      sums.flush(r, rows, cols);
    }
    std::copy(sums.tile, sums.tile + cols, out);
  }
};

// dy [..., N / halves] any strides; pre [..., N] -> dpre [..., N], dbias [N] (empty unless asked for).
template <class Act>
Pair backward(const char* op, const at::Tensor& dy, const at::Tensor& pre, bool bias_grad) {
  const int64_t n = pre.size(-1), f = n / Act::halves, rows = rows_of(pre);
  const at::Tensor p2 = pre.contiguous(), g = as_near_rows(dy);
  const at::Tensor dpre = fresh({rows, n}, pre.options());
  const at::Tensor dbias = at::empty({bias_grad ? n : 0}, pre.options());
  dispatch_storage(pre.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    const T *gp = data<T>(g), *pp = data<T>(p2);
    T* out = data<T>(dpre);
    ColumnSums<acc_t<T>> sums(rows, n, bias_grad);
    for_each_tile(rows, f, kCols / Act::halves, [&](int64_t r, int64_t c, int64_t h, int64_t w) {
      run_on_cpu<Backward<T, Act>>(
          Tile<T>{gp + r * g.stride(0) + c, g.stride(0), pp + r * n + c, out + r * n + c, n, f, sums.at(r, c), h, w});
    });
    if (bias_grad) sums.total(data<T>(dbias));
  });
  return {dpre.view(pre.sizes()), dbias};
}

Pair linear_gelu_dpre(const at::Tensor& dy, const at::Tensor& pre, bool bias_grad, c10::string_view approximate) {
  constexpr const char* op = "linear_gelu_dpre";
  check_floating(op, "pre", pre);
  check_same(op, "dy", dy, "pre", pre);
  MEGACORE_CHECK(pre.dim() >= 1 && dy.sizes() == pre.sizes(), op, "dy", describe(dy),
                 pre.sizes() << ", the shape of pre");
  Pair out;
  with_gelu(op, approximate, [&](auto act) { out = backward<decltype(act)>(op, dy, pre, bias_grad); });
  return out;
}

Pair linear_swiglu_dpre(const at::Tensor& dy, const at::Tensor& pre, bool bias_grad) {
  constexpr const char* op = "linear_swiglu_dpre";
  check_floating(op, "pre", pre);
  check_same(op, "dy", dy, "pre", pre);
  MEGACORE_CHECK(pre.dim() >= 1 && pre.size(-1) % 2 == 0, op, "pre", describe(pre), "[..., 2F]");
  auto wanted = pre.sizes().vec();
  wanted.back() /= 2;
  MEGACORE_CHECK(dy.sizes() == at::IntArrayRef(wanted), op, "dy", describe(dy),
                 at::IntArrayRef(wanted) << ", half of pre");
  return backward<Swiglu>(op, dy, pre, bias_grad);
}

at::Tensor linear_dbias(const at::Tensor& dpre) {  // [..., N] any strides -> [N]
  constexpr const char* op = "linear_dbias";
  check_floating(op, "dpre", dpre);
  MEGACORE_CHECK(dpre.dim() >= 1, op, "dpre", describe(dpre), "[..., N]");
  const int64_t n = dpre.size(-1);
  const at::Tensor g = as_near_rows(dpre), dbias = at::empty({n}, dpre.options());
  dispatch_storage(dpre.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    const T* gp = data<T>(g);
    ColumnSums<acc_t<T>> sums(g.size(0), n, true);
    for_each_tile(g.size(0), n, kCols, [&](int64_t r, int64_t c, int64_t h, int64_t w) {
      run_on_cpu<Sum<T>>(gp + r * g.stride(0) + c, g.stride(0), sums.at(r, c), h, w);
    });
    sums.total(data<T>(dbias));
  });
  return dbias;
}

at::Tensor linear_dgrad(const at::Tensor& dpre, const at::Tensor& weight) {  // [..., N], [N, K] -> [..., K]
  constexpr const char* op = "linear_dgrad";
  const Inside guard;
  check_floating(op, "dpre", dpre);
  check_same(op, "weight", weight, "dpre", dpre);
  MEGACORE_CHECK(dpre.dim() >= 1, op, "dpre", describe(dpre), "[..., N]");
  MEGACORE_CHECK(weight.dim() == 2 && weight.size(0) == dpre.size(-1), op, "weight", describe(weight),
                 "[" << dpre.size(-1) << ", K], rows as the last size of dpre");
  const at::Tensor rows = as_rows(dpre);
  if (native(dpre.scalar_type())) return with_leading(product(rows, false, weight, false), dpre);
  const at::Tensor dx = fresh({rows.size(0), weight.size(1)}, dpre.options());
  widened_ab(rows, weight, [&](const at::Tensor& c, int64_t row, int64_t col) {
    dx.narrow(0, row, c.size(0)).narrow(1, col, c.size(1)).copy_(c);
  });
  return with_leading(dx, dpre);
}

Pair checked_rows(const char* op, const at::Tensor& dpre, const at::Tensor& x) {
  check_floating(op, "x", x);
  check_same(op, "dpre", dpre, "x", x);
  MEGACORE_CHECK(x.dim() >= 1, op, "x", describe(x), "[..., K]");
  MEGACORE_CHECK(dpre.dim() == x.dim() && dpre.sizes().slice(0, x.dim() - 1) == x.sizes().slice(0, x.dim() - 1), op,
                 "dpre", describe(dpre), "[..., N] with the leading sizes of x " << x.sizes());
  return {as_rows(dpre), as_rows(x)};
}

at::Tensor linear_wgrad(const at::Tensor& dpre, const at::Tensor& x) {  // [..., N], [..., K] -> [N, K]
  const Inside guard;
  const auto [a, b] = checked_rows("linear_wgrad", dpre, x);
  if (native(x.scalar_type())) return product(a.t(), true, b, false);
  const int64_t n = a.size(1), k = b.size(1);
  const at::Tensor dweight = fresh({n, k}, x.options());
  const int64_t panel = std::min(std::clamp<int64_t>((4 << 20) / std::max<int64_t>(k, 1), 64, 4096), n);
  for (int64_t c = 0; c < n; c += panel) {  // fp32 sums of a panel, rounded once
    const int64_t w = std::min(panel, n - c);
    const at::Tensor sums = at::zeros({w, k}, x.options().dtype(at::kFloat));
    add_widened_atb(sums, a.narrow(1, c, w), b);
    dweight.narrow(0, c, w).copy_(sums);
  }
  return dweight;
}

Pair linear_wgrad_dbias(const at::Tensor& dpre, const at::Tensor& x) {  // what a GPU does in one product
  return {linear_wgrad(dpre, x), linear_dbias(dpre)};
}

Pair linear_gelu_dgrad(const at::Tensor& dpre, const at::Tensor& weight, const at::Tensor& pre, bool bias_grad,
                       c10::string_view approximate) {  // as that
  return linear_gelu_dpre(linear_dgrad(dpre, weight), pre, bias_grad, approximate);
}

// main_grad += dpre^T x in main_grad's dtype: 16 bits are widened whatever the CPU, so that no product is rounded.
void linear_wgrad_into(const at::Tensor& dpre, const at::Tensor& x, at::Tensor& main_grad) {
  constexpr const char* op = "linear_wgrad_";
  const Inside guard;
  const auto [a, b] = checked_rows(op, dpre, x);
  const auto wanted = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  MEGACORE_CHECK(main_grad.device() == x.device(), op, "main_grad", describe(main_grad),
                 "device " << x.device() << " as x");
  MEGACORE_CHECK(main_grad.scalar_type() == wanted, op, "main_grad", describe(main_grad),
                 "dtype " << wanted << ", in which gradients of " << x.scalar_type() << " are summed");
  MEGACORE_CHECK(main_grad.dim() == 2 && main_grad.size(0) == a.size(1) && main_grad.size(1) == b.size(1), op,
                 "main_grad", describe(main_grad), "[" << a.size(1) << ", " << b.size(1) << "], N of dpre and K of x");
  if (x.element_size() == 2)
    add_widened_atb(main_grad, a, b);
  else if (main_grad.stride(1) == 1 && is_ours(x.scalar_type(), a.size(1), b.size(1), a.size(0)))
    multiply(a.t(), b, main_grad, true);
  else
    at::addmm_out(main_grad, main_grad, a.contiguous().t(), b.contiguous());
}

constexpr int64_t kBlock = 1024;

// out (+)= a b, any strides of a and b; 16-bit operands may be summed into an fp32 out, of which nothing is rounded.
void matmul_into(const at::Tensor& a, const at::Tensor& b, at::Tensor& out, bool add) {
  constexpr const char* op = "matmul_into";
  const Inside guard;
  check_floating(op, "a", a);
  check_same(op, "b", b, "a", a);
  MEGACORE_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0), op, "b", describe(b),
                 "[K, N] with the K of a " << a.sizes());
  MEGACORE_CHECK(out.dim() == 2 && out.size(0) == a.size(0) && out.size(1) == b.size(1), op, "out", describe(out),
                 "[" << a.size(0) << ", " << b.size(1) << "]");
  const bool wider = a.element_size() == 2 && out.scalar_type() == at::kFloat;
  MEGACORE_CHECK(wider || out.scalar_type() == a.scalar_type(), op, "out", describe(out),
                 "dtype " << a.scalar_type() << " as a, or Float");
  if (!wider && native(a.scalar_type())) {
    if (out.stride(1) == 1 && is_ours(a.scalar_type(), a.size(0), b.size(1), a.size(1)))
      return multiply(a, b, out, add);
    // In blocks of columns: for 50304 of them at once MKL packs 6 MB, 11 MB on two threads, not 2 and 4.
    for (int64_t c = 0; c < b.size(1); c += kBlock) {
      const int64_t w = std::min(kBlock, b.size(1) - c);
      at::Tensor to = out.narrow(1, c, w);
      add ? at::addmm_out(to, to, a, b.narrow(1, c, w)) : at::mm_out(to, a, b.narrow(1, c, w));
    }
    return;
  }
  if (wider) {
    if (!add) out.zero_();
    return add_widened_atb(out, a.t(), b);
  }
  MEGACORE_CHECK(!add, op, "add", "true", "false, or an fp32 out: sums are not rounded to 16 bits");
  const auto store = [&](const at::Tensor& c, int64_t row, int64_t col) {
    out.narrow(0, row, c.size(0)).narrow(1, col, c.size(1)).copy_(c);
  };
  b.stride(0) == 1 ? widened_abt(a, b.t(), 1, store) : widened_ab(a, b, store);
}

}  // namespace

TORCH_LIBRARY_IMPL(megacore, CPU, m) {
  m.impl("linear_gelu_dpre", linear_gelu_dpre);
  m.impl("linear_swiglu_dpre", linear_swiglu_dpre);
  m.impl("linear_dbias", linear_dbias);
  m.impl("linear_dgrad", linear_dgrad);
  m.impl("linear_wgrad", linear_wgrad);
  m.impl("linear_wgrad_", linear_wgrad_into);
  m.impl("matmul_into", matmul_into);
  m.impl("linear_wgrad_dbias", linear_wgrad_dbias);
  m.impl("linear_gelu_dgrad", linear_gelu_dgrad);
}

}  // namespace megacore

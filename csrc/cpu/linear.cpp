// y = x W^T + b, gelu of it, and silu(gate) * up of its halves: the library's GEMM, then one pass over tiles that adds
// the bias, stores the pre-activation and applies the activation.
//
// The pass moves 3 elements (read and write pre, write y). Where 16 bits are not native (native.h) the GEMM leaves fp32
// panels, and the pass reads those from the cache and rounds: the bias is added before the one rounding.
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
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
using Bias = std::optional<at::Tensor>;

// A tile of the pass. `*_up`: from the first half to the second. Where S is T, src is pre.
template <class S, class T>
struct Tile {
  const S* src;
  int64_t src_stride, src_up;
  T* pre;
  int64_t pre_stride, pre_up;
  T* y;
  int64_t y_stride;
  const T* bias;  // or null
  int64_t bias_up, rows, cols;
};

template <class S, class T>
MEGACORE_INLINE void store(const S* src, T* __restrict pre, const T* bias, int64_t cols) {  // pre = src + bias
  if constexpr (std::is_same_v<S, T>) {
    if (bias != nullptr)
      for (int64_t c = 0; c < cols; ++c) pre[c] = narrow<T>(widen(pre[c]) + widen(bias[c]));
  } else {
    const S* __restrict from = src;
    if (bias != nullptr)
      for (int64_t c = 0; c < cols; ++c) pre[c] = narrow<T>(from[c] + widen(bias[c]));
    else
      for (int64_t c = 0; c < cols; ++c) pre[c] = narrow<T>(from[c]);
  }
}

template <class T>
MEGACORE_INLINE void apply(Identity, const T*, const T*, T*, int64_t) {}

template <class T, class Form>
MEGACORE_INLINE void apply(Gelu<Form>, const T* __restrict pre, const T*, T* __restrict y, int64_t cols) {
  for (int64_t c = 0; c < cols; ++c) y[c] = narrow<T>(gelu<Form>(widen(pre[c])));
}

template <class T>
MEGACORE_INLINE void apply(Swiglu, const T* __restrict gate, const T* __restrict up, T* __restrict y, int64_t cols) {
  for (int64_t c = 0; c < cols; ++c) y[c] = narrow<T>(silu(widen(gate[c])) * widen(up[c]));
}

template <class S, class T, class Act>
struct Forward {
  MEGACORE_INLINE static void run(Tile<S, T> t) {
    for (int64_t r = 0; r < t.rows; ++r) {
      const S* src = t.src + r * t.src_stride;
      T* pre = t.pre + r * t.pre_stride;
      store<S, T>(src, pre, t.bias, t.cols);
      if constexpr (Act::halves == 2)
        store<S, T>(src + t.src_up, pre + t.pre_up, t.bias == nullptr ? nullptr : t.bias + t.bias_up, t.cols);
      apply(Act{}, pre, pre + t.pre_up, t.y + r * t.y_stride, t.cols);
    }
  }
};

// The pass over [rows, cols] (of each half) whose first elements `t` points to.
template <class Act, class S, class T>
void pass(Tile<S, T> whole, int64_t rows, int64_t cols) {
  for_each_tile(rows, cols, kCols / Act::halves, [&](int64_t r, int64_t c, int64_t h, int64_t w) {
    Tile<S, T> t = whole;
    t.src += r * t.src_stride + c;
    t.pre += r * t.pre_stride + c;
    if (t.y != nullptr) t.y += r * t.y_stride + c;
    if (t.bias != nullptr) t.bias += c;
    t.rows = h;
    t.cols = w;
    run_on_cpu<Forward<S, T, Act>>(t);
  });
}

void check(const char* op, const at::Tensor& x, const at::Tensor& weight, const Bias& bias) {
  check_floating(op, "x", x);
  check_same(op, "weight", weight, "x", x);
  MEGACORE_CHECK(x.dim() >= 1, op, "x", describe(x), "[..., K]");
  MEGACORE_CHECK(weight.dim() == 2 && weight.size(1) == x.size(-1), op, "weight", describe(weight),
                 "[N, " << x.size(-1) << "], the last size of x");
  if (!bias) return;
  check_same(op, "bias", *bias, "x", x);
  MEGACORE_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op, "bias", describe(*bias),
                 "[" << weight.size(0) << "], the rows of weight");
}

// The library orders its sums by layout and leading dimension: copies make a view give the bits of a contiguous tensor.
at::Tensor by_library(const at::Tensor& x, const at::Tensor& weight, const Bias& bias) {
  const at::Tensor x2 = x.contiguous(), wt = weight.contiguous().t();
  return bias ? at::addmm(*bias, x2, wt) : at::mm(x2, wt);
}

// y, pre by our own product: the pass follows it block by block, while a block is near in the cache.
template <class Act>
Pair by_ours(const at::Tensor& x, const at::Tensor& weight, const Bias& bias) {
  const int64_t rows = x.size(0), n = weight.size(0), f = n / Act::halves;
  const at::Tensor pre = fresh({rows, n}, x.options());
  const at::Tensor y = std::is_same_v<Act, Identity> ? pre : fresh({rows, f}, x.options());
  const at::Tensor b = bias ? bias->contiguous() : at::Tensor();
  float* p = data<float>(pre);
  const auto finish = [&](int64_t r, int64_t c, int64_t h, int64_t w) {
    const float* from = bias ? data<float>(b) + c : nullptr;
    pass<Act>(
        Tile<float, float>{p + r * n + c, n, f, p + r * n + c, n, f, data<float>(y) + r * f + c, f, from, f, 0, 0}, h,
        w);
  };
  const bool nothing = std::is_same_v<Act, Identity> && !bias;
  if (Act::halves == 1 && !nothing) {
    multiply(x, weight.t(), pre, false, finish);
  } else {  // both halves of a column are there only at the end
    multiply(x, weight.t(), pre);
    if (!nothing) finish(0, 0, rows, f);
  }
  return {y, pre};
}

// pre [rows, halves * F] and, but for Identity, y [rows, F].
template <class Act>
Pair widened(const char* op, const at::Tensor& x, const at::Tensor& weight, const Bias& bias) {
  const int64_t n = weight.size(0), f = n / Act::halves;
  const at::Tensor pre = fresh({x.size(0), n}, x.options());
  const at::Tensor y = std::is_same_v<Act, Identity> ? pre : fresh({x.size(0), f}, x.options());
  const at::Tensor b = bias ? bias->contiguous() : at::Tensor();
  dispatch_storage(x.scalar_type(), op, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (sizeof(T) == 2)
      widened_abt(x, weight, Act::halves, [&](const at::Tensor& c, int64_t row, int64_t col) {
        const int64_t w = c.size(1) / Act::halves;
        const T* bp = bias ? data<T>(b) + col : nullptr;
        pass<Act>(Tile<float, T>{data<float>(c), c.size(1), w, data<T>(pre) + row * n + col, n, f,
                                 data<T>(y) + row * f + col, f, bp, f, 0, 0},
                  c.size(0), w);
      });
  });
  return {y, pre};
}

template <class Act>
Pair activated(const char* op, const at::Tensor& x_, const at::Tensor& weight, const Bias& bias) {
  const Inside guard;
  const at::Tensor x = as_rows(x_);
  const int64_t n = weight.size(0), f = n / Act::halves;
  at::Tensor y, pre;
  if (!native(x.scalar_type())) {
    std::tie(y, pre) = widened<Act>(op, x, weight, bias);
  } else if (is_ours(x.scalar_type(), x.size(0), n, x.size(1))) {
    std::tie(y, pre) = by_ours<Act>(x, weight, bias);
  } else {
    // In 16 bits the bias enters inside the GEMM, before the one rounding of the pre-activation.
    const bool bias_in_pass = bias && x.element_size() >= 4;
    pre = by_library(x, weight, bias_in_pass ? std::nullopt : bias);
    check_same(op, "pre", pre, "x", x);  // what follows reads and writes pre as x's type
    y = fresh({x.size(0), f}, x.options());
    const at::Tensor b = bias_in_pass ? bias->contiguous() : at::Tensor();
    dispatch_storage(x.scalar_type(), op, [&](auto zero) {
      using T = decltype(zero);
      T* p = data<T>(pre);
      pass<Act>(Tile<T, T>{p, n, f, p, n, f, data<T>(y), f, bias_in_pass ? data<T>(b) : nullptr, f, 0, 0}, x.size(0),
                f);
    });
  }
  return {with_leading(y, x_), with_leading(pre, x_)};
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const Bias& bias) {
  check("linear", x, weight, bias);
  const Inside guard;
  const at::Tensor rows = as_rows(x);
  at::Tensor y;
  if (!native(x.scalar_type()))
    y = std::get<0>(widened<Identity>("linear", rows, weight, bias));
  else if (is_ours(x.scalar_type(), rows.size(0), weight.size(0), rows.size(1)))
    y = std::get<0>(by_ours<Identity>(rows, weight, bias));
  else
    y = by_library(rows, weight, bias);
  return with_leading(y, x);
}

Pair linear_gelu(const at::Tensor& x, const at::Tensor& weight, const Bias& bias, c10::string_view approximate) {
  constexpr const char* op = "linear_gelu";
  check(op, x, weight, bias);
  Pair out;
  with_gelu(op, approximate, [&](auto act) { out = activated<decltype(act)>(op, x, weight, bias); });
  return out;
}

Pair linear_swiglu(const at::Tensor& x, const at::Tensor& weight, const Bias& bias) {
  constexpr const char* op = "linear_swiglu";
  check(op, x, weight, bias);
  MEGACORE_CHECK(weight.size(0) % 2 == 0, op, "weight", describe(weight),
                 "[2F, " << x.size(-1) << "]: gate rows, then as many up rows");
  return activated<Swiglu>(op, x, weight, bias);
}

}  // namespace

TORCH_LIBRARY_IMPL(megacore, CPU, m) {
  m.impl("linear", linear);
  m.impl("linear_gelu", linear_gelu);
  m.impl("linear_swiglu", linear_swiglu);
}

}  // namespace megacore
